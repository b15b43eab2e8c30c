"""Receipts, paid and refused: signed bytes with their proof. Append-only, but for a correction."""

import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.core.ids import AccountId, ReceiptId, RequestId
from potluck.ports.store import ReceiptRow

_shape: Final = Shape("receipts", ReceiptRow)
_GET: Final = _shape.select + " WHERE id = ?"
_OF_REQUEST: Final = _shape.select + " WHERE request = ? ORDER BY attempt, id"
_LIST: Final = _shape.select + " ORDER BY at_ms DESC, id DESC LIMIT ?"
_LIST_OF: Final = _shape.select + " WHERE account = ? ORDER BY at_ms DESC, id DESC LIMIT ?"
_CORRECT: Final = "UPDATE receipts SET provider_micro = ?, fee_micro = ? WHERE id = ?"
_COUNT: Final = "SELECT count(*) FROM receipts"


class SqlReceipts:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, receipt: ReceiptId) -> ReceiptRow | None:
        return _shape.one(self._connection, _GET, (receipt,))

    def insert(self, row: ReceiptRow) -> None:
        self._connection.execute(_shape.insert, _shape.values(row))

    def of_request(self, request: RequestId) -> Sequence[ReceiptRow]:
        return _shape.many(self._connection, _OF_REQUEST, (request,))

    def correct(self, receipt: ReceiptId, provider_micro: int, fee_micro: int) -> None:
        self._connection.execute(_CORRECT, (provider_micro, fee_micro, receipt))

    def count(self) -> int:
        return int(self._connection.execute(_COUNT).fetchone()[0])

    def list(self, account: AccountId | None = None, limit: int = 100) -> Sequence[ReceiptRow]:
        if account is None:
            return _shape.many(self._connection, _LIST, (limit,))
        return _shape.many(self._connection, _LIST_OF, (account, limit))
