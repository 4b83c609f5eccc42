"""Bounds on what oneDNN and PyTorch keep of the kernels that they make for each shape. To be called before torch is
imported.

A step has any number of tokens, and a product of every new number is a new kernel. Both libraries keep the last 1,024
of them, each with code and buffers of its own: hundreds of megabytes after some hundred prompts, whatever the model.
A step needs a few dozen. Making one anew costs little: 600 prompts of random lengths took the same processor time with
64 kernels kept as with 1,024.
"""

from __future__ import annotations

import os

_KERNELS = 128


def bound() -> None:
    """Set the libraries' environment, unless whoever starts the engine did."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(_KERNELS))
