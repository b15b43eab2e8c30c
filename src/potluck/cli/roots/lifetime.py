"""What every process of a pool does: log, run until told to stop, end tidily."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from potluck.cli import logs
from potluck.core import parameters

_log = logging.getLogger(__name__)


def run(process: str, main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    """Runs `main(stopping)` on uvloop; SIGTERM and SIGINT set the event."""
    logs.configure(process)
    # What a process writes is its owner's alone; what a sandbox needs is opened on purpose.
    os.umask(0o077)
    _allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_stopped(main))


def _allow_many_files() -> None:
    """A gateway holds a socket for each client; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = parameters.open_files_wanted
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _until_stopped(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_on_loose_error)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    # What start-up made stays; without this each full collection walks it again.
    gc.collect()
    gc.freeze()
    await main(stopping)


def _on_loose_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    with contextlib.suppress(Exception):
        _log.error("loose error: %s", context.get("message"), exc_info=error)
