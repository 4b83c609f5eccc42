"""Decisions in the order of their time, for the replay of recorded traffic."""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_decisions_ts_ms", "decisions", ["ts_ms", "request_id"])


def downgrade() -> None:
    op.drop_index("ix_decisions_ts_ms", "decisions")
