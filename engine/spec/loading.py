"""From settings to a speculator: what drafts is checked, loaded and given pages under the big model's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.spec.draft_model import DraftModel
from engine.spec.ngram import NgramProposer
from engine.spec.speculator import Speculator

if TYPE_CHECKING:
    from engine.loader import OpenModel
    from engine.loader.eagle3 import HeadFiles
    from engine.memory import DraftDemand
    from engine.runner import ModelRunner
    from engine.spec.eagle import EagleProposer


def open_draft(config: EngineConfig, model: OpenModel) -> OpenModel | HeadFiles | None:
    """The draft model or the head that the settings name, its weights not read yet; None where they name none.

    Raises:
        ModelFileError: it cannot be read, or it is a head for another model.
        ValueError: its tokens are not those of `model`.
    """
    from engine.loader import open_model
    from engine.loader.eagle3 import HeadFiles

    if config.draft_model_path is None:
        return None
    if config.speculative == "eagle3":
        return HeadFiles(config.draft_model_path, model.spec)
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


def demand_of(draft: OpenModel | HeadFiles) -> DraftDemand:
    """What it will take."""
    from engine.loader.eagle3 import HeadFiles
    from engine.memory import DraftDemand, kv_bytes_per_token

    if isinstance(draft, HeadFiles):
        # Beside keys and values, a fused state per page: counted per token, so it is more than enough.
        return DraftDemand(
            draft.spec.num_parameters, kv_bytes_per_token(draft.spec.layer, 1) + draft.spec.layer.hidden_size // 8
        )
    return DraftDemand(draft.spec.num_parameters, kv_bytes_per_token(draft.spec, 1))


def load_speculator(
    config: EngineConfig, runner: ModelRunner, draft: OpenModel | HeadFiles | None, *, threads: int | None
) -> Speculator:
    """What drafts for `runner`. Raises ValueError and EngineMemoryError as `load_runner` does for the draft model."""
    if config.speculative == "off":
        return Speculator()
    if draft is None:
        return Speculator(NgramProposer(), config.num_speculative_tokens)
    from engine.loader.eagle3 import HeadFiles

    if isinstance(draft, HeadFiles):
        return Speculator(load_head(draft, runner), config.num_speculative_tokens)
    from engine.load_runner import load_runner
    from engine.memory import kv_bytes_per_token

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


def load_head(files: HeadFiles, runner: ModelRunner) -> EagleProposer:
    """A head that sees the steps of `runner`, with pages under its numbers. Raises ModelFileError."""
    from engine.layers.linear import LinearPolicy
    from engine.spec.eagle import EagleProposer
    from engine.spec.eagle_head import EagleHead

    config, geometry, decoder = runner.attention.config, runner.geometry, runner.decoder
    head = EagleHead(
        files,
        LinearPolicy(config.device, config.dtype, packed_rows=0),
        decoder.ops,
        decoder.embedding,
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        max_position=runner.max_model_len,
    )
    proposer = EagleProposer(head, runner.sampler, max_model_len=runner.max_model_len)
    runner.show_states(proposer)
    return proposer
