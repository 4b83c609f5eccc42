"""From settings to a speculator: the draft model is checked, loaded and given pages under the big one's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.spec.draft_model import DraftModel
from engine.spec.ngram import NgramProposer
from engine.spec.speculator import Speculator

if TYPE_CHECKING:
    from engine.loader import OpenModel
    from engine.runner import ModelRunner


def open_draft(config: EngineConfig, model: OpenModel) -> OpenModel | None:
    """The draft model that the settings name, its weights not read yet; None where they name none.

    Raises:
        ModelFileError: it cannot be read.
        ValueError: its tokens are not those of `model`.
    """
    from engine.loader import open_model

    if config.draft_model_path is None:
        return None
    draft = open_model(config.draft_model_path)
    ours, theirs = model.info.tokenizer.tokens, draft.info.tokenizer.tokens
    # Models of a family pad the same vocabulary to different sizes; the shorter one must be the draft model's.
    common = min(len(ours), len(theirs))
    if ours[:common] != theirs[:common] or draft.spec.vocab_size > model.spec.vocab_size:
        raise ValueError(
            f"the draft model {draft.path} has {draft.spec.vocab_size} tokens that are not those of {model.path} "
            f"({model.spec.vocab_size}): a draft model needs the same vocabulary"
        )
    return draft


def load_speculator(
    config: EngineConfig, runner: ModelRunner, draft: OpenModel | None, *, threads: int | None
) -> Speculator:
    """What drafts for `runner`. Raises ValueError and EngineMemoryError as `load_runner` does for the draft model."""
    if config.speculative == "off":
        return Speculator()
    if draft is None:
        return Speculator(NgramProposer(), config.num_speculative_tokens)
    from engine.memory import kv_bytes_per_token
    from engine.runner import load_runner

    geometry = runner.geometry
    per_token = kv_bytes_per_token(draft.spec, runner.kv_element_bytes)
    small = load_runner(
        draft,
        precision=config.precision,
        threads=threads,
        max_model_len=min(runner.max_model_len, draft.spec.max_position),
        kv_cache_bytes=geometry.num_blocks * geometry.block_size * per_token,
        device=config.device,
        block_size=geometry.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )
    small.sampler = runner.sampler  # the same numbers for requests without a seed
    proposer = DraftModel(small, max_num_batched_tokens=config.max_num_batched_tokens)
    return Speculator(proposer, config.num_speculative_tokens)
