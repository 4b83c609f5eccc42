"""Triton kernels of the CUDA path: one file per kernel, each with its float32 reference beside it.

Importing this package needs neither Triton nor a GPU; importing a kernel module needs Triton. Start reading at
`attn_tile.py` (the attention both kernels share), then `attn_decode.py`; `heuristics.py` holds every tuned number,
`specialisations.py` what the serving path compiles, `compile.py` compiles that ahead of time and counts resources.
"""
