"""The store in production: one thread owns the connection and commits in groups.

Whoever waits is woken after the commit, all of a group by one call into its loop.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from potluck.adapters.sql import connections
from potluck.adapters.sql.transaction import Failed, Groups, Work
from potluck.core import parameters
from potluck.ports.store import ResultT, StoreUnavailableError, Tx


class _Item(NamedTuple):
    work: Work
    future: "asyncio.Future[Any]"
    loop: asyncio.AbstractEventLoop


class SqlStore:
    """Made by `open_store`."""

    def __init__(self, path: Path) -> None:
        self._connection = connections.connect(path)
        connections.prepare(self._connection)
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    async def transact(self, work: Callable[[Tx], ResultT]) -> ResultT:
        if not self._open:
            raise StoreUnavailableError("the store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ResultT] = loop.create_future()
        self._queue.put(_Item(work, future, loop))
        return await future

    async def close(self) -> None:
        """What was handed over before is committed; then the connection closes."""
        if self._open:
            self._open = False
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        groups = Groups(self._connection)
        going = True
        while going:
            items, going = self._next_group()
            if items:
                _wake(items, groups.run([item.work for item in items]))
        self._connection.close()

    def _next_group(self) -> tuple[list[_Item], bool]:
        """Waits for one item, then takes what else is there. False: the store closes after it."""
        items: list[_Item] = []
        item = self._queue.get()
        with contextlib.suppress(queue.Empty):
            while item is not None:
                items.append(item)
                if len(items) >= parameters.group_items_max:
                    return items, True
                item = self._queue.get_nowait()
            return items, False
        return items, True


async def open_store(path: Path) -> SqlStore:
    """Migrates and starts the writer. Raises `SchemaTooNewError`, `StoreUnavailableError` or
    `StoreFullError`."""
    return await asyncio.to_thread(SqlStore, path)


def _wake(items: list[_Item], outcomes: list[Any]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any]]] = {}
    for item, outcome in zip(items, outcomes, strict=True):
        by_loop.setdefault(item.loop, []).append((item.future, outcome))
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
