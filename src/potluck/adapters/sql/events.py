"""The event feed. Append-only; offsets grow without a gap, since nothing is ever removed."""

import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.ports.store import EventRow

_shape: Final = Shape("events", EventRow)
# An INTEGER PRIMARY KEY left out is the highest plus one, inside the transaction: no gaps.
_APPEND: Final = "INSERT INTO events (at_ms, kind, subject, data) VALUES (?, ?, ?, ?)"
_AFTER: Final = _shape.select + ' WHERE "offset" > ? ORDER BY "offset" LIMIT ?'
_LAST: Final = 'SELECT coalesce(max("offset"), 0) FROM events'


class SqlEvents:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def append(self, at_ms: int, kind: str, subject: str, data: str) -> int:
        offset = self._connection.execute(_APPEND, (at_ms, kind, subject, data)).lastrowid
        assert offset is not None
        return offset

    def after(self, offset: int, limit: int) -> Sequence[EventRow]:
        return _shape.many(self._connection, _AFTER, (offset, limit))

    def last_offset(self) -> int:
        return int(self._connection.execute(_LAST).fetchone()[0])
