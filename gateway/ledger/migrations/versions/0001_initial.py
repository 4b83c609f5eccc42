"""Who pays (organisations, teams, projects, keys), what they used (ledger) and why it went there (decisions)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "facts",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_facts"),
    )
    op.create_table(
        "organisations",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_organisations"),
        sa.UniqueConstraint("name", name="uq_organisations_name"),
    )
    op.create_table(
        "teams",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("organisation_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_teams"),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name="fk_teams_organisation_id"),
        sa.UniqueConstraint("organisation_id", "name", name="uq_teams_organisation_id"),
    )
    op.create_table(
        "projects",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("team_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_projects"),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name="fk_projects_team_id"),
        sa.UniqueConstraint("team_id", "name", name="uq_projects_team_id"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger),
        sa.Column("revoked_ms", sa.BigInteger),
        sa.Column("requests_per_minute", sa.BigInteger),
        sa.Column("tokens_per_minute", sa.BigInteger),
        sa.Column("parallel", sa.Integer),
        sa.Column("budget_nanousd", sa.BigInteger),
        sa.Column("allowed_models", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_keys_project_id"),
        sa.UniqueConstraint("digest", name="uq_keys_digest"),
    )
    op.create_table(
        "ledger",
        sa.Column("attempt_id", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("ts_ms", sa.BigInteger, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("project_id", sa.Text, nullable=False),
        sa.Column("team_id", sa.Text, nullable=False),
        sa.Column("organisation_id", sa.Text, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("policy_version", sa.Text, nullable=False),
        sa.Column("tier", sa.Text, nullable=False),
        sa.Column("requested_tier", sa.Text, nullable=False),
        sa.Column("requested_model", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("backend", sa.Text, nullable=False),
        sa.Column("replica", sa.Text, nullable=False),
        sa.Column("cache", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("status_code", sa.Integer, nullable=False),
        sa.Column("finish_reason", sa.Text, nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_input_tokens", sa.BigInteger, nullable=False),
        sa.Column("cache_write_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("usage_source", sa.Text, nullable=False),
        sa.Column("cost_nanousd", sa.BigInteger, nullable=False),
        sa.Column("saved_nanousd", sa.BigInteger, nullable=False),
        sa.Column("price_version", sa.Text, nullable=False),
        sa.Column("ttft_ms", sa.Float),
        sa.Column("duration_ms", sa.Float, nullable=False),
        sa.Column("stream", sa.Boolean, nullable=False),
        sa.Column("tags", sa.Text, nullable=False),
        sa.Column("error", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("attempt_id", name="pk_ledger"),
    )
    op.create_index("ix_ledger_ts_ms", "ledger", ["ts_ms"])
    op.create_index("ix_ledger_request_id", "ledger", ["request_id"])
    op.create_table(
        "decisions",
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("ts_ms", sa.BigInteger, nullable=False),
        sa.Column("json", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_decisions"),
    )


def downgrade() -> None:
    for table in ("decisions", "ledger", "keys", "projects", "teams", "organisations", "facts"):
        op.drop_table(table)
