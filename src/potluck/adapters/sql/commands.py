"""Answers given to commands, so that a repeat is answered alike."""

import sqlite3
from typing import Final

_GET: Final = "SELECT body_hash, answer FROM commands WHERE id = ?"
_INSERT: Final = "INSERT INTO commands (id, body_hash, answer, at_ms) VALUES (?, ?, ?, ?)"

_PRUNE: Final = (
    "DELETE FROM commands WHERE id IN "
    "(SELECT id FROM commands WHERE at_ms < ? ORDER BY at_ms LIMIT ?)"
)


class SqlCommands:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, command: str) -> tuple[bytes, bytes] | None:
        found = self._connection.execute(_GET, (command,)).fetchone()
        return None if found is None else (found[0], found[1])

    def insert(self, command: str, body_hash: bytes, answer: bytes, at_ms: int) -> None:
        self._connection.execute(_INSERT, (command, body_hash, answer, at_ms))

    def prune(self, before_ms: int, limit: int) -> None:
        self._connection.execute(_PRUNE, (before_ms, limit))
