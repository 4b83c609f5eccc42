"""Limits and budgets of organisations, teams and projects; which routes and tiers a key may use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_LEVELS = ("organisations", "teams", "projects")


def upgrade() -> None:
    for table in _LEVELS:
        op.add_column(table, sa.Column("requests_per_minute", sa.BigInteger))
        op.add_column(table, sa.Column("tokens_per_minute", sa.BigInteger))
        op.add_column(table, sa.Column("parallel", sa.Integer))
        op.add_column(table, sa.Column("budget_nanousd", sa.BigInteger))
    for name in ("allowed_tiers", "allowed_routes"):
        op.add_column("keys", sa.Column(name, sa.Text))


def downgrade() -> None:
    for name in ("allowed_routes", "allowed_tiers"):
        op.drop_column("keys", name)
    for table in reversed(_LEVELS):
        for name in ("budget_nanousd", "parallel", "tokens_per_minute", "requests_per_minute"):
            op.drop_column(table, name)
