"""Truth in SQLite: WAL, `synchronous=FULL`, one writer thread, commits in groups."""

from potluck.adapters.sql.inline import InlineStore
from potluck.adapters.sql.writer import SqlStore, open_store

__all__ = ["InlineStore", "SqlStore", "open_store"]
