"""The store in production: one thread owns the connection and commits in groups.

Whoever waits is woken after the commit, all of a group by one call into its loop.
"""

import asyncio
import collections
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from potluck.adapters.sql import connections
from potluck.adapters.sql.transaction import Failed, Groups, Work
from potluck.core import parameters
from potluck.ports.store import ResultT, StoreUnavailableError, Tx

_Item = tuple[Work, "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class SqlStore:
    """Made by `open_store`."""

    def __init__(self, path: Path) -> None:
        self._connection = connections.opened(path)
        self._waiting: collections.deque[_Item] = collections.deque()
        self._work = threading.Event()
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    async def transact(self, work: Callable[[Tx], ResultT]) -> ResultT:
        if not self._open:
            raise StoreUnavailableError("the store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ResultT] = loop.create_future()
        self._waiting.append((work, future, loop))
        # Asked first, because to set it takes a lock, and under load it is set already.
        if not self._work.is_set():
            self._work.set()
        return await future

    async def close(self) -> None:
        """What was handed over before is committed; then the connection closes."""
        self._open = False
        self._work.set()
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        groups = Groups(self._connection)
        while True:
            self._work.wait()
            # Cleared before the look: what is handed over after it sets the event again.
            self._work.clear()
            closing = not self._open
            while items := self._next_group():
                _wake(items, groups.run([item[0] for item in items]))
            if closing:
                break
        self._connection.close()

    def _next_group(self) -> list[_Item]:
        count = min(len(self._waiting), parameters.group_items_max)
        return [self._waiting.popleft() for _ in range(count)]


async def open_store(path: Path) -> SqlStore:
    """Migrates and starts the writer. Raises `SchemaTooNewError`, `StoreUnavailableError` or
    `StoreFullError`."""
    return await asyncio.to_thread(SqlStore, path)


def _wake(items: list[_Item], outcomes: list[Any]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for (_, future, loop), outcome in zip(items, outcomes, strict=True):
        by_loop.setdefault(loop, []).append((future, outcome))
    for loop, settled in by_loop.items():
        # A loop that was closed meanwhile has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, settled)


def _settle(settled: list[tuple["asyncio.Future[Any]", Any]]) -> None:
    for future, outcome in settled:
        if future.done():
            continue
        if isinstance(outcome, Failed):
            future.set_exception(outcome.error)
        else:
            future.set_result(outcome)
