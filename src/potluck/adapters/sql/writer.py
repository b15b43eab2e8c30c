"""The store in production: one thread owns the connection and commits in groups.

Whoever waits is woken after the commit, all of a group by one call into its loop. The thread never
ends in silence: if the connection is beyond repair, all who wait fail, the store is closed, and its
owner is told.
"""

import asyncio
import collections
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from potluck.adapters.sql import connections
from potluck.adapters.sql.transaction import Failed, Groups, Work
from potluck.core import parameters
from potluck.ports.store import ResultT, StoreUnavailableError, Tx

log = logging.getLogger(__name__)

_Item = tuple[Work, "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class SqlStore:
    """Made by `open_store`."""

    def __init__(self, path: Path, on_broken: Callable[[], None]) -> None:
        self._on_broken = on_broken
        self._connection = connections.opened(path)
        self._waiting: collections.deque[_Item] = collections.deque()
        self._work = threading.Event()
        self._open = True
        self._ended = False
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
        if self._ended:  # Between the look at the door and the queue.
            self._fail_waiting()
        return await future

    async def close(self) -> None:
        """What was handed over before is committed; then the connection closes."""
        self._open = False
        self._work.set()
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        groups = Groups(self._connection)
        try:
            while self._open:
                self._work.wait()
                # Cleared before the look: what is handed over after it sets the event again.
                self._work.clear()
                self._run_waiting(groups)
            self._run_waiting(groups)
        except BaseException:
            log.exception("the database is beyond repair")
            self._open = False
            self._on_broken()
        finally:
            self._ended = True
            self._fail_waiting()
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()

    def _run_waiting(self, groups: Groups) -> None:
        while items := self._next_group():
            try:
                outcomes = groups.run([item[0] for item in items])
            except BaseException:
                _wake(items, [_broken()] * len(items))
                raise
            _wake(items, outcomes)

    def _fail_waiting(self) -> None:
        with contextlib.suppress(IndexError):  # The thread and a late asker may meet here.
            while True:
                _wake([self._waiting.popleft()], [_broken()])

    def _next_group(self) -> list[_Item]:
        count = min(len(self._waiting), parameters.group_items_max)
        return [self._waiting.popleft() for _ in range(count)]


def _broken() -> Failed:
    return Failed(StoreUnavailableError("the store is closed: its database is beyond repair"))


def _nobody() -> None: ...


async def open_store(path: Path, on_broken: Callable[[], None] = _nobody) -> SqlStore:
    """Migrates and starts the writer. Raises `SchemaTooNewError`, `StoreUnavailableError` or
    `StoreFullError`. `on_broken` is called on the writer's thread, once, when the store had to
    close by itself."""
    return await asyncio.to_thread(SqlStore, path, on_broken)


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
