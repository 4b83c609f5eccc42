"""What a request needs: features of its text, task and complexity, and the smallest tier that fits.

It promises a fast, deterministic and explainable answer; its figures come from `tiers/train`.
Start reading at `features.py`, then `task.py`, then `choose.py`.
"""

from typing import Final

# Classes of model size, smallest first: 1B-3B, 7B-8B, 13B-20B, 70B and beyond.
TIERS: Final = ("small", "medium", "large", "xlarge")
