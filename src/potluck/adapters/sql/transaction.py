"""One group of transactions: BEGIN IMMEDIATE, all items, one COMMIT.

Rule: no outcome is told before the commit returned. An item that raises loses only what it wrote:
its group is run again with a savepoint for each. What the disk refuses loses the whole group.
"""

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.adapters.sql.accounts import SqlAccounts
from potluck.adapters.sql.balances import SqlBalances
from potluck.adapters.sql.commands import SqlCommands
from potluck.adapters.sql.countersignatures import SqlCountersignatures
from potluck.adapters.sql.deployments import SqlDeployments
from potluck.adapters.sql.events import SqlEvents
from potluck.adapters.sql.gateways import SqlGateways
from potluck.adapters.sql.holds import SqlHolds
from potluck.adapters.sql.keys import SqlKeys
from potluck.adapters.sql.nodes import SqlNodes
from potluck.adapters.sql.outbox import SqlOutbox
from potluck.adapters.sql.receipts import SqlReceipts
from potluck.adapters.sql.transfers import SqlTransfers
from potluck.ports.store import StoreFullError, StoreUnavailableError, Tx

Work = Callable[[Tx], Any]


class BrokenError(Exception):
    """The connection cannot even be rolled back: nothing more can be told from it."""


@dataclass(frozen=True, slots=True)
class Failed:
    error: BaseException


class SqlTx:
    """One attribute a table, all on one connection."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.accounts = SqlAccounts(connection)
        self.keys = SqlKeys(connection)
        self.balances = SqlBalances(connection)
        self.transfers = SqlTransfers(connection)
        self.holds = SqlHolds(connection)
        self.receipts = SqlReceipts(connection)
        self.countersignatures = SqlCountersignatures(connection)
        self.nodes = SqlNodes(connection)
        self.gateways = SqlGateways(connection)
        self.deployments = SqlDeployments(connection)
        self.events = SqlEvents(connection)
        self.commands = SqlCommands(connection)
        self.outbox = SqlOutbox(connection)


class Groups:
    """Runs groups on the one connection that it owns."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._tx = SqlTx(connection)

    def run(self, works: Sequence[Work]) -> list[Any]:
        """For each work its result, or `Failed`; durable when this returns.

        What fails only at the group's end (a constraint, a number too large for SQL) cannot be
        laid at one item's door: then each is run again alone. Raises `BrokenError`.
        """
        outcomes = self._group(works, guarded=False)
        if _of_an_item(outcomes) and len(works) > 1:
            outcomes = self._group(works, guarded=True)
        if isinstance(outcomes, list):
            return outcomes
        if not _of_an_item(outcomes):
            return [Failed(_told(outcomes))] * len(works)
        if len(works) == 1:
            return [Failed(outcomes)]
        return [self.run([work])[0] for work in works]

    def _group(self, works: Sequence[Work], *, guarded: bool) -> list[Any] | Exception:
        """Not guarded: without savepoints, which take two statements an item; the first error ends
        the group, and it is run once more, guarded."""
        tx = self._tx
        run = self._item if guarded else _bare(tx)
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            outcomes = [run(work) for work in works]
            tx.balances.write()
            tx.transfers.write()
            self._connection.execute("COMMIT")
        except Exception as error:
            self._roll_back()
            return error
        finally:
            tx.balances.forget()
            tx.transfers.forget()
        return outcomes

    def _item(self, work: Work) -> Any:
        tx, execute = self._tx, self._connection.execute
        execute("SAVEPOINT item")
        try:
            outcome = work(tx)
        except Exception as error:
            if isinstance(error, sqlite3.OperationalError):
                # The disk refused, and SQLite may have rolled back everything: no item is safe.
                raise
            execute("ROLLBACK TO item")
            execute("RELEASE item")
            tx.balances.take_back()
            tx.transfers.take_back()
            return Failed(error)
        execute("RELEASE item")
        tx.balances.keep()
        tx.transfers.keep()
        return outcome

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise BrokenError(str(error)) from error


def _bare(tx: Tx) -> Callable[[Work], Any]:
    return lambda work: work(tx)


def _of_an_item(outcomes: list[Any] | Exception) -> bool:
    """Whether an item is to blame, and not the database or its disk."""
    if isinstance(outcomes, list):
        return False
    return isinstance(outcomes, sqlite3.IntegrityError) or not isinstance(outcomes, sqlite3.Error)


def _told(error: Exception) -> Exception:
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return StoreFullError(str(error))
    return StoreUnavailableError(str(error))
