"""Files of clients, batches of requests and what their lines came to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_TOKENS = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_tokens")


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("purpose", sa.Text, nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
        sa.Column("complete", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_project_id", "files", ["project_id", "id"])
    op.create_index("ix_files_expires_ms", "files", ["expires_ms"])
    op.create_table(
        "file_chunks",
        sa.Column("file_id", sa.Text, nullable=False),
        sa.Column("number", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("file_id", "number", name="pk_file_chunks"),
    )
    op.create_table(
        "batches",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("organisation_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("input_file_id", sa.Text, nullable=False),
        sa.Column("output_file_id", sa.Text),
        sa.Column("error_file_id", sa.Text),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger, nullable=False),
        sa.Column("in_progress_ms", sa.BigInteger),
        sa.Column("finalizing_ms", sa.BigInteger),
        sa.Column("cancelling_ms", sa.BigInteger),
        sa.Column("ended_ms", sa.BigInteger),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("total", "completed", "failed")),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _TOKENS),
        sa.Column("errors", sa.Text),
        sa.Column("metadata", sa.Text),
        sa.Column("headers", sa.Text, nullable=False),
        sa.Column("output_expires_s", sa.BigInteger),
        sa.Column("lease_owner", sa.Text, nullable=False),
        sa.Column("lease_until_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index("ix_batches_project_id", "batches", ["project_id", "id"])
    op.create_index("ix_batches_status", "batches", ["status"])
    op.create_table(
        "batch_results",
        sa.Column("batch_id", sa.Text, nullable=False),
        sa.Column("line", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("ok", sa.Boolean, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _TOKENS),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "line", name="pk_batch_results"),
    )
    op.create_index("ix_batch_results_batch_id", "batch_results", ["batch_id", "ok"])


def downgrade() -> None:
    for table in ("batch_results", "batches", "file_chunks", "files"):
        op.drop_table(table)
