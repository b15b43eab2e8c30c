"""Alembic's scripts, opened by `migrate`."""
