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
from gateway.ledger.money import format_usd
from gateway.settings import Settings

_Result = TypeVar("_Result")
_CONNECT_S = 3.0

app = typer.Typer(no_args_is_help=True, help="The answer cache: statistics, purging, evaluation.")


@app.command()
def stats(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Hits, misses and why, entries, bytes and latencies of the running cache process.

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
    everything: Annotated[bool, typer.Option("--all", help="Every answer; needed when no condition is given.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget cached answers that meet every condition given.

    Exit code 1: no cache process answers; 2: no condition and no --all, or one that names nobody or nothing.
    """
    if everything == bool(scope or model or older_than):
        fail("say which answers: --scope, --model, --older-than, or --all alone for every one.", Exit.USAGE)
    age_s = duration(older_than, "--older-than").total_seconds() if older_than else None
    settings = settings_or_exit(config)
    check_models(settings, [model] if model else (), "--model")
    scopes = _scopes(settings, scope, model, older_than)

    async def forget(client: CacheClient) -> int:
        return sum([await client.purge(one, model, age_s) for one in scopes])

    removed = _ask(settings, forget)
    if as_json:
        print_json({"removed": removed, "scope": scope, "model": model, "older_than": older_than})
        return
    of_whom = f" of {scope}" if scope else ""
    of_model = f" by {model}" if model else ""
    of_age = f" older than {older_than}" if older_than else ""
    print(f"forgotten: {removed} answer{'' if removed == 1 else 's'}{of_whom}{of_model}{of_age}")


@app.command()
def evaluate(
    pairs: Annotated[
        Path | None, typer.Option(metavar="FILE.tsv", help="Columns text_a, text_b, same (1 or 0).")
    ] = None,
    stream: Annotated[Path | None, typer.Option(metavar="FILE.tsv", help="Columns text, answer_id.")] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0, max=1, help="Cosine similarity. Default: the configured one.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hit rate and false-hit rate of the semantic cache on a file of yours, without touching the running cache.

    Exit code 1: the embedder cannot be loaded; 2: a file that cannot be used.
    """
    if (pairs is None) == (stream is None):
        fail("give either --pairs FILE.tsv or --stream FILE.tsv.", Exit.USAGE)
    settings = settings_or_exit(config).cache
    # A process of its own: the embedder's libraries have no place in the gateway's commands.
    command = [sys.executable, "-m", "cache.evaluate", "--embedder", settings.embedder]
    command += ["--threshold", str(settings.similarity_threshold if threshold is None else threshold)]
    command += ["--threads", str(settings.threads)]
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


def _scopes(settings: Settings, scope: str | None, model: str | None, older_than: str | None) -> list[str | None]:
    """Whose answers are meant, or why nobody's."""
    from gateway.access.owners import UnknownOwner, scopes_to_purge

    return with_database(
        settings, lambda database: scopes_to_purge(database, scope, model, older_than), usage=(UnknownOwner,)
    )


def _print_stats(found: CacheStats) -> None:
    rows = [
        ("state", found.state),
        ("embedder", found.embedder),
        ("entries", f"{found.entries:,} of {found.max_entries:,}"),
        ("size", f"{found.bytes / 2**20:,.1f} of {found.max_bytes / 2**20:,.0f} MiB"),
        ("indexes / vectors", f"{found.indexes:,} / {found.vectors:,}"),
        ("look-ups", f"{found.lookups:,}"),
        ("hits: exact / semantic", f"{found.exact_hits:,} / {found.semantic_hits:,}"),
        ("hit rate", f"{found.hit_rate:.1%}" if found.lookups else "-"),
        *((f"miss: {reason}", f"{count:,}") for reason, count in _largest_first(found.misses)),
        ("stored", f"{found.stores:,}"),
        *((f"not stored: {reason}", f"{count:,}") for reason, count in _largest_first(found.refused_stores)),
        ("evicted / expired / purged", f"{found.evictions:,} / {found.expirations:,} / {found.purged:,}"),
        ("saved", f"${format_usd(found.saved_nanousd)}"),
        ("look-up p50 / p99", f"{found.lookup.p50_ms:.2f} / {found.lookup.p99_ms:.2f} ms"),
        ("embedding p50 / p99", f"{found.embedding.p50_ms:.2f} / {found.embedding.p99_ms:.2f} ms"),
    ]
    print_table([Column(""), Column("", "number")], rows)


def _largest_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])
