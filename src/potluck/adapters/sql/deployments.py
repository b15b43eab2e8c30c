"""Models the pool serves, and at what price."""

import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.ports.store import DeploymentRow

_shape: Final = Shape("deployments", DeploymentRow)
_GET: Final = _shape.select + " WHERE model = ?"
_LIST: Final = _shape.select + " ORDER BY model"


class SqlDeployments:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, model: str) -> DeploymentRow | None:
        return _shape.one(self._connection, _GET, (model,))

    def put(self, row: DeploymentRow) -> None:
        self._connection.execute(_shape.upsert, _shape.values(row))

    def list(self) -> Sequence[DeploymentRow]:
        return _shape.many(self._connection, _LIST)
