"""`tierline cache stats|purge|evaluate`: look at the running answer cache, empty it, measure it on your questions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from cache.client import CacheClient, CacheUnavailable
from cache.replicas.standing import ReplicaStats
from cache.stats import CacheStats
from gateway.cli.common import (
    Column,
    ConfigOption,
    Exit,
    JsonOption,
    check_models,
    duration,
    fail,
    print_json,
    print_table,
    settings_or_exit,
    with_database,
)
from gateway.cli.promises import in_words
from gateway.ledger.money import format_usd
from gateway.settings import Settings

_Result = TypeVar("_Result")
_CONNECT_S = 3.0

app = typer.Typer(no_args_is_help=True, help="The answer cache: statistics, purging, evaluation.")


@app.command()
def stats(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Hits, misses and why, how each promise stands, entries, bytes and latencies of the running cache process.

    Exit code 1: no cache process answers.
    """
    found = _ask(settings_or_exit(config), lambda client: client.stats())
    if as_json:
        print_json({**msgspec.to_builtins(found), "hit_rate": found.hit_rate})
    else:
        _print_stats(found)


@app.command()
def purge(
    scope: Annotated[
        str | None,
        typer.Option(metavar="WHOSE", help="Only answers of organisation:NAME, team:NAME or key:NAME, and within it."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Only answers of this model.")] = None,
    older_than: Annotated[str | None, typer.Option(metavar="AGE", help="Only older ones: 90s, 30m, 12h, 7d.")] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="NAME=VALUE", help="Only answers to requests with this tag.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Only answers given under this policy.")] = None,
    entry: Annotated[
        str | None, typer.Option(metavar="ID", help="Only this one: the header x-tierline-cache-entry names it.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every answer; needed when no condition is given.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget cached answers that meet every condition given, in every cache process that shares them.

    Waits until each has confirmed, for some seconds at most, and names those that have not.

    Exit code 1: no cache process answers, or not every one has confirmed; 2: no condition and no --all, or one that
    names nobody or nothing.
    """
    conditions = {"model": model, "older_than": older_than, "tag": tag, "policy": policy, "entry": entry}
    if everything == bool(scope or any(conditions.values())):
        options = "--scope, --model, --older-than, --tag, --policy, --entry"
        fail(f"say which answers: {options}, or --all alone for every one.", Exit.USAGE)
    age_s = duration(older_than, "--older-than").total_seconds() if older_than else None
    settings = settings_or_exit(config)
    check_models(settings, [model] if model else (), "--model")
    scopes = _scopes(settings, scope, conditions)
    done = _ask(
        settings,
        lambda client: client.purge(scopes, model=model, older_than_s=age_s, tag=tag, policy=policy, entry=entry),
    )
    if as_json:
        print_json({**msgspec.to_builtins(done), "scope": scope, **conditions})
    else:
        words = {"of": scope, "by": model, "older than": older_than, "tagged": tag}
        words |= {"under policy": policy, "with the id": entry}
        said = "".join(f" {word} {value}" for word, value in words.items() if value)
        everywhere = f" in {done.confirmed} cache processes" if done.confirmed > 1 else ""
        print(f"forgotten: {done.removed} answer{'' if done.removed == 1 else 's'}{said}{everywhere}")
    if done.unconfirmed:
        fail("not everywhere yet: " + "; ".join(done.unconfirmed))


@app.command()
def evaluate(
    pairs: Annotated[
        Path | None, typer.Option(metavar="FILE.tsv", help="Columns text_a, text_b, same (1 or 0).")
    ] = None,
    stream: Annotated[Path | None, typer.Option(metavar="FILE.tsv", help="Columns text, answer_id.")] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Cosine similarity. Default: the configured one.")
    ] = None,
    promise: Annotated[
        float | None, typer.Option(min=0, max=1, help="Decide by a promise of at most this share of wrong hits.")
    ] = None,
    audit_rate: Annotated[float, typer.Option(min=0, max=1, help="Share of hits compared, under a promise.")] = 0.05,
    mode: Annotated[str, typer.Option(help="Under a promise: serve, certify or shadow.")] = "serve",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hit rate and false-hit rate of the semantic cache on a file of yours, without touching the running cache.

    Exit code 1: the embedder cannot be loaded; 2: a file that cannot be used.
    """
    if (pairs is None) == (stream is None):
        fail("give either --pairs FILE.tsv or --stream FILE.tsv.", Exit.USAGE)
    platform = settings_or_exit(config)
    settings, folder = platform.cache, platform.storage.data_dir / "embedders"
    # A process of its own: the embedder's libraries have no place in the gateway's commands.
    command = [sys.executable, "-m", "cache.evaluate", "--embedder", settings.embedder]
    command += ["--embedder-backend", settings.embedder_backend, "--embedders-dir", str(folder)]
    command += ["--threshold", str(settings.similarity_threshold if threshold is None else threshold)]
    command += ["--threads", str(settings.threads)]
    if promise is not None:
        command += ["--promise", str(promise), "--audit-rate", str(audit_rate), "--mode", mode]
    command += ["--pairs", str(pairs)] if pairs else ["--stream", str(stream)]
    if as_json:
        command.append("--json")
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def _ask(settings: Settings, question: Callable[[CacheClient], Awaitable[_Result]]) -> _Result:
    """The running process's answer to a question, or exit code 1 and why."""
    path = settings.run_path("cache.sock")

    async def run() -> _Result:
        async with CacheClient(path, timeout_ms=1000) as client:
            if not await client.wait_connected(_CONNECT_S):
                raise CacheUnavailable("unavailable", f"no cache process answers on {path}: start `tierline up`")
            return await question(client)

    try:
        return asyncio.run(run())
    except CacheUnavailable as error:
        fail(str(error))


def _scopes(settings: Settings, scope: str | None, conditions: Mapping[str, str | None]) -> list[str] | None:
    """Whose answers are meant (None: everybody's), or why nobody's."""
    from gateway.access.owners import UnknownOwner, named_scopes, scopes_to_purge

    return named_scopes(
        with_database(settings, lambda database: scopes_to_purge(database, scope, conditions), usage=(UnknownOwner,))
    )


def _print_stats(found: CacheStats) -> None:
    rows = [
        ("state", found.state),
        ("embedder", found.embedder),
        ("answers", f"{found.entries:,} of {found.max_entries:,}, to {found.questions:,} questions"),
        ("memory", _of_mib(found.bytes, found.max_bytes)),
        ("disk", _of_mib(found.disk_bytes, found.max_disk_bytes) if found.max_disk_bytes else "-"),
        *((("disk does not work", found.storage_error),) if found.storage_error else ()),
        *((("not on disk yet", f"{found.unwritten:,}"),) if found.unwritten else ()),
        *((("unreadable", f"{found.unreadable:,}"),) if found.unreadable else ()),
        ("indexes / vectors in memory", f"{found.indexes:,} / {found.vectors:,}"),
        *((("vectors to be made", f"{found.waiting_vectors:,}"),) if found.waiting_vectors else ()),
        ("look-ups", f"{found.lookups:,}"),
        ("hits: exact / semantic", f"{found.exact_hits:,} / {found.semantic_hits:,}"),
        ("hit rate", f"{found.hit_rate:.1%}" if found.lookups else "-"),
        *((f"miss: {reason}", f"{count:,}") for reason, count in _largest_first(found.misses)),
        ("not given: audit / shadow", f"{found.audits:,} / {found.shadow_hits:,}"),
        *((f"compared: {words}", f"{count:,}") for words, count in _largest_first(found.judged)),
        *((f"not compared: {reason}", f"{count:,}") for reason, count in _largest_first(found.unjudged)),
        *((f"feedback: {rating}", f"{count:,}") for rating, count in _largest_first(found.feedback)),
        ("stored", f"{found.stores:,}"),
        *((f"not stored: {reason}", f"{count:,}") for reason, count in _largest_first(found.refused_stores)),
        ("evicted / expired / purged", f"{found.evictions:,} / {found.expirations:,} / {found.purged:,}"),
        ("saved", f"${format_usd(found.saved_nanousd)}"),
        ("look-up p50 / p99", f"{found.lookup.p50_ms:.2f} / {found.lookup.p99_ms:.2f} ms"),
        ("embedding p50 / p99", f"{found.embedding.p50_ms:.2f} / {found.embedding.p99_ms:.2f} ms"),
    ]
    if (shared := found.replication) is not None:
        rows += _replication(shared)
    print_table([Column(""), Column("", "number")], rows)
    for standing in found.promises:
        print()
        for line in in_words(standing):
            print(line)


def _replication(found: ReplicaStats) -> list[tuple[str, str]]:
    troubles = {"dropped": found.dropped, "no room": found.refused, "unreadable": found.unreadable}
    return [
        ("shared through Redis", f"by {found.replicas} processes" if found.connected else "no: Redis is away"),
        ("answers in Redis", f"{found.answers:,}, {found.bytes / 2**20:,.1f} MiB"),
        ("waiting for Redis", f"{found.waiting:,}"),
        ("published / taken / retracted", f"{found.published:,} / {found.taken:,} / {found.retractions:,}"),
        *((f"not shared: {word}", f"{count:,}") for word, count in troubles.items() if count),
    ]


def _of_mib(size: int, bound: int) -> str:
    return f"{size / 2**20:,.1f} of {bound / 2**20:,.0f} MiB"


def _largest_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])
