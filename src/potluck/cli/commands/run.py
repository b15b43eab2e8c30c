"""`up` and `down`: a pool on this machine."""

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Final

import psutil
import typer
from rich.markup import escape

from potluck.cli import connection, output, settings, sweep, up
from potluck.cli.connection import DataDir, Json
from potluck.cli.failures import CommandError, together
from potluck.cli.folder import DataFolder
from potluck.cli.progress import Starting
from potluck.messages import errors

_DOWN_TIMEOUT_S: Final = 60.0
_DOWN_POLL_S: Final = 0.05


def register(app: typer.Typer) -> None:
    app.command("up")(start)
    app.command("down")(stop)


def start(
    data_dir: DataDir = None,
    port: Annotated[
        int | None, typer.Option(help=f"Where the API listens; 0: any. [{settings.PORT_DEFAULT}]")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help=f"How many nodes to run here. [{settings.NODES_DEFAULT}]")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A GGUF file to serve instead of the built-in model.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Start a pool on this machine and keep it until Ctrl-C."""
    # All that a pool writes is its owner's alone; what a sandbox needs is opened on purpose.
    os.umask(0o077)
    folder = connection.folder(data_dir)
    chosen, mistakes = settings.for_up(folder, port=port, nodes=nodes, model=model)
    mistakes += up.mistakes(folder, chosen)
    if mistakes:
        raise together(mistakes)
    asyncio.run(_up(folder, chosen, as_json))


async def _up(folder: DataFolder, chosen: settings.UpSettings, as_json: bool) -> None:
    def mend_of(node: str) -> str:
        look = f"its log is in {folder.node(node) / 'logs'}; it tries again by itself"
        if chosen.model is not None:
            return f"end this with Ctrl-C and give another file with --model; {look}"
        return f"check this machine's network, free memory and disk; {look}"

    stopping = up.stop_signals()
    async with up.running(folder, chosen, output.note) as pool:
        with Starting(mend_of) as starting:

            def ready() -> None:
                starting.end()
                if as_json:
                    output.json_line(_announcement(pool))
                else:
                    _welcome(pool)

            await up.hold(pool, stopping, starting, ready)
        if not as_json:
            output.note("The pool is ending.")


def _announcement(pool: up.Pool) -> dict[str, object]:
    return {
        "url": pool.owner.url,
        "api_key": pool.owner.api_key,
        "data_dir": str(pool.folder.root),
        "nodes": pool.settings.nodes,
        "account": pool.owner.account,
        "pids": pool.supervisor.pids(),
    }


def _welcome(pool: up.Pool) -> None:
    say = output.screen.print
    nodes = output.count(pool.settings.nodes, "node")
    say(f"[bold green]The pool is up[/] at [bold]{pool.owner.url}[/], {nodes}.")
    say("\nFor any OpenAI client:")
    output.line(f"  export OPENAI_BASE_URL={pool.owner.url}/v1")
    output.line(f"  export OPENAI_API_KEY={pool.owner.api_key}")
    say(
        "That is the admin's key: it may do everything here. Make an ordinary one for each "
        "program or person:"
    )
    output.line(_typed(pool, "keys create NAME"))
    say("\nIn another terminal:")
    for words in ('chat "Hello"', "status", "balance"):
        output.line(_typed(pool, words))
    say("\nCtrl-C ends the pool.")


def _typed(pool: up.Pool, words: str) -> str:
    """As it works in another terminal, for a pool in another folder than the usual too."""
    command = "potluck" if shutil.which("potluck") else sys.argv[0]
    usual = pool.folder.root == Path(settings.FOLDER_DEFAULT).expanduser()
    folder = "" if usual else f" --data-dir {shlex.quote(str(pool.folder.root))}"
    return f"  {command} {words}{folder}"


def stop(data_dir: DataDir = None, as_json: Json = False) -> None:
    """End the pool that runs on this folder."""
    folder = connection.folder(data_dir)
    try:
        stopped, swept = _stop(folder)
    except (PermissionError, psutil.AccessDenied) as error:
        raise CommandError(
            f"the pool on {folder.root} belongs to another user",
            "end it as that user, or as root",
            code="not_permitted",
            exit_code=errors.REFUSED,
        ) from error
    if as_json:
        output.json_line({"stopped": stopped, "swept": swept})
    elif stopped:
        output.screen.print("The pool has ended.")
    else:
        output.screen.print(f"No pool runs on {escape(str(folder.root))}.")


def _stop(folder: DataFolder) -> tuple[bool, list[str]]:
    """Whether one was ended, and what was swept. Raises `PermissionError` or `AccessDenied`."""
    state = sweep.read_state(folder)
    if state is None or sweep.find(state.supervisor) is None:
        return False, _sweep_dead(folder)
    # It may end by itself at any moment: then there is nothing to send, and nothing to wait for.
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(state.supervisor.pid).send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_TIMEOUT_S
    while sweep.find(state.supervisor) is not None:
        if time.monotonic() > deadline:
            raise CommandError(
                f"the pool (process {state.supervisor.pid}) does not end",
                f"look into {folder.logs}",
                code="timed_out",
                exit_code=errors.TIMED_OUT,
            )
        time.sleep(_DOWN_POLL_S)
    return True, []


def _sweep_dead(folder: DataFolder) -> list[str]:
    """What an `up` that was killed left, if it is not starting right now."""
    if not folder.root.exists():
        return []
    with up.locked(folder):
        return sweep.sweep(folder)
