"""Where the modules of an adapter belong: the names that training gives them, the products that the decoder makes.

The decoder computes Q, K and V in one product, gate and up in another. A module's output is a run of rows of one of
them. Rows have the order of a Hugging Face folder in the decoder, whatever kind of file its weights came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.loader.families import FAMILIES
from engine.loader.hf_families import HF_FAMILIES
from engine.models.spec import LayerSpec, ModelSpec


class Product(StrEnum):
    """A product of a block; the values are the names of the fields that hold it."""

    QKV = "qkv"
    ATTENTION_OUTPUT = "attention_output"
    GATE_UP = "gate_up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Target:
    """One module: `[rows, columns]`, the rows from `start` on of `product`."""

    product: Product
    start: int
    rows: int
    columns: int


def targets_of(spec: ModelSpec, layer: LayerSpec) -> dict[str, Target]:
    """The modules of a block that an adapter can change, by their names below `layers.N.`. Experts are none."""
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    fused = _is_fused(spec.architecture)
    if fused:
        modules = {"self_attn.qkv_proj": Target(Product.QKV, 0, q + 2 * kv, hidden)}
    else:
        modules = {
            "self_attn.q_proj": Target(Product.QKV, 0, q, hidden),
            "self_attn.k_proj": Target(Product.QKV, q, kv, hidden),
            "self_attn.v_proj": Target(Product.QKV, q + kv, kv, hidden),
        }
    modules["self_attn.o_proj"] = Target(Product.ATTENTION_OUTPUT, 0, hidden, q)
    if layer.experts:
        return modules
    if fused:
        modules["mlp.gate_up_proj"] = Target(Product.GATE_UP, 0, 2 * inner, hidden)
    else:
        modules["mlp.gate_proj"] = Target(Product.GATE_UP, 0, inner, hidden)
        modules["mlp.up_proj"] = Target(Product.GATE_UP, inner, inner, hidden)
    modules["mlp.down_proj"] = Target(Product.DOWN, 0, hidden, inner)
    return modules


def adapter_values(spec: ModelSpec, rank: int) -> int:
    """How many numbers an adapter of this rank holds that changes every module."""
    modules = (target for layer in spec.layers for target in targets_of(spec, layer).values())
    return rank * sum(target.rows + target.columns for target in modules)


def _is_fused(architecture: str) -> bool:
    """Whether training sees Q, K and V as one module. `architecture`: a GGUF file's name or a folder's."""
    family = HF_FAMILIES.get(architecture) or FAMILIES.get(architecture)
    return family is not None and family.fused
