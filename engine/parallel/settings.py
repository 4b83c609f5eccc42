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
    pages_elsewhere = (config.kv_host_bytes, config.kv_listen, config.kv_peers or None, redis_url())
    asked = {
        "adapters (lora, lora_dir)": adapters or config.max_loras > 0,
        "pages beyond the KV cache (kv_host_bytes, kv_redis_url, role, kv_listen, kv_peers)": config.role != "both"
        or any(place is not None for place in pages_elsewhere),
        "a head that reads the model's states (speculative eagle3)": config.speculative == "eagle3",
    }
    if refused := [what for what, is_asked in asked.items() if is_asked]:
        raise LayoutError(
            f"not with tensor_parallel or pipeline_parallel: {'; '.join(refused)}. Leave out one or the other"
        )
