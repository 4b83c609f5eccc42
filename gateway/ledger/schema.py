"""The tables, for SQLite and PostgreSQL alike. Migrations bring a database to this; a test compares the two.

`ledger`, `decisions`, `notes` and `audit` only ever grow: no row is updated, no counter is kept beside them.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy import UniqueConstraint as Unique

# The newest migration. A database that says so needs no migration, so alembic is not even imported.
HEAD: Final = "0014"

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# One row per fact about the whole database: `keys_version` grows with every change of a key, `secret_check` proves
# that the server secret is the one the keys were made with.
facts = Table("facts", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))


def _ceilings() -> list[Column[int]]:
    """Limits and the monthly budget of an organisation, a team, a project or a key; NULL: none."""
    return [
        Column("requests_per_minute", BigInteger),
        Column("tokens_per_minute", BigInteger),
        Column("parallel", Integer),
        Column("budget_nanousd", BigInteger),
    ]


organisations = Table(
    "organisations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    *_ceilings(),
    Unique("name"),
)

teams = Table(
    "teams",
    metadata,
    Column("id", Text, primary_key=True),
    Column("organisation_id", Text, ForeignKey("organisations.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    *_ceilings(),
    Unique("organisation_id", "name"),
)

projects = Table(
    "projects",
    metadata,
    Column("id", Text, primary_key=True),
    Column("team_id", Text, ForeignKey("teams.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    *_ceilings(),
    Unique("team_id", "name"),
)

keys = Table(
    "keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("project_id", Text, ForeignKey("projects.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("prefix", Text, nullable=False),
    Column("digest", Text, nullable=False),  # keyed BLAKE2b of the token, hexadecimal; the token itself is nowhere
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger),
    Column("revoked_ms", BigInteger),
    *_ceilings(),
    Column("allowed_models", Text),  # JSON list; NULL: all; so the two that follow
    Column("allowed_tiers", Text),
    Column("allowed_routes", Text),
    Unique("digest"),
)

# Secrets that keys had before they were rotated. They stay on record when their time is over, to be told from unknown.
replaced_secrets = Table(
    "replaced_secrets",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("key_id", Text, ForeignKey("keys.id"), nullable=False),
    Column("prefix", Text, nullable=False),
    Column("replaced_ms", BigInteger, nullable=False),
    Column("valid_until_ms", BigInteger, nullable=False),
)

ledger = Table(
    "ledger",
    metadata,
    Column("attempt_id", Text, primary_key=True),
    Column("request_id", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("ts_ms", BigInteger, nullable=False),
    Column("key_id", Text, nullable=False),
    Column("project_id", Text, nullable=False),
    Column("team_id", Text, nullable=False),
    Column("organisation_id", Text, nullable=False),
    Column("policy", Text, nullable=False),
    Column("policy_version", Text, nullable=False),
    Column("tier", Text, nullable=False),
    Column("requested_tier", Text, nullable=False),
    Column("requested_model", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("backend", Text, nullable=False),
    Column("replica", Text, nullable=False),
    Column("cache", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("status_code", Integer, nullable=False),
    Column("finish_reason", Text, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_input_tokens", BigInteger, nullable=False),
    Column("cache_write_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("usage_source", Text, nullable=False),
    Column("cost_nanousd", BigInteger, nullable=False),
    Column("saved_nanousd", BigInteger, nullable=False),
    Column("price_version", Text, nullable=False),
    Column("ttft_ms", Float),
    Column("duration_ms", Float, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("tags", Text, nullable=False),  # JSON object
    Column("error", Text, nullable=False),
    Column("answer_id", Text, nullable=False, server_default=""),
    Column("placed", Text, nullable=False, server_default=""),
    Index(None, "ts_ms"),
    Index(None, "request_id"),
    # The same in PostgreSQL, by the migration; to say so here would load that dialect into every process.
    Index(None, "answer_id", sqlite_where=text("answer_id <> ''")),
)

decisions = Table(
    "decisions",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("ts_ms", BigInteger, nullable=False),
    Column("json", Text, nullable=False),  # a whole `rows.Decision`
    Index(None, "ts_ms", "request_id"),
)

# What happened to requests beside their attempts, such as an escalation or a judgement of their answer.
notes = Table(
    "notes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("request_id", Text, nullable=False),
    Column("ts_ms", BigInteger, nullable=False),
    Column("kind", Text, nullable=False),
    Column("json", Text, nullable=False),  # the `data` of a `rows.Note`
    Index(None, "request_id"),
    Index(None, "kind", "ts_ms"),
)

# What answers came to, summed over a day (UTC, days since 1970): wins and losses of a tier at a kind of request, by
# where it is known from. Fractions, since a request is a mixture of kinds. Counters, unlike ledger and notes.
outcomes = Table(
    "outcomes",
    metadata,
    Column("day", Integer, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("policy", Text, primary_key=True),
    Column("team", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("tier", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("wins", Float, nullable=False),
    Column("losses", Float, nullable=False),
)

# How many outcomes of a day came from a key: what is beyond its share does not count.
outcome_shares = Table(
    "outcome_shares",
    metadata,
    Column("day", Integer, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("key_id", Text, primary_key=True),
    Column("given", Integer, nullable=False),
)

# Policies that are tried in the place of others, each at a version of its file: how far they have come, and whether
# they were rolled back. Unlike the ledger these rows change.
rollouts = Table(
    "rollouts",
    metadata,
    Column("policy", Text, primary_key=True),
    Column("version", Text, primary_key=True),
    Column("instead_of", Text, nullable=False),
    Column("began_ms", BigInteger, nullable=False),
    Column("step", Integer, nullable=False),
    Column("step_ms", BigInteger, nullable=False),
    Column("comparison", Integer, nullable=False),
    Column("comparison_ms", BigInteger, nullable=False),
    Column("checked_ms", BigInteger, nullable=False),
    Column("rolled_back_ms", BigInteger),  # NULL: it serves
    Column("reason", Text, nullable=False),
    Column("verdicts", Text, nullable=False),  # JSON list: the last comparison
)

# What became of the requests of their two sides in one comparison, as each process (`writer`) counted it.
rollout_tallies = Table(
    "rollout_tallies",
    metadata,
    Column("policy", Text, primary_key=True),
    Column("version", Text, primary_key=True),
    Column("comparison", Integer, primary_key=True, autoincrement=False),
    Column("side", Text, primary_key=True),  # old or new
    Column("writer", Text, primary_key=True),
    Column("json", Text, nullable=False),  # a `rollouts.tallies.Tally`
)

# Every policy that was ever in force, as it was written; what ledger and decisions name by its version.
policy_versions = Table(
    "policy_versions",
    metadata,
    Column("name", Text, primary_key=True),
    Column("version", Text, primary_key=True),
    Column("file", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("seen_by", Text, nullable=False),
    Column("first_seen_ms", BigInteger, nullable=False),
    Column("last_seen_ms", BigInteger, nullable=False),
)

# Keys of the admin API, apart from those for models. A key has one secret, and those it had before it was rotated, with
# the time until which they are good.
admin_keys = Table(
    "admin_keys",
    metadata,
    Column("id", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("role", Text, nullable=False),  # read or write
    Column("organisation_id", Text, ForeignKey("organisations.id")),  # NULL: every organisation, and the gateway itself
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger),
    Column("revoked_ms", BigInteger),
)

admin_secrets = Table(
    "admin_secrets",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("admin_key_id", Text, ForeignKey("admin_keys.id"), nullable=False),
    Column("prefix", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("valid_until_ms", BigInteger),  # NULL: the present one
)

# Rows are added, never changed: triggers refuse it.
audit = Table(
    "audit",
    metadata,
    Column("id", Text, primary_key=True),
    Column("ts_ms", BigInteger, nullable=False),
    Column("actor", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("object", Text, nullable=False),
    Column("organisation_id", Text),
    Column("before", Text),  # JSON object
    Column("after", Text),  # JSON object
    Column("request_id", Text, nullable=False),
    Column("address", Text, nullable=False),
)

# Answers of the Responses API that clients may come back to. Unlike all else here they hold text of customers, and they
# go: by the client's wish, by age, or when there are too many.
responses = Table(
    "responses",
    metadata,
    Column("id", Text, primary_key=True),
    Column("conversation_id", Text, nullable=False),  # the id of its first answer
    Column("previous_id", Text),  # the answer that this one goes on from; NULL: the first
    Column("project_id", Text, nullable=False),  # whose it is: the keys of this project
    Column("created_ms", BigInteger, nullable=False),
    Column("body_bytes", BigInteger, nullable=False),
    Column("total_bytes", BigInteger, nullable=False),  # of this body and of all before it
    Column("total_items", BigInteger, nullable=False),  # likewise, items of input and output
    Column("body", LargeBinary, nullable=False),  # JSON: the answer, and the input that was new with it
    Index(None, "conversation_id", "created_ms", "body_bytes"),
)

# Files that clients upload for batches, and what batches make of them. A row without `complete` is an upload under way,
# or one that broke off. Where the content is: `gateway/files/content.py`.
files = Table(
    "files",
    metadata,
    Column("id", Text, primary_key=True),
    Column("project_id", Text, nullable=False),  # whose it is: the keys of this project
    Column("purpose", Text, nullable=False),
    Column("filename", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    Column("complete", Boolean, nullable=False),
    Index(None, "project_id", "id"),
    Index(None, "expires_ms"),
)

file_chunks = Table(
    "file_chunks",
    metadata,
    Column("file_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # from 0
    Column("data", LargeBinary, nullable=False),
)

# Batches of requests. One process at a time works on a batch: the one that holds its lease.
batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("organisation_id", Text, nullable=False),
    Column("project_id", Text, nullable=False),
    Column("key_id", Text, nullable=False),  # whose requests its lines are
    Column("endpoint", Text, nullable=False),
    Column("input_file_id", Text, nullable=False),
    Column("output_file_id", Text),
    Column("error_file_id", Text),
    Column("status", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
    Column("in_progress_ms", BigInteger),
    Column("finalizing_ms", BigInteger),
    Column("cancelling_ms", BigInteger),
    Column("ended_ms", BigInteger),
    Column("total", Integer, nullable=False),  # lines; 0 until they are checked
    Column("completed", Integer, nullable=False),  # these two, and the tokens: of a batch that has ended
    Column("failed", Integer, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("errors", Text),  # JSON list
    Column("metadata", Text),  # JSON object
    Column("headers", Text, nullable=False),  # JSON object: what each line is asked with
    Column("output_expires_s", BigInteger),
    Column("lease_owner", Text, nullable=False),
    Column("lease_until_ms", BigInteger, nullable=False),
    Index(None, "project_id", "id"),
    Index(None, "status"),
)

# What lines of running batches came to; it becomes the batch's files when it ends. Holds text of customers.
batch_results = Table(
    "batch_results",
    metadata,
    Column("batch_id", Text, primary_key=True),
    Column("line", Integer, primary_key=True, autoincrement=False),  # from 1
    Column("ok", Boolean, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),  # the line of the output or error file
    Index(None, "batch_id", "ok"),
)
