"""`tierline tiers calibrate`: measure how sure a model may be believed, for `low_confidence` in policies."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.common import ConfigOption, Exit, JsonOption, check_models, fail, print_json, settings_or_exit, short


def calibrate(
    file: Annotated[
        Path,
        typer.Option("--file", "-f", help="JSON lines: messages or prompt, and expected (a text or several)."),
    ],
    model: Annotated[str, typer.Option(help="Model of tierline.yaml to measure.")],
    url: Annotated[
        str | None, typer.Option(help="Where to ask it: the gateway (default), or a server that knows it by that name.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="API key. Default: of the gateway here the first key.", envvar="TIERLINE_API_KEY"),
    ] = None,
    match: Annotated[
        str, typer.Option(help="exact: the answer is the expected text; contains: it holds it.")
    ] = "exact",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 32,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1, max=256)] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and write nothing.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a model examples whose answers are known, and learn from its log-probabilities when it is right.

    Writes the model's curve to `data_dir/confidence/`; a running gateway goes by it within a second. Each gateway host
    needs the file.

    Exit code 1: nothing could be measured; 2: a file or an option that cannot be used.
    """
    import httpx

    from gateway.escalating.calibrating import InvalidExamples, Match, measure, observe, read
    from gateway.escalating.confidence import reports_logprobs, write

    settings = settings_or_exit(config)
    check_models(settings, [model], "--model")
    if not reports_logprobs(settings, model):
        fail(
            f"model '{model}' does not have the capability 'logprobs': name it in tierline.yaml if it does", Exit.USAGE
        )
    how: Match
    if match == "exact":
        how = "exact"
    elif match == "contains":
        how = "contains"
    else:
        fail(f"--match is exact or contains, not '{match}'", Exit.USAGE)
    secret = _first_key(settings.storage.data_dir / "first-key") if key is None and url is None else key
    at = (url or f"http://{_reachable(settings.server.host)}:{settings.server.port}").rstrip("/").removesuffix("/v1")
    try:
        examples = read(file.read_text(encoding="utf-8").split("\n"))
    except (OSError, UnicodeDecodeError, InvalidExamples) as error:
        fail(f"{file}: {error}", Exit.USAGE)

    def told(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\rasked {done} of {len(examples)}", end="", file=sys.stderr)

    asking = observe(at, secret, model, examples, match=how, max_tokens=max_tokens, concurrency=concurrency, told=told)
    try:
        measured = measure(model, asyncio.run(asking))
    except (httpx.TransportError, httpx.InvalidURL) as error:
        fail(f"{at} cannot be asked: {error or type(error).__name__}. Is the gateway running?")
    except InvalidExamples as error:
        fail(str(error))
    curve = measured.curve
    path = None if dry_run else write(settings.storage.data_dir, curve)
    if as_json:
        import msgspec

        print_json({**msgspec.to_builtins(measured), "file": None if path is None else str(path)})
        return
    print(f"\nmodel               {model}")
    print(f"examples            {curve.examples}, {curve.right} answered rightly ({curve.right / curve.examples:.0%})")
    print(f"calibration error   {curve.ece_before:.3f} of the bare probability, {curve.ece_after:.3f} by the curve")
    print("\nconfidence   answers that pass   right among them")
    for row in measured.kept:
        right = "-" if row["right"] is None else f"{row['right']:.0%}"
        print(f"{row['confidence']:<12} {row['pass']:>17.0%}   {right:>16}")
    print(f"\n{'nothing written (--dry-run)' if path is None else f'written to {short(path)}'}")


def _first_key(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        fail(f"give --key or TIERLINE_API_KEY: there is no {short(path)}", Exit.USAGE)


def _reachable(host: str) -> str:
    """An address to ask a server at that listens on `host`."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
