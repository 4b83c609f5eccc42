"""The team of outcomes: what only one team has seen teaches no policy of others. Earlier ones count as of one team."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

BEFORE: Final = ("source", "policy", "kind", "tier", "model")
NOW: Final = ("source", "policy", "team", "kind", "tier", "model")
COLUMNS: Final = f"day, {', '.join(BEFORE)}, wins, losses"


def upgrade() -> None:
    op.execute("CREATE TABLE outcomes_kept AS SELECT * FROM outcomes")
    _make_anew(NOW)
    op.execute(f"INSERT INTO outcomes ({COLUMNS}, team) SELECT {COLUMNS}, '' FROM outcomes_kept")
    op.drop_table("outcomes_kept")


def downgrade() -> None:
    sums = f"day, {', '.join(BEFORE)}, SUM(wins) AS wins, SUM(losses) AS losses"
    op.execute(f"CREATE TABLE outcomes_kept AS SELECT {sums} FROM outcomes GROUP BY day, {', '.join(BEFORE)}")
    _make_anew(BEFORE)
    op.execute(f"INSERT INTO outcomes ({COLUMNS}) SELECT {COLUMNS} FROM outcomes_kept")
    op.drop_table("outcomes_kept")


def _make_anew(names: Sequence[str]) -> None:
    """The primary key cannot be changed in place on SQLite."""
    op.drop_table("outcomes")
    op.create_table(
        "outcomes",
        sa.Column("day", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in names),
        sa.Column("wins", sa.Float, nullable=False),
        sa.Column("losses", sa.Float, nullable=False),
        sa.PrimaryKeyConstraint("day", *names, name="pk_outcomes"),
    )
