"""Receipts, paid and refused: signed bytes with their proof. Append-only, but for a correction."""

import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.core import parameters
from potluck.core.ids import AccountId, HoldId, NodeId, ReceiptId, RequestId, receipt_id
from potluck.ports.store import ReceiptRow

_shape: Final = Shape("receipts", ReceiptRow)
_GET: Final = _shape.select + " WHERE id = ?"
# One look: the attempts of a request stand side by side, since receipts are named after them.
_OF_REQUEST: Final = _shape.select + " WHERE id BETWEEN ? AND ? AND request = ? ORDER BY id"
# By row, as they came, so that nothing is sorted.
_LIST: Final = _shape.select + " ORDER BY rowid DESC LIMIT ?"
_LIST_OF: Final = _shape.select + " WHERE account = ? ORDER BY at_ms DESC, rowid DESC LIMIT ?"
_CORRECT: Final = "UPDATE receipts SET provider_micro = ?, fee_micro = ? WHERE id = ?"
# None is ever removed, so the last row's number is how many there are.
_COUNT: Final = "SELECT coalesce(max(rowid), 0) FROM receipts"
_SETTLED_SUMS: Final = (
    "SELECT hold, sum(provider_micro + fee_micro) FROM receipts WHERE refusal = '' "
    "GROUP BY hold ORDER BY hold"
)
_REFUSED_OF: Final = "SELECT count(*) FROM receipts WHERE node = ? AND refusal != ''"


class SqlReceipts:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, receipt: ReceiptId) -> ReceiptRow | None:
        return _shape.one(self._connection, _GET, (receipt,))

    def insert(self, row: ReceiptRow) -> None:
        self._connection.execute(_shape.insert, _shape.values(row))

    def of_request(self, request: RequestId) -> Sequence[ReceiptRow]:
        first, last = receipt_id(request, 1), receipt_id(request, parameters.attempts_max)
        return _shape.many(self._connection, _OF_REQUEST, (first, last, request))

    def correct(self, receipt: ReceiptId, provider_micro: int, fee_micro: int) -> None:
        self._connection.execute(_CORRECT, (provider_micro, fee_micro, receipt))

    def settled_sums(self) -> Sequence[tuple[HoldId, int]]:
        return [(HoldId(hold), sum_) for hold, sum_ in self._connection.execute(_SETTLED_SUMS)]

    def refused_of(self, node: NodeId) -> int:
        return int(self._connection.execute(_REFUSED_OF, (node,)).fetchone()[0])

    def count(self) -> int:
        return int(self._connection.execute(_COUNT).fetchone()[0])

    def list(self, account: AccountId | None = None, limit: int = 100) -> Sequence[ReceiptRow]:
        if account is None:
            return _shape.many(self._connection, _LIST, (limit,))
        return _shape.many(self._connection, _LIST_OF, (account, limit))
