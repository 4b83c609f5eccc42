"""Which settings go with a model in several processes. No torch."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.models.spec import ModelSpec
from engine.parallel.errors import LayoutError
from engine.parallel.layout import Layout, check_layout
from engine.transfer.address import redis_url


def check_settings(config: EngineConfig, spec: ModelSpec, *, adapters: bool) -> None:
    """`adapters`: whether there are any at the start, besides those that `config` allows later.

    Raises LayoutError where the model cannot be divided as asked, or something else does not go with that.
    """
    layout = Layout(config.tensor_parallel, config.pipeline_parallel)
    if layout.num_ranks == 1:
        return
    check_layout(spec, layout)
    asked = {
        "adapters (--lora, --lora-dir)": adapters or bool(config.max_loras),
        "pages beyond the KV cache (--kv-host-bytes, --kv-redis-url)": (config.kv_host_bytes or redis_url())
        is not None,
        "pages of other engines (--role, --kv-listen, --kv-peer)": config.role != "both"
        or config.kv_listen is not None
        or bool(config.kv_peers),
        "heads that read the model's states (--speculative eagle3)": config.speculative == "eagle3",
    }
    if refused := [what for what, is_asked in asked.items() if is_asked]:
        raise LayoutError(
            f"{'; '.join(refused)}: not with --tensor-parallel or --pipeline-parallel. "
            "Leave one or the other out, or use an engine that has both (docs/platform-engineer.md)"
        )
