"""Every policy that was ever in force, as it was written."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "policy_versions",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("file", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("seen_by", sa.Text, nullable=False),
        sa.Column("first_seen_ms", sa.BigInteger, nullable=False),
        sa.Column("last_seen_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", "version", name="pk_policy_versions"),
    )


def downgrade() -> None:
    op.drop_table("policy_versions")
