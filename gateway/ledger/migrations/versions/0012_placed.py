"""Why an attempt went to its replica, where there were several."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ledger", sa.Column("placed", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("ledger", "placed")
