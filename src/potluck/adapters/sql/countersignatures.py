"""What gateways say they delivered. Append-only; a gateway's first word for an attempt stands."""

import sqlite3
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.core.ids import GatewayId, RequestId
from potluck.ports.store import CountersignatureRow

_shape: Final = Shape("countersignatures", CountersignatureRow)
_INSERT: Final = _shape.insert + " ON CONFLICT DO NOTHING"
_GET: Final = _shape.select + " WHERE request = ? AND attempt = ? AND gateway = ?"


class SqlCountersignatures:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(
        self, request: RequestId, attempt: int, gateway: GatewayId
    ) -> CountersignatureRow | None:
        return _shape.one(self._connection, _GET, (request, attempt, gateway))

    def insert(self, row: CountersignatureRow) -> bool:
        return self._connection.execute(_INSERT, _shape.values(row)).rowcount > 0
