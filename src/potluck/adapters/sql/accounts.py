"""Accounts: never changed, never removed."""

import sqlite3
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.core.ids import AccountId
from potluck.ports.store import ROWS_ALL, AccountRow

_shape: Final = Shape("accounts", AccountRow)
_GET: Final = _shape.select + " WHERE id = ?"
_BY_NAME: Final = _shape.select + " WHERE name = ?"
_LIST: Final = _shape.select + " ORDER BY id LIMIT ?"
_COUNT: Final = "SELECT count(*) FROM (SELECT 1 FROM accounts LIMIT ?)"


class SqlAccounts:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, account: AccountId) -> AccountRow | None:
        return _shape.one(self._connection, _GET, (account,))

    def by_name(self, name: str) -> AccountRow | None:
        return _shape.one(self._connection, _BY_NAME, (name,))

    def insert(self, row: AccountRow) -> None:
        self._connection.execute(_shape.insert, _shape.values(row))

    def list(self, limit: int = ROWS_ALL) -> list[AccountRow]:
        return _shape.many(self._connection, _LIST, (limit,))

    def count(self, limit: int) -> int:
        return int(self._connection.execute(_COUNT, (limit,)).fetchone()[0])
