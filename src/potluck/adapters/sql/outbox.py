"""Message bodies that a commit causes, until they have left."""

import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.ports.store import OutboxRow

_shape: Final = Shape("outbox", OutboxRow)
_ADD: Final = "INSERT INTO outbox (subject, body) VALUES (?, ?)"
_PENDING: Final = _shape.select + " ORDER BY id LIMIT ?"
_REMOVE: Final = "DELETE FROM outbox WHERE id = ?"


class SqlOutbox:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def add(self, subject: str, body: bytes) -> None:
        self._connection.execute(_ADD, (subject, body))

    def pending(self, limit: int) -> Sequence[OutboxRow]:
        return _shape.many(self._connection, _PENDING, (limit,))

    def remove(self, ids: Sequence[int]) -> None:
        self._connection.executemany(_REMOVE, [(one,) for one in ids])
