"""Where a setting comes from: `<data>/potluck.toml`, over it the environment, over it flags."""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from potluck.cli.failures import CommandError
from potluck.cli.folder import DataFolder
from potluck.messages import errors

PORT_DEFAULT: Final = 8477
NODES_DEFAULT: Final = 2
NODES_MAX: Final = 64
_KNOWN: Final = {"port": int, "nodes": int, "model": str}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    port: int
    nodes: int
    model: Path | None
    """A local GGUF file to serve instead of the built-in model."""


def default_folder() -> Path:
    """`~/.potluck`, unless POTLUCK_DATA_DIR says otherwise."""
    return Path(os.environ.get("POTLUCK_DATA_DIR", "~/.potluck")).expanduser()


def for_up(
    folder: DataFolder, *, port: int | None, nodes: int | None, model: Path | None
) -> UpSettings:
    """Raises `CommandError` for a value that cannot be."""
    file = _read(folder.settings)
    chosen_port = _pick("port", port, file, PORT_DEFAULT)
    chosen_nodes = _pick("nodes", nodes, file, NODES_DEFAULT)
    chosen_model = _pick("model", model, file, None)
    if not 0 <= chosen_port <= 65_535:
        raise _bad("port", chosen_port, "choose 1 to 65535, or 0 for any free one")
    if not 1 <= chosen_nodes <= NODES_MAX:
        raise _bad("nodes", chosen_nodes, f"choose 1 to {NODES_MAX}")
    path = Path(chosen_model).expanduser().resolve() if chosen_model else None
    return UpSettings(port=chosen_port, nodes=chosen_nodes, model=path)


def _pick(name: str, flag: Any, file: dict[str, Any], default: Any) -> Any:
    if flag is not None:
        return flag
    text = os.environ.get(f"POTLUCK_{name.upper()}")
    if text is None:
        return file.get(name, default)
    try:
        return _KNOWN[name](text)
    except ValueError:
        raise _bad(f"POTLUCK_{name.upper()}", text, "give a whole number") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}", "mend or remove the file") from error
    for name, value in found.items():
        if name not in _KNOWN:
            raise _bad(f"{path}: {name}", value, f"known are {', '.join(sorted(_KNOWN))}")
        if not isinstance(value, _KNOWN[name]):
            raise _bad(f"{path}: {name}", value, f"it must be of type {_KNOWN[name].__name__}")
    return found


def _bad(name: str, value: object, mend: str) -> CommandError:
    return CommandError(
        f"{name} cannot be {value!r}", mend, code="invalid_setting", exit_code=errors.USAGE
    )
