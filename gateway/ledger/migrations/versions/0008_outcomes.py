"""What answers came to, summed by day, and each key's share of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "outcomes",
        sa.Column("day", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("source", "policy", "kind", "tier", "model")),
        sa.Column("wins", sa.Float, nullable=False),
        sa.Column("losses", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("day", "source", "policy", "kind", "tier", "model", name="pk_outcomes"),
    )
    op.create_table(
        "outcome_shares",
        sa.Column("day", sa.Integer, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("given", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("day", "source", "key_id", name="pk_outcome_shares"),
    )


def downgrade() -> None:
    op.drop_table("outcome_shares")
    op.drop_table("outcomes")
