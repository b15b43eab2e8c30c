"""Run by Alembic: migrates over the connection that `migrate.upgrade` hands in."""

from alembic import context

from potluck.adapters.sql import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    render_as_batch=True,
    transactional_ddl=False,
)
context.run_migrations()
