"""Keys of the admin API, and the audit log, which the database itself keeps from being changed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "admin_keys",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("organisation_id", sa.Text),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger),
        sa.Column("revoked_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_admin_keys"),
        sa.ForeignKeyConstraint(["organisation_id"], ["organisations.id"], name="fk_admin_keys_organisation_id"),
    )
    op.create_table(
        "admin_secrets",
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("admin_key_id", sa.Text, nullable=False),
        sa.Column("prefix", sa.Text, nullable=False),
        sa.Column("created_ms", sa.BigInteger, nullable=False),
        sa.Column("valid_until_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("digest", name="pk_admin_secrets"),
        sa.ForeignKeyConstraint(["admin_key_id"], ["admin_keys.id"], name="fk_admin_secrets_admin_key_id"),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("ts_ms", sa.BigInteger, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("object", sa.Text, nullable=False),
        sa.Column("organisation_id", sa.Text),
        sa.Column("before", sa.Text),
        sa.Column("after", sa.Text),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    refusal = "the audit log is append-only"
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{refusal}'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change()"
        )
    else:
        for event in ("update", "delete"):
            op.execute(
                f"CREATE TRIGGER audit_no_{event} BEFORE {event.upper()} ON audit "
                f"BEGIN SELECT RAISE(ABORT, '{refusal}'); END"
            )


def downgrade() -> None:
    op.drop_table("audit")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION refuse_audit_change()")
    op.drop_table("admin_secrets")
    op.drop_table("admin_keys")
