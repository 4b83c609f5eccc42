"""The ids that backends give their answers, so that a request is found by what its client has."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ledger", sa.Column("answer_id", sa.Text, nullable=False, server_default=""))
    given = sa.text("answer_id <> ''")
    op.create_index("ix_ledger_answer_id", "ledger", ["answer_id"], sqlite_where=given, postgresql_where=given)


def downgrade() -> None:
    op.drop_index("ix_ledger_answer_id", "ledger")
    op.drop_column("ledger", "answer_id")
