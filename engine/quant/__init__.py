"""Quantised weights: the file's block encodings and what kernels want made of them.

Start reading at `blocks.py` (a tensor in GGUF's encoding, by rows), then `int4.py` (the canonical four-bit form).
"""
