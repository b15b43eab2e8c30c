"""Rows of the store port to and from SQL, by the names of their fields."""

import dataclasses
import operator
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

RowT = TypeVar("RowT")


class Shape(Generic[RowT]):
    """A frozen row type whose fields are the table's columns; its statements, rendered once."""

    def __init__(self, table: str, row_type: type[RowT]) -> None:
        names = [field.name for field in dataclasses.fields(row_type)]  # type: ignore[arg-type]
        columns = ", ".join(f'"{name}"' for name in names)
        marks = ", ".join("?" * len(names))
        changes = ", ".join(f'"{name}" = excluded."{name}"' for name in names[1:])
        self.select = f"SELECT {columns} FROM {table}"  # noqa: S608
        self.insert = f"INSERT INTO {table} ({columns}) VALUES ({marks})"  # noqa: S608
        self.upsert = f'{self.insert} ON CONFLICT ("{names[0]}") DO UPDATE SET {changes}'
        self.values: Callable[[RowT], tuple[Any, ...]] = operator.attrgetter(*names)
        self._names = names
        self._row_type = row_type

    def one(
        self, connection: sqlite3.Connection, statement: str, values: Sequence[object]
    ) -> RowT | None:
        found = connection.execute(statement, values).fetchone()
        return None if found is None else self.made(found)

    def many(
        self, connection: sqlite3.Connection, statement: str, values: Sequence[object] = ()
    ) -> list[RowT]:
        return [self.made(found) for found in connection.execute(statement, values)]

    def made(self, found: Sequence[object]) -> RowT:
        return self._row_type(**dict(zip(self._names, found, strict=False)))
