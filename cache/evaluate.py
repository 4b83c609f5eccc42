"""How good the semantic cache is on anyone's questions: hit rate and false-hit rate, every decision shown.

The decisions are those of the running cache: eligibility, the embedder's refusals, neighbours, guards; then the
threshold, or with --promise the verifier and what it learns. Run `python -m cache.evaluate`, or `tierline cache
evaluate`. Two kinds of file, tab-separated with a header:

    --pairs   text_a, text_b, same      would the answer to text_b be given to text_a; and should it (same = 1 or 0)
    --stream  text, answer_id           questions in order, each answered from the cache or stored on a miss
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import msgspec

from cache.embedding.embedder import BACKENDS, Embedder, EmbedderError
from cache.evaluation.files import InvalidFile, Pair, read_pairs, read_stream
from cache.evaluation.pairs import evaluate_pairs
from cache.evaluation.result import Decision, Evaluation, Summary
from cache.evaluation.stream import evaluate_stream
from cache.promise.rule import Rule
from cache.verifier.corpus import Asked

__all__ = [
    "Asked",
    "Decision",
    "Evaluation",
    "InvalidFile",
    "Pair",
    "Summary",
    "evaluate_pairs",
    "evaluate_stream",
    "read_pairs",
    "read_stream",
]


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 evaluated, 1 the embedder cannot be loaded, 2 wrong arguments or an unusable file."""
    parser = argparse.ArgumentParser(
        prog="tierline cache evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pairs", type=Path, metavar="FILE.tsv", help="columns text_a, text_b, same")
    source.add_argument("--stream", type=Path, metavar="FILE.tsv", help="columns text, answer_id")
    parser.add_argument("--threshold", type=_threshold, default=0.95, help="cosine similarity, default 0.95")
    parser.add_argument(
        "--promise", type=_share, metavar="RATE", help="decide by a promise of at most this share of wrong hits instead"
    )
    parser.add_argument("--audit-rate", type=_share, default=0.05, metavar="RATE", help="under a promise; default 0.05")
    parser.add_argument(
        "--mode",
        choices=("serve", "certify", "shadow"),
        default="serve",
        help="under a promise: serve by estimate (default), only once it is proven, or never",
    )
    parser.add_argument("--min-audited", type=_count, default=300, metavar="N", help="proven by at least N audits")
    parser.add_argument("--embedder", default="all-MiniLM-L6-v2", help="sentence-transformers model: name or folder")
    parser.add_argument("--embedder-backend", choices=BACKENDS, default="auto", help="what computes the vectors")
    parser.add_argument("--embedders-dir", type=Path, help="of ONNX files; default: the user's cache folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="summary and every decision as JSON")
    options = parser.parse_args(arguments)
    try:
        pairs = read_pairs(options.pairs) if options.pairs else []
        stream = read_stream(options.stream) if options.stream else []
        embedder = Embedder(
            options.embedder,
            backend=options.embedder_backend,
            threads=options.threads,
            store=options.embedders_dir,
        )
    except InvalidFile as error:
        print(f"tierline: {error}", file=sys.stderr)
        return 2
    except EmbedderError as error:
        print(f"tierline: {error}", file=sys.stderr)
        return 1
    if options.pairs:
        evaluation = evaluate_pairs(pairs, embedder, threshold=options.threshold, max_false_hit_rate=options.promise)
    else:
        evaluation = evaluate_stream(stream, embedder, threshold=options.threshold, rule=_rule(options))
    built = msgspec.to_builtins(evaluation)
    # The summary's fields stand at the top too, where scripts look for `hit_rate` and `false_hit_rate`.
    print(
        json.dumps({**built["summary"], **built}, ensure_ascii=False, indent=1) if options.json else _table(evaluation)
    )
    return 0


def _table(evaluation: Evaluation) -> str:
    summary = evaluation.summary
    fields = [name for name in summary.__struct_fields__ if name not in ("misses", "standing")]
    lines = [f"{name:<26}{_show(getattr(summary, name))}" for name in fields]
    if summary.standing is not None:
        fields = [name for name in summary.standing.__struct_fields__ if name not in ("policy", "since", "certificate")]
        lines += [f"promise: {name:<20}{_show(getattr(summary.standing, name))}" for name in fields]
    lines += [f"miss: {reason:<20}{count}" for reason, count in Counter(summary.misses).most_common()]
    wrong = [decision for decision in evaluation.decisions if decision.correct is False]
    lines += [
        f"wrong: {decision.score:.3f}  {decision.text!r} got the answer to {decision.matched!r}"
        for decision in wrong[:20]
    ]
    if len(wrong) > 20:
        lines.append(f"... and {len(wrong) - 20} more wrong hits; --json shows all")
    return "\n".join(lines)


def _show(value: object) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def _rule(options: argparse.Namespace) -> Rule | None:
    if options.promise is None:
        return None
    return Rule(
        policy="evaluated",
        max_false_hit_rate=options.promise,
        audit_rate=options.audit_rate,
        min_audited=options.min_audited,
        mode=options.mode,
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError("must lie between 0 and 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _threshold(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
