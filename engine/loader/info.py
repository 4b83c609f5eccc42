"""What a model says about itself: enough for the HTTP side (names, tokenizer, template), no weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.models.pooling import PoolingSpec
from engine.models.spec import ModelSpec

# What `TokenizerData.types` says of a token, in GGUF's numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, slots=True)
class TokenizerData:
    """A model's vocabulary and how texts become tokens of it.

    `model`: "gpt2" is byte-level BPE, of `merges` and the words that `pre` names; "llama" is SentencePiece's BPE, of
    `scores`; "tokenizer.json" has everything in `definition`, the text of such a file. `types`: one of the numbers
    above for each token. `end_ids`: tokens that end an answer, beside `eos_id` and `eot_id`.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    add_bos: bool
    add_eos: bool = False
    scores: list[float] = field(default_factory=list)
    space_prefix: bool = False  # "llama": a space is put before a text, and not shown again
    strip_after_control: bool = False  # "llama": white space behind a control token belongs to it
    end_ids: frozenset[int] = frozenset()
    definition: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling that the model's authors recommend; None where they say nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model without its weights.

    `path`: a GGUF file, or a folder as Hugging Face lays it out. `quantization`: the encoding of most weights, "Q4_1"
    say. `file_bytes`: of all its files of weights. `licence`: as the model says it, None where it does not.
    `tool_template`: the chat template for conversations with tools, where it is another one. `pooling`: how it makes
    vectors or scores of texts; None where it is made to generate.
    """

    path: Path
    name: str
    spec: ModelSpec
    quantization: str
    file_bytes: int
    tokenizer: TokenizerData
    chat_template: str | None
    tool_template: str | None = None
    generation: GenerationDefaults = GenerationDefaults()
    licence: str | None = None
    pooling: PoolingSpec | None = None

    @property
    def format(self) -> str:
        """ "huggingface" or "gguf"."""
        return "huggingface" if self.path.is_dir() else "gguf"
