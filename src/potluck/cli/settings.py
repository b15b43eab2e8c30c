"""Where a setting comes from: `<data>/potluck.toml`, over it the environment, over it flags.

Rule: what cannot be is collected, not raised: whoever mends one mistake should know of all.
"""

import difflib
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from potluck.cli.failures import CommandError, usage
from potluck.cli.folder import DataFolder

FOLDER_DEFAULT: Final = "~/.potluck"
PORT_DEFAULT: Final = 8477
NODES_DEFAULT: Final = 2
NODES_MAX: Final = 64
_PORT_MAX: Final = 65_535
_CODE: Final = "invalid_setting"
_KNOWN: Final = {"port": int, "nodes": int, "model": str}
_TYPES: Final = {int: "a whole number", str: "text in quotes"}
_RANGES: Final[dict[str, tuple[Callable[[int], bool], str]]] = {
    "port": (
        lambda port: 0 <= port <= _PORT_MAX,
        f"choose 1 to {_PORT_MAX}, or 0 for any free one",
    ),
    "nodes": (lambda nodes: 1 <= nodes <= NODES_MAX, f"choose 1 to {NODES_MAX}"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    port: int
    nodes: int
    model: Path | None
    """A local GGUF file to serve instead of the built-in model."""


def default_folder() -> Path:
    """`~/.potluck`, unless POTLUCK_DATA_DIR says otherwise."""
    return Path(os.environ.get("POTLUCK_DATA_DIR", FOLDER_DEFAULT)).expanduser()


def for_up(
    folder: DataFolder, *, port: int | None, nodes: int | None, model: Path | None
) -> tuple[UpSettings, list[CommandError]]:
    """With mistakes, defaults stand where they were made."""
    mistakes: list[CommandError] = []
    file = _read(folder.settings, mistakes)
    chosen_model = _pick("model", model, file, None, mistakes)
    settings = UpSettings(
        port=_pick("port", port, file, PORT_DEFAULT, mistakes),
        nodes=_pick("nodes", nodes, file, NODES_DEFAULT, mistakes),
        model=Path(chosen_model).expanduser().resolve() if chosen_model else None,
    )
    return settings, mistakes


def _pick(
    name: str, flag: Any, file: dict[str, Any], default: Any, mistakes: list[CommandError]
) -> Any:
    place, value = _given(name, flag, file, default)
    if isinstance(value, str) and _KNOWN[name] is int:
        try:
            value = int(value)
        except ValueError:
            mistakes.append(_bad(place, value, "give a whole number"))
            return default
    fits, mend = _RANGES.get(name, (None, ""))
    if fits is not None and not fits(value):
        mistakes.append(_bad(place, value, mend))
        return default
    return value


def _given(name: str, flag: Any, file: dict[str, Any], default: Any) -> tuple[str, Any]:
    """Where it was given, in the words of that place, and what."""
    variable = f"POTLUCK_{name.upper()}"
    if flag is not None:
        return f"--{name}", flag
    if variable in os.environ:
        return variable, os.environ[variable]
    return f"potluck.toml: {name}", file.get(name, default)


def _read(path: Path, mistakes: list[CommandError]) -> dict[str, Any]:
    """What is known and of the right type."""
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        mistakes.append(
            CommandError(f"{path} cannot be read: {error.strerror}", "run as its owner")
        )
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        mistakes.append(usage(f"{path} is no TOML: {error}", "mend or remove the file", _CODE))
        return {}
    wrong = {name: _wrong(path, name, value) for name, value in found.items()}
    mistakes += [mistake for mistake in wrong.values() if mistake is not None]
    return {name: value for name, value in found.items() if wrong[name] is None}


def _wrong(path: Path, name: str, value: object) -> CommandError | None:
    if name not in _KNOWN:
        close = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.5)
        known = f"there are {', '.join(sorted(_KNOWN))}"
        mend = f"did you mean `{close[0]}`? {known}" if close else known
        return usage(f"{path}: there is no setting `{name}`", mend, _CODE)
    # To Python `true` is a number.
    if not isinstance(value, _KNOWN[name]) or isinstance(value, bool):
        return _bad(f"{path}: {name}", value, f"give {_TYPES[_KNOWN[name]]}")
    return None


def _bad(place: str, value: object, mend: str) -> CommandError:
    return usage(f"{place} cannot be {value!r}", mend, _CODE)
