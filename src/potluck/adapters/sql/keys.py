"""API keys by their hash. Revoked ones stay, so that they are refused by their right name."""

import dataclasses
import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.core.ids import AccountId, KeyId
from potluck.ports.store import ROWS_ALL, KeyRow

_shape: Final = Shape("keys", KeyRow)
_GET: Final = _shape.select + " WHERE id = ?"
_BY_HASH: Final = _shape.select + " WHERE hash = ?"
_LIST: Final = _shape.select + " ORDER BY id DESC LIMIT ?"
_LIST_OF: Final = _shape.select + " WHERE account = ? ORDER BY id DESC LIMIT ?"
_LIVE: Final = "revoked_ms IS NULL AND (expires_ms IS NULL OR expires_ms > ?)"
_LIVE_OF: Final = f"SELECT count(*) FROM keys WHERE account = ? AND {_LIVE}"  # noqa: S608
_LASTING_ADMINS: Final = (
    "SELECT count(*) FROM keys WHERE admin = 1 AND revoked_ms IS NULL AND expires_ms IS NULL"
)
_FORGET: Final = (
    "DELETE FROM keys WHERE id IN (SELECT id FROM keys WHERE account = ? "  # noqa: S608
    f"AND NOT ({_LIVE}) ORDER BY created_ms DESC, id DESC LIMIT -1 OFFSET ?)"
)
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

    def live_of(self, account: AccountId, now_ms: int) -> int:
        return int(self._connection.execute(_LIVE_OF, (account, now_ms)).fetchone()[0])

    def lasting_admins(self) -> int:
        return int(self._connection.execute(_LASTING_ADMINS).fetchone()[0])

    def forget_dead_of(self, account: AccountId, now_ms: int, keep: int) -> None:
        self._connection.execute(_FORGET, (account, now_ms, keep))

    def list(self, account: AccountId | None = None, limit: int = ROWS_ALL) -> Sequence[KeyRow]:
        if account is None:
            found = _shape.many(self._connection, _LIST, (limit,))
        else:
            found = _shape.many(self._connection, _LIST_OF, (account, limit))
        return [dataclasses.replace(row, admin=bool(row.admin)) for row in found]


def _known(row: KeyRow | None) -> KeyRow | None:
    """SQLite has no booleans."""
    return None if row is None else dataclasses.replace(row, admin=bool(row.admin))
