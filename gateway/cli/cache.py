"""`tierline cache stats|purge|evaluate`: look at the running answer cache, empty it, measure it on your questions."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from cache.client import CacheClient, CacheUnavailable
from cache.stats import CacheStats
from gateway.cli.common import ConfigOption, Exit, JsonOption, fail, print_json, settings_or_exit

_Result = TypeVar("_Result")
_CONNECT_S = 3.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

app = typer.Typer(no_args_is_help=True, help="The answer cache: statistics, purging, evaluation.")


@app.command()
def stats(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Hits, misses and why, entries, bytes and latencies of the running cache process.

    Exit code 1: no cache process answers.
    """
    found = _ask(config, lambda client: client.stats())
    if as_json:
        print_json({**msgspec.to_builtins(found), "hit_rate": found.hit_rate})
    else:
        _print_stats(found)


@app.command()
def purge(
    scope: Annotated[str | None, typer.Option(help="Only this tenant's answers, such as team:ID.")] = None,
    model: Annotated[str | None, typer.Option(help="Only answers of this model.")] = None,
    older_than: Annotated[str | None, typer.Option(metavar="AGE", help="Only older ones: 90s, 30m, 12h, 7d.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every answer; needed when no condition is given.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget cached answers that meet every condition given.

    Exit code 1: no cache process answers; 2: no condition and no --all, or an age that cannot be read.
    """
    if everything == bool(scope or model or older_than):
        fail("say which answers: --scope, --model, --older-than, or --all alone for every one.", Exit.USAGE)
    age_s = _seconds(older_than) if older_than else None
    removed = _ask(config, lambda client: client.purge(scope, model, age_s))
    if as_json:
        print_json({"removed": removed})
    else:
        print(f"{removed} answer{'' if removed == 1 else 's'} forgotten")


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


def _ask(config: Path | None, question: Callable[[CacheClient], Awaitable[_Result]]) -> _Result:
    """The running process's answer to a question, or exit code 1 and why."""
    path = settings_or_exit(config).run_path("cache.sock")

    async def run() -> _Result:
        async with CacheClient(path, timeout_ms=1000) as client:
            if not await client.wait_connected(_CONNECT_S):
                raise CacheUnavailable("unavailable", f"no cache process answers on {path}: start `tierline up`")
            return await question(client)

    try:
        return asyncio.run(run())
    except CacheUnavailable as error:
        fail(str(error))


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", age.strip())
    if not match:
        fail(f"the age {age!r} cannot be read: write 90s, 30m, 12h or 7d.", Exit.USAGE)
    return float(match[1]) * _UNITS[match[2]]


def _print_stats(found: CacheStats) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("state", found.state)
    table.add_row("embedder", found.embedder)
    table.add_row("entries", f"{found.entries:,} of {found.max_entries:,}")
    table.add_row("size", f"{found.bytes / 2**20:,.1f} of {found.max_bytes / 2**20:,.0f} MiB")
    table.add_row("indexes / vectors", f"{found.indexes:,} / {found.vectors:,}")
    table.add_row("look-ups", f"{found.lookups:,}")
    table.add_row("hits: exact / semantic", f"{found.exact_hits:,} / {found.semantic_hits:,}")
    table.add_row("hit rate", f"{found.hit_rate:.1%}" if found.lookups else "-")
    for reason, count in sorted(found.misses.items(), key=lambda item: -item[1]):
        table.add_row(f"miss: {reason}", f"{count:,}")
    table.add_row("stored", f"{found.stores:,}")
    for reason, count in sorted(found.refused_stores.items(), key=lambda item: -item[1]):
        table.add_row(f"not stored: {reason}", f"{count:,}")
    table.add_row("evicted / expired / purged", f"{found.evictions:,} / {found.expirations:,} / {found.purged:,}")
    table.add_row("saved", f"${found.saved_nanousd / 1e9:,.6f}")
    table.add_row("look-up p50 / p99", f"{found.lookup.p50_ms:.2f} / {found.lookup.p99_ms:.2f} ms")
    table.add_row("embedding p50 / p99", f"{found.embedding.p50_ms:.2f} / {found.embedding.p99_ms:.2f} ms")
    Console().print(table)
