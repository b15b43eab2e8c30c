"""The same SQL without a thread, for the simulator and tests; the connection stands for the disk.

A restarted coordinator gets a new store on the same connection.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

from potluck.adapters.sql import connections
from potluck.adapters.sql.transaction import Failed, Groups
from potluck.ports.store import ResultT, StoreUnavailableError, Tx


class InlineStore:
    def __init__(self, disk: sqlite3.Connection | Path | str = ":memory:") -> None:
        """Raises `SchemaTooNewError` or `StoreUnavailableError`."""
        if isinstance(disk, sqlite3.Connection):
            connections.prepare(disk)
            self.connection = disk
        else:
            self.connection = connections.opened(disk)
        self._groups = Groups(self.connection)
        self._open = True

    async def transact(self, work: Callable[[Tx], ResultT]) -> ResultT:
        result = self.run(work)
        # As with the thread, the loop turns between the commit and the caller's next step.
        await asyncio.sleep(0)
        return result

    def run(self, work: Callable[[Tx], ResultT]) -> ResultT:
        """`transact` without a loop."""
        if not self._open:
            raise StoreUnavailableError("the store is closed")
        outcome: ResultT | Failed = self._groups.run([work])[0]
        if isinstance(outcome, Failed):
            raise outcome.error
        return outcome

    async def close(self) -> None:
        """The connection stays open: it is the disk."""
        self._open = False
