"""What a key's secret was before it was rotated, and for how long that is still good."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "replaced_secrets",
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("replaced_ms", sa.BigInteger, nullable=False),
        sa.Column("valid_until_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("digest", name="pk_replaced_secrets"),
        sa.ForeignKeyConstraint(["key_id"], ["keys.id"], name="fk_replaced_secrets_key_id"),
    )


def downgrade() -> None:
    op.drop_table("replaced_secrets")
