"""What every process of a pool does: log, run until told to stop, end tidily.

uvloop is imported only where it is used: an agent stays small.
"""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from potluck.cli import logs

_log = logging.getLogger(__name__)


def run(process: str, main: Callable[[asyncio.Event], Awaitable[None]], *, fast: bool) -> None:
    """Runs `main(stopping)`; SIGTERM and SIGINT set the event. `fast`: on uvloop."""
    logs.configure(process)
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if fast:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_until_stopped(main))


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
