"""Kernels: Triton for CUDA, one file per kernel with its float32 reference beside it; C for the CPU (`cpu_*.c`).

Importing this package needs neither Triton nor a GPU; importing a Triton kernel's module needs Triton. Start reading at
`attn_tile.py` (the attention both kernels share), then `attn_decode.py`; `moe_routing.py` for mixtures of experts,
`sample.py` for draws; `heuristics.py` holds every tuned number,
`specialisations.py` what the serving path compiles, `compile.py` compiles that ahead of time and counts resources.
The C files are built and loaded by `engine/layers/native.py`.
"""
