"""Weights in their files' encodings, and what kernels want made of them.

Start reading at `matrix.py` (what all encodings have in common), then `blocks.py` (GGUF's) and `tiles.py` (for CPUs).
"""
