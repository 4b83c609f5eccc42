"""The bounds of the scheduler, and how it refuses what is beyond them."""

from __future__ import annotations

from dataclasses import dataclass

# A row of the vocabulary is drawn from, or ranked, beside at most so many others: the copies that this takes, float64
# ones among them, are several times as large as the logits.
DRAWN_AT_ONCE = 16
# Drafts of one request in one step, where nobody says otherwise. They are checked in a row of one token more, and the
# compiled attention takes rows of up to so many tokens where their pages lie.
NUM_DRAFTS = 4


class NeverFits(ValueError):
    """A request that this engine can never serve, however long it waits."""


class QueueFull(RuntimeError):
    """The waiting queue is at its bound; the same request may succeed later."""


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """How long texts that are to be pooled wait for company before a step: for so many, or for so long.

    Raises:
        ValueError: bounds that make no sense.
    """

    max_batch_size: int = 8
    max_wait_ms: float = 2.0

    def __post_init__(self) -> None:
        if self.max_batch_size < 1 or not 0 <= self.max_wait_ms <= 10_000:
            raise ValueError(f"max_batch_size must be at least 1 and max_wait_ms 0 to 10,000, got {self}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one step and of the queue.

    Raises:
        ValueError: bounds that contradict each other.
    """

    max_num_seqs: int = 64  # rows in one step
    max_num_batched_tokens: int = 512  # tokens in one step
    max_waiting: int = 256  # requests that wait for a row
    max_model_len: int = 2048
    target_tpot_seconds: float | None = None  # time per output token that is to be held; None: no matter

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_waiting < 0:
            raise ValueError(f"max_waiting must not be negative, got {self.max_waiting}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token per step"
            )


def check_length(
    num_prompt_tokens: int, config: SchedulerConfig, num_pages: int, page_size: int, *, generated: int = 1
) -> None:
    """Refuse a prompt that leaves no room for `generated` tokens, in the model's context or in the KV cache.

    Raises:
        NeverFits: it is empty or too long.
    """
    if num_prompt_tokens == 0:
        raise NeverFits("The prompt has no tokens.")
    more = f" and at least {generated} must be generated" if generated else ""
    wants = f"The prompt has {num_prompt_tokens} tokens{more}, but"
    if num_prompt_tokens + generated > config.max_model_len:
        raise NeverFits(f"{wants} the context holds {config.max_model_len} tokens.")
    if num_prompt_tokens + generated > num_pages * page_size:
        pages = f"{num_pages} pages of {page_size}"
        raise NeverFits(f"{wants} the KV cache holds {num_pages * page_size} tokens ({pages}).")
