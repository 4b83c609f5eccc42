"""Runs migrations on the connection that `Database.migrate` hands over, inside its transaction and its lock."""

from __future__ import annotations

from alembic import context

from gateway.ledger.schema import metadata

connection = context.config.attributes["connection"]
# SQLite cannot alter most things in place: batch mode copies the table instead.
context.configure(connection=connection, target_metadata=metadata, render_as_batch=connection.dialect.name == "sqlite")
with context.begin_transaction():
    context.run_migrations()
