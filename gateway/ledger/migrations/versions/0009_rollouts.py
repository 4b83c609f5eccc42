"""Policies that are tried in the place of others, and what became of their requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("instead_of", sa.Text, nullable=False),
        sa.Column("began_ms", sa.BigInteger, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("step_ms", sa.BigInteger, nullable=False),
        sa.Column("comparison", sa.Integer, nullable=False),
        sa.Column("comparison_ms", sa.BigInteger, nullable=False),
        sa.Column("checked_ms", sa.BigInteger, nullable=False),
        sa.Column("rolled_back_ms", sa.BigInteger),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("verdicts", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("policy", "version", name="pk_rollouts"),
    )
    op.create_table(
        "rollout_tallies",
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("comparison", sa.Integer, nullable=False),
        sa.Column("side", sa.Text, nullable=False),
        sa.Column("writer", sa.Text, nullable=False),
        sa.Column("json", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("policy", "version", "comparison", "side", "writer", name="pk_rollout_tallies"),
    )


def downgrade() -> None:
    op.drop_table("rollout_tallies")
    op.drop_table("rollouts")
