"""How good the semantic cache is on anyone's questions: hit rate and false-hit rate, every decision shown.

The decisions are those of the running cache: eligibility, the embedder's refusals, neighbours, guards, threshold.
Run `python -m cache.evaluate`, or `tierline cache evaluate`. Two kinds of file, tab-separated with a header:

    --pairs   text_a, text_b, same      would the answer to text_b be given to text_a; and should it (same = 1 or 0)
    --stream  text, answer_id           questions in order, each answered from the cache or stored on a miss
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from cache.eligibility import Mode, check
from cache.embedding.embedder import Embedder, EmbedderError, Refused, Vectors
from cache.store.index import VectorIndex
from cache.words.asking import asked_form
from cache.words.guards import lowest_cosine, objection, verify
from cache.words.text import normal_form
from cache.words.writing import folded_form

_RowType = TypeVar("_RowType")
_BATCH = 32
_NEIGHBOURS = 8
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")


class InvalidFile(ValueError):
    """The file cannot be used; the message names the file, the line and what is wrong."""


class Decision(msgspec.Struct, frozen=True):
    """What the cache did with one question.

    Attributes:
        outcome: `exact`, `semantic` or `miss`.
        correct: whether a hit gave the right answer; None for a miss.
        score: cosine similarity of the nearest candidate, where there was one.
        reason: why not, for a miss.
        matched: the cached question whose answer was given, or the nearest one.
    """

    text: str
    outcome: str
    correct: bool | None = None
    score: float | None = None
    reason: str | None = None
    matched: str | None = None


class Summary(msgspec.Struct, frozen=True):
    """Rates are shares in [0, 1]; None where nothing was there to count.

    Attributes:
        requests: pairs, or questions of the stream.
        hit_rate: hits / requests.
        false_hit_rate: wrong hits / hits.
        false_hit_rate_upper_95: upper end of its two-sided 95 % Wilson score interval (Wilson 1927).
        wrong_per_request: wrong hits / requests.
        recall: of the pairs marked same, the share that hit. Pairs only.
        false_accept_rate: of the pairs marked different, the share that hit. Pairs only.
        misses: how many per reason.
    """

    threshold: float
    embedder: str
    requests: int
    hits: int
    exact_hits: int
    wrong_hits: int
    hit_rate: float | None
    false_hit_rate: float | None
    false_hit_rate_upper_95: float | None
    wrong_per_request: float | None
    misses: dict[str, int]
    recall: float | None = None
    false_accept_rate: float | None = None


class Evaluation(msgspec.Struct, frozen=True):
    summary: Summary
    decisions: list[Decision]


class Pair(msgspec.Struct, frozen=True):
    text_a: str
    text_b: str
    same: bool


class Asked(msgspec.Struct, frozen=True):
    """A question of a stream; equal `answer_id` means that one answer serves both."""

    text: str
    answer_id: str


class TextEmbedder(Protocol):
    """What evaluation needs of an `Embedder`."""

    name: str
    dimension: int
    scripts: frozenset[str]

    def check(self, text: str) -> None: ...

    def embed(self, texts: list[str]) -> Vectors: ...


class _Prepared(msgspec.Struct, frozen=True):
    """A text as the cache sees it: how it may be looked up, its vector [dimension] where that is `semantic`."""

    mode: Mode
    reason: str | None = None
    vector: Vectors | None = None


def evaluate_pairs(pairs: list[Pair], embedder: TextEmbedder, *, threshold: float) -> Evaluation:
    """Ask `text_a` of a cache that holds the answer to `text_b`, pair by pair."""
    prepared = _prepare(embedder, [text for pair in pairs for text in (pair.text_a, pair.text_b)])
    decisions = []
    for pair in pairs:
        asked, cached = prepared[pair.text_a], prepared[pair.text_b]
        if "off" not in (asked.mode, cached.mode) and normal_form(pair.text_a) == normal_form(pair.text_b):
            decisions.append(Decision(pair.text_a, "exact", pair.same, 1.0, matched=pair.text_b))
        elif asked.vector is None or cached.vector is None:
            decisions.append(Decision(pair.text_a, "miss", reason=asked.reason or cached.reason, matched=pair.text_b))
        elif _written_otherwise(pair.text_a, pair.text_b):
            decisions.append(Decision(pair.text_a, "semantic", pair.same, 1.0, matched=pair.text_b))
        else:
            cosine = float(asked.vector @ cached.vector)
            verdict = verify(pair.text_a, pair.text_b, cosine, threshold)
            outcome, correct = ("semantic", pair.same) if verdict.accepted else ("miss", None)
            decisions.append(Decision(pair.text_a, outcome, correct, cosine, verdict.reason, pair.text_b))
    same = [decision for pair, decision in zip(pairs, decisions, strict=True) if pair.same]
    different = [decision for pair, decision in zip(pairs, decisions, strict=True) if not pair.same]
    summary = msgspec.structs.replace(
        _summarise(decisions, embedder.name, threshold),
        recall=_share(sum(decision.outcome != "miss" for decision in same), len(same)),
        false_accept_rate=_share(sum(decision.outcome != "miss" for decision in different), len(different)),
    )
    return Evaluation(summary, decisions)


def evaluate_stream(stream: list[Asked], embedder: TextEmbedder, *, threshold: float) -> Evaluation:
    """Ask the questions in order of a cache that starts empty and keeps the answer of every miss it may keep."""
    prepared = _prepare(embedder, [asked.text for asked in stream])
    index = VectorIndex(embedder.dimension)
    exact: dict[str, int] = {}
    folded: dict[str | None, int] = {}
    decisions = []
    for i, asked in enumerate(stream):
        form = prepared[asked.text]
        earlier = exact.get(normal_form(asked.text))
        if form.mode == "off":
            decisions.append(Decision(asked.text, "miss", reason=form.reason))
        elif earlier is not None:
            correct = stream[earlier].answer_id == asked.answer_id
            decisions.append(Decision(asked.text, "exact", correct, 1.0, None, stream[earlier].text))
        else:
            written = folded.get(folded_form(asked.text)) if form.vector is not None else None
            if form.vector is None:
                decision = Decision(asked.text, "miss", reason=form.reason)
            elif written is not None and objection(asked.text, stream[written].text) is None:
                correct = stream[written].answer_id == asked.answer_id
                decision = Decision(asked.text, "semantic", correct, 1.0, None, stream[written].text)
            else:
                decision = _decide(asked, index.search(form.vector, _NEIGHBOURS), stream, threshold)
            decisions.append(decision)
            if decision.outcome == "miss":
                exact[normal_form(asked.text)] = i
                if form.vector is not None:
                    index.add(i, form.vector)
                    folded[folded_form(asked.text)] = i
    return Evaluation(_summarise(decisions, embedder.name, threshold), decisions)


def _written_otherwise(a: str, b: str) -> bool:
    """Whether the texts are the same words in another writing, and no guard objects."""
    form = folded_form(a)
    return form is not None and form == folded_form(b) and objection(a, b) is None


def _decide(asked: Asked, nearest: list[tuple[int, float]], stream: list[Asked], threshold: float) -> Decision:
    """The rule of `Service._lookup`: the nearest neighbour that no guard objects to."""
    if not nearest:
        return Decision(asked.text, "miss", reason="no_entry")
    reason: str | None = "below_threshold"
    for rank, (id, cosine) in enumerate(nearest):
        if cosine < lowest_cosine(threshold):
            break
        cached = stream[id]
        verdict = verify(asked.text, cached.text, cosine, threshold)
        if verdict.accepted:
            correct = cached.answer_id == asked.answer_id
            return Decision(asked.text, "semantic", correct, cosine, None, cached.text)
        if rank == 0:
            reason = verdict.reason
    return Decision(asked.text, "miss", None, nearest[0][1], reason, stream[nearest[0][0]].text)


def _prepare(embedder: TextEmbedder, texts: Iterable[str]) -> dict[str, _Prepared]:
    prepared: dict[str, _Prepared] = {}
    fuzzy: list[str] = []
    for text in dict.fromkeys(texts):
        request = {"messages": [{"role": "user", "content": text}]}
        eligible = check(request, mode="semantic", allow_temperature=0.0, scripts_covered=embedder.scripts)
        prepared[text] = _Prepared(eligible.mode, eligible.reason)
        if eligible.mode == "semantic":
            try:
                embedder.check(asked_form(text))
                fuzzy.append(text)
            except Refused as refusal:
                prepared[text] = _Prepared("exact", refusal.reason)
    # Texts of like length together: a batch costs as much as its longest.
    fuzzy.sort(key=len)
    for start in range(0, len(fuzzy), _BATCH):
        batch = fuzzy[start : start + _BATCH]
        for text, vector in zip(batch, embedder.embed([asked_form(text) for text in batch]), strict=True):
            prepared[text] = _Prepared("semantic", None, vector)
    return prepared


def _summarise(decisions: list[Decision], embedder: str, threshold: float) -> Summary:
    hits = [decision for decision in decisions if decision.outcome != "miss"]
    wrong = sum(not decision.correct for decision in hits)
    return Summary(
        threshold=threshold,
        embedder=embedder,
        requests=len(decisions),
        hits=len(hits),
        exact_hits=sum(decision.outcome == "exact" for decision in hits),
        wrong_hits=wrong,
        hit_rate=_share(len(hits), len(decisions)),
        false_hit_rate=_share(wrong, len(hits)),
        false_hit_rate_upper_95=_wilson_upper(wrong, len(hits)),
        wrong_per_request=_share(wrong, len(decisions)),
        misses=dict(Counter(decision.reason or "" for decision in decisions if decision.outcome == "miss")),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _wilson_upper(events: int, trials: int, z: float = 1.959964) -> float | None:
    """Upper end of the Wilson score interval for a proportion (E. B. Wilson, JASA 22, 1927)."""
    if not trials:
        return None
    share = events / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return min(1.0, (centre + spread) / (1 + z * z / trials))


def read_pairs(path: Path) -> list[Pair]:
    """Read `text_a, text_b, same`.

    Raises:
        InvalidFile: it cannot be read, a column is missing, or `same` is neither 1 nor 0.
    """

    def convert(row: dict[str, str], where: str) -> Pair:
        same = row["same"].strip().lower()
        if same not in _TRUE + _FALSE:
            raise InvalidFile(f"{where}: 'same' must be 1 or 0, got {row['same']!r}")
        return Pair(row["text_a"], row["text_b"], same in _TRUE)

    return _read(path, ("text_a", "text_b", "same"), convert)


def read_stream(path: Path) -> list[Asked]:
    """Read `text, answer_id`.

    Raises:
        InvalidFile: it cannot be read, or a column is missing.
    """
    return _read(path, ("text", "answer_id"), lambda row, _: Asked(row["text"], row["answer_id"]))


def _read(path: Path, columns: tuple[str, ...], convert: Callable[[dict[str, str], str], _RowType]) -> list[_RowType]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path} cannot be read: {error}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise InvalidFile(
            f"{path}:1: no column {', '.join(map(repr, missing))}. The first line must name the columns "
            f"{', '.join(columns)}, separated by tabs."
        )
    rows = []
    for row in reader:
        where = f"{path}:{reader.line_num}"
        if any(row[name] is None for name in columns):
            raise InvalidFile(f"{where}: the line has fewer columns than the header")
        rows.append(convert(row, where))
    if not rows:
        raise InvalidFile(f"{path} has no rows")
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 evaluated, 1 the embedder cannot be loaded, 2 wrong arguments or an unusable file."""
    parser = argparse.ArgumentParser(
        prog="tierline cache evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pairs", type=Path, metavar="FILE.tsv", help="columns text_a, text_b, same")
    source.add_argument("--stream", type=Path, metavar="FILE.tsv", help="columns text, answer_id")
    parser.add_argument("--threshold", type=_threshold, default=0.95, help="cosine similarity, default 0.95")
    parser.add_argument("--embedder", default="all-MiniLM-L6-v2", help="sentence-transformers model: name or folder")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="summary and every decision as JSON")
    options = parser.parse_args(arguments)
    try:
        pairs = read_pairs(options.pairs) if options.pairs else []
        stream = read_stream(options.stream) if options.stream else []
        embedder = Embedder(options.embedder, threads=options.threads)
    except InvalidFile as error:
        print(f"tierline: {error}", file=sys.stderr)
        return 2
    except EmbedderError as error:
        print(f"tierline: {error}", file=sys.stderr)
        return 1
    if options.pairs:
        evaluation = evaluate_pairs(pairs, embedder, threshold=options.threshold)
    else:
        evaluation = evaluate_stream(stream, embedder, threshold=options.threshold)
    built = msgspec.to_builtins(evaluation)
    # The summary's fields stand at the top too, where scripts look for `hit_rate` and `false_hit_rate`.
    print(
        json.dumps({**built["summary"], **built}, ensure_ascii=False, indent=1) if options.json else _table(evaluation)
    )
    return 0


def _table(evaluation: Evaluation) -> str:
    summary = evaluation.summary
    lines = [f"{name:<26}{_show(getattr(summary, name))}" for name in summary.__struct_fields__ if name != "misses"]
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


def _threshold(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
