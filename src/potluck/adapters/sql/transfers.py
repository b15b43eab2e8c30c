"""Transfers: the books. Append-only; balances can be replayed from them.

New rows are kept in memory for the length of one group and written at its end by one statement,
which costs a third of writing each under its own savepoint. A read writes them first.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any, Final

from potluck.adapters.sql.rows import Shape
from potluck.core.ids import AccountId, TransferId
from potluck.ports.store import TransferRow

_shape: Final = Shape("transfers", TransferRow)
_GET: Final = _shape.select + " WHERE id = ?"
_LIST: Final = _shape.select + " WHERE rowid <= ? AND at_ms < ? ORDER BY rowid DESC LIMIT ?"
_PART: Final = (
    "SELECT * FROM (SELECT rowid AS place, * FROM transfers WHERE {} AND at_ms < ? "
    "ORDER BY at_ms DESC, rowid DESC LIMIT ?)"
)
# Each part ends at the limit by its own index; what was never read is never sorted.
_LIST_OF: Final = (
    _shape.select.replace(" FROM transfers", f" FROM ({_PART.format('payer = ?')} UNION ALL ")
    + _PART.format("payee = ? AND payer != payee")
    + ") ORDER BY at_ms DESC, place DESC LIMIT ?"
)
_LAST: Final = "SELECT coalesce(max(rowid), 0) FROM transfers"
_MOMENT: Final = "SELECT at_ms FROM transfers WHERE rowid = ?"
_SUMS: Final = (
    "SELECT account, sum(amount_micro) FROM ("
    "SELECT payee AS account, amount_micro FROM transfers UNION ALL "
    "SELECT payer, -amount_micro FROM transfers) GROUP BY account ORDER BY account"
)
_END_OF_TIME_MS: Final = 2**63 - 1


class SqlTransfers:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._rows: list[tuple[Any, ...]] = []
        """Of this group, by items that succeeded and by the one that runs."""
        self._written = 0
        """How many of them SQL has."""
        self._mark = 0
        self._written_mark = 0

    def get(self, transfer: TransferId) -> TransferRow | None:
        self.write()
        return _shape.one(self._connection, _GET, (transfer,))

    def insert(self, row: TransferRow) -> None:
        self._rows.append(_shape.values(row))

    def list(
        self, account: AccountId | None = None, limit: int = 100, before_ms: int | None = None
    ) -> Sequence[TransferRow]:
        self.write()
        until_ms = _END_OF_TIME_MS if before_ms is None else before_ms
        if account is None:
            last = self._last_before(until_ms)
            return _shape.many(self._connection, _LIST, (last, until_ms, limit))
        part = (account, until_ms, limit)
        return _shape.many(self._connection, _LIST_OF, (*part, *part, limit))

    def _last_before(self, until_ms: int) -> int:
        """The last row of an earlier moment, found by halving: moments grow with rows, since both
        are given at the commit. Where the wall clock was set back, a page may begin too early."""
        low, high = 0, int(self._connection.execute(_LAST).fetchone()[0])
        if until_ms == _END_OF_TIME_MS:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self._connection.execute(_MOMENT, (middle,)).fetchone()[0] < until_ms:
                low = middle
            else:
                high = middle - 1
        return low

    def sums(self) -> Sequence[tuple[AccountId, int]]:
        self.write()
        return [(AccountId(account), total) for account, total in self._connection.execute(_SUMS)]

    def keep(self) -> None:
        """The item succeeded."""
        self._mark = len(self._rows)
        self._written_mark = self._written

    def take_back(self) -> None:
        """The item failed and its savepoint was rolled back.

        What a read of it had written is gone from SQL, rows of earlier items too: those are
        written again.
        """
        del self._rows[self._mark :]
        self._written = self._written_mark

    def write(self) -> None:
        if self._written < len(self._rows):
            self._connection.executemany(_shape.insert, self._rows[self._written :])
            self._written = len(self._rows)

    def forget(self) -> None:
        """The group ended."""
        self._rows.clear()
        self._written = self._mark = self._written_mark = 0
