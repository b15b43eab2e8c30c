"""API keys by their hash. Revoked ones stay, so that they are refused by their right name."""

import dataclasses
import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.core.ids import AccountId, KeyId
from potluck.ports.store import KeyRow

_shape: Final = Shape("keys", KeyRow)
_GET: Final = _shape.select + " WHERE id = ?"
_BY_HASH: Final = _shape.select + " WHERE hash = ?"
_LIST: Final = _shape.select + " ORDER BY id"
_LIST_OF: Final = _shape.select + " WHERE account = ? ORDER BY id"
_REVOKE: Final = "UPDATE keys SET revoked_ms = ? WHERE id = ? AND revoked_ms IS NULL"


class SqlKeys:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def by_hash(self, key_hash: str) -> KeyRow | None:
        return _known(_shape.one(self._connection, _BY_HASH, (key_hash,)))

    def get(self, key: KeyId) -> KeyRow | None:
        return _known(_shape.one(self._connection, _GET, (key,)))

    def insert(self, row: KeyRow) -> None:
        self._connection.execute(_shape.insert, _shape.values(row))

    def revoke(self, key: KeyId, at_ms: int) -> None:
        self._connection.execute(_REVOKE, (at_ms, key))

    def list(self, account: AccountId | None = None) -> Sequence[KeyRow]:
        if account is None:
            found = _shape.many(self._connection, _LIST)
        else:
            found = _shape.many(self._connection, _LIST_OF, (account,))
        return [dataclasses.replace(row, admin=bool(row.admin)) for row in found]


def _known(row: KeyRow | None) -> KeyRow | None:
    """SQLite has no booleans."""
    return None if row is None else dataclasses.replace(row, admin=bool(row.admin))
