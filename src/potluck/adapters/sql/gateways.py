"""Gateways that ever greeted, with their present start."""

import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.core.ids import GatewayId
from potluck.ports.store import GatewayRow

_shape: Final = Shape("gateways", GatewayRow)
_GET: Final = _shape.select + " WHERE id = ?"
_LIST: Final = _shape.select + " ORDER BY id"


class SqlGateways:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, gateway: GatewayId) -> GatewayRow | None:
        return _shape.one(self._connection, _GET, (gateway,))

    def put(self, row: GatewayRow) -> None:
        self._connection.execute(_shape.upsert, _shape.values(row))

    def list(self) -> Sequence[GatewayRow]:
        return _shape.many(self._connection, _LIST)
