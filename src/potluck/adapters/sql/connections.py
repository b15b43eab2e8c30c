"""How a database is opened: pragmas, and a schema that this version knows.

`synchronous=FULL` with WAL: what COMMIT acknowledged survives a power cut.
"""

import sqlite3
from pathlib import Path
from typing import Final

from potluck.adapters.sql import migrate
from potluck.core import parameters
from potluck.ports.store import StoreFullError, StoreUnavailableError

_PRAGMAS: Final = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    f"PRAGMA busy_timeout = {parameters.store_busy_timeout_ms}",
    f"PRAGMA cache_size = -{parameters.store_cache_kib}",
    "PRAGMA temp_store = MEMORY",
    f"PRAGMA wal_autocheckpoint = {parameters.store_checkpoint_pages}",
)


def connect(path: Path | str) -> sqlite3.Connection:
    """A connection for one thread at a time. Raises `StoreUnavailableError`."""
    try:
        return sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, cached_statements=256
        )
    except sqlite3.Error as error:
        raise StoreUnavailableError(f"{path}: {error}") from error


def opened(path: Path | str) -> sqlite3.Connection:
    """Connected and prepared, or closed again."""
    connection = connect(path)
    try:
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(connection: sqlite3.Connection) -> None:
    """Sets pragmas and brings the schema up to date.

    Raises `SchemaTooNewError`, `StoreFullError` or `StoreUnavailableError`.
    """
    try:
        for pragma in _PRAGMAS:
            connection.execute(pragma)
        migrate.bring_up_to_date(connection)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise StoreFullError(str(error)) from error
        raise StoreUnavailableError(str(error)) from error
