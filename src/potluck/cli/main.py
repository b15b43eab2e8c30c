"""The `potluck` command."""

import sys
from typing import NoReturn

import typer
from rich.markup import escape

from potluck.cli import output
from potluck.cli.commands import chat, keys, pool, receipts, run
from potluck.cli.failures import CommandError
from potluck.client.client import PotluckError
from potluck.messages import errors

app = typer.Typer(
    help="Pool the GPUs that people already own, and use the pool as one machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
run.register(app)
pool.register(app)
chat.register(app)
keys.register(app)
receipts.register(app)

_MENDS = {
    "unreachable": "is the pool running? `potluck up` starts one, `potluck status` looks",
    "invalid_key": "check --api-key; `potluck keys create` makes a new one",
    "expired_key": "`potluck keys create` makes a new one",
    "revoked_key": "`potluck keys create` makes a new one",
    "insufficient_funds": "`potluck balance` shows what is left and what is on hold",
    "no_capacity": "`potluck nodes` shows who serves; try again when one is ready",
    "model_not_found": "`potluck models` lists what is served",
    "coordinator_unavailable": "it comes back by itself; try again in a few seconds",
}


def main() -> NoReturn:
    """Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 no capacity, 5 no funds, 6 refused,
    124 timed out, 130 interrupted."""
    as_json = "--json" in sys.argv
    try:
        app(standalone_mode=True)
    except CommandError as error:
        _fail(error.cause, error.mend, error.code, as_json)
        sys.exit(error.exit_code)
    except PotluckError as error:
        _fail(str(error), _MENDS.get(error.code, ""), error.code, as_json)
        sys.exit(_exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read us has enough; nothing more can be said, not even at exit.
        sys.stderr.close()
        sys.exit(errors.FAILED)
    sys.exit(errors.OK)


def _exit_code(error: PotluckError) -> int:
    return errors.FAILED if error.code == "unreachable" else errors.shown(error.code).exit_code


def _fail(cause: str, mend: str, code: str, as_json: bool) -> None:
    if as_json:
        output.json_line({"error": {"message": cause, "mend": mend, "code": code}})
        return
    output.errors.print(f"[bold red]error:[/] {escape(cause)}")
    if mend:
        output.errors.print(f"[bold]mend:[/] {escape(mend)}")
