"""Brings a database to this version's schema at start, and refuses one that is newer.

The version is Alembic's. The common case, a database already at the head, loads neither Alembic nor
SQLAlchemy; an empty one is created from `schema` and stamped, an older one is upgraded by Alembic.
"""

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Final

from potluck.ports.store import SchemaTooNewError

if TYPE_CHECKING:
    from alembic.config import Config

REVISIONS: Final = ("0001",)
"""All that this version knows, oldest first."""
HEAD: Final = REVISIONS[-1]
SCRIPTS: Final = Path(__file__).with_name("migrations")
_VERSION_TABLE: Final = (
    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
    "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)


def bring_up_to_date(connection: sqlite3.Connection) -> None:
    """Raises `SchemaTooNewError`, or `sqlite3.Error`; then nothing was changed."""
    revision = current(connection)
    if revision == HEAD:
        return
    if revision is None:
        _create(connection)
    elif revision in REVISIONS:
        upgrade(connection)
    else:
        raise SchemaTooNewError(f"schema {revision} is not known to this version (head {HEAD})")


def current(connection: sqlite3.Connection) -> str | None:
    found = connection.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'"
    ).fetchone()
    if found is None:
        return None
    row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return None if row is None else str(row[0])


def upgrade(connection: sqlite3.Connection) -> None:
    """Runs Alembic's scripts up to the head, in one transaction."""
    import sqlalchemy
    from alembic import command

    engine = sqlalchemy.create_engine(
        "sqlite://", creator=lambda: connection, poolclass=sqlalchemy.StaticPool
    )
    config = configuration()
    connection.execute("BEGIN IMMEDIATE")
    try:
        with engine.connect() as wrapped:
            config.attributes["connection"] = wrapped
            command.upgrade(config, "head")
            wrapped.commit()
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def configuration() -> "Config":
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    return config


def _create(connection: sqlite3.Connection) -> None:
    from potluck.adapters.sql import schema

    connection.execute("BEGIN IMMEDIATE")
    try:
        # Asked again under the lock: another process may have created it meanwhile.
        if current(connection) is None:
            for statement in schema.statements():
                connection.execute(statement)
            connection.execute(_VERSION_TABLE)
            connection.execute("INSERT INTO alembic_version VALUES (?)", (HEAD,))
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
