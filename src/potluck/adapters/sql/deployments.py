"""Models the pool serves or served, and at what price."""

import dataclasses
import sqlite3
from collections.abc import Sequence
from typing import Final

from potluck.adapters.sql.rows import Shape
from potluck.core.ids import Digest
from potluck.ports.store import DeploymentRow

_shape: Final = Shape("deployments", DeploymentRow)
_GET: Final = _shape.select + " WHERE digest = ?"
_LIST: Final = _shape.select + " ORDER BY model, digest"


class SqlDeployments:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def get(self, digest: Digest) -> DeploymentRow | None:
        row = _shape.one(self._connection, _GET, (digest,))
        return None if row is None else _known(row)

    def put(self, row: DeploymentRow) -> None:
        self._connection.execute(_shape.upsert, _shape.values(row))

    def list(self) -> Sequence[DeploymentRow]:
        return [_known(row) for row in _shape.many(self._connection, _LIST)]


def _known(row: DeploymentRow) -> DeploymentRow:
    """SQLite has no booleans."""
    return dataclasses.replace(row, retired=bool(row.retired))
