"""Nodes that ever said hello, with their last report."""

import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.core.ids import NodeId
from potluck.ports.store import NodeRow

_shape: Final = Shape("nodes", NodeRow)
_GET: Final = _shape.select + " WHERE id = ?"
_LIST: Final = _shape.select + " ORDER BY id"


class SqlNodes:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, node: NodeId) -> NodeRow | None:
        return _shape.one(self._connection, _GET, (node,))

    def put(self, row: NodeRow) -> None:
        self._connection.execute(_shape.upsert, _shape.values(row))

    def list(self) -> Sequence[NodeRow]:
        return _shape.many(self._connection, _LIST)
