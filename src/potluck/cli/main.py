"""The `potluck` command."""

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final, NoReturn

import msgspec
import typer

import potluck
from potluck.cli import mends, output
from potluck.cli.commands import chat, keys, pool, receipts, run
from potluck.cli.failures import CommandError, usage
from potluck.client.client import PotluckError
from potluck.messages import errors

_INTERRUPTED: Final = 130

app = typer.Typer(
    help="Pool the GPUs that people already own, and use the pool as one machine.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
run.register(app)
pool.register(app)
chat.register(app)
keys.register(app)
receipts.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        output.screen.print(f"Potluck {potluck.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_show_version,
            is_eager=True,
            help="Say which version it is.",
        ),
    ] = False,
) -> None:
    output.help_without_command(context)


def main() -> NoReturn:
    """Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 no capacity, 5 no funds, 6 refused,
    124 timed out, 130 interrupted."""
    output.prepare()
    try:
        # Not standalone: usage errors look like all others. What is returned is an exit code.
        status = app(standalone_mode=False) or errors.OK
    except typer.TyperException as error:
        status = _fail(usage(_plain(error), _help(sys.argv[1:])))
    except CommandError as error:
        status = _fail(error)
    except PotluckError as error:
        status = _fail(_refused(error))
    except msgspec.MsgspecError as error:
        cause = f"what answers is no pool of this version: {error}"
        status = _fail(CommandError(cause, "check --url", code="malformed"))
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BrokenPipeError:
        # Whoever read us has enough; nothing more can be said, not even at exit.
        sys.stderr.close()
        sys.exit(errors.FAILED)
    if status == _INTERRUPTED and sys.stderr.isatty():
        # The shell's prompt must not stand behind half a line.
        output.errors.print()
    sys.exit(status)


def _refused(error: PotluckError) -> CommandError:
    unanswered = error.code == mends.UNREACHABLE
    exit_code = errors.FAILED if unanswered else errors.shown(error.code).exit_code
    return CommandError(str(error), mends.mend(error.code), code=error.code, exit_code=exit_code)


def _plain(error: typer.TyperException) -> str:
    """In the voice of our own errors."""
    text = error.format_message().rstrip(".")
    return re.sub(r"(^|: )([A-Z])(?=[a-z])", lambda found: found[0].lower(), text)


def _help(words: Sequence[str]) -> str:
    """Where to read on: the help of the innermost command that was named rightly."""
    command: Any = typer.main.get_command(app)
    path = ["potluck"]
    for word in words:
        inner = getattr(command, "commands", {}).get(word)
        if inner is None:
            break
        command = inner
        path.append(word)
    return f"`{' '.join(path)} --help` says what it takes"


def _fail(error: CommandError) -> int:
    """Says all there is to say, and returns the exit code."""
    if "--json" in sys.argv:
        first, *more = [_document(one) for one in (error, *error.more)]
        output.json_line({"error": {**first, "more": more} if more else first})
    else:
        for one in (error, *error.more):
            output.error(one.cause, one.mend)
    return error.exit_code


def _document(error: CommandError) -> dict[str, Any]:
    return {"message": error.cause, "mend": error.mend, "code": error.code}
