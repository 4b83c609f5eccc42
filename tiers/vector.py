"""The vector of what is asked, which the answer cache searches by: of which text the classifier may look at it, too.

The cache embeds the last message of the user, as it is and as a whole, or refuses it. Here that very text is meant,
unless it begs: a vector cannot be cleaned of pleas and heaps of keywords afterwards, so the text is, and has one of its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiers.features import Message, bare, text_of, view

MODEL: Final = "all-MiniLM-L6-v2"  # whose vectors the weights were trained for
SIZE: Final = 384
# Length of the vector beside inputs of 0 to 1, as for the word vectors: a longer one lets the training learn its
# prompts by heart, a shorter one is not heard.
_LENGTH: Final = 3.0

Vector = NDArray[np.float32]


def asked(messages: Sequence[Message]) -> str | None:
    """The text whose vector may be looked at: that of the last message of the user, without what begs; None: none may.

    A text that is longer than what the classifier reads of it is judged by its words alone.
    """
    turns = [message for message in messages if message.get("role") == "user"]
    text = text_of(turns[-1]) if turns else ""
    seen = view(text)
    left = bare(seen)
    if left == seen.strip():
        return text if left and seen is text else None
    return left or None


def inputs_of(vector: Vector) -> Vector:
    """What the classifier takes of a unit vector [SIZE].

    Raises:
        ValueError: it has another size.
    """
    if vector.shape != (SIZE,):
        raise ValueError(f"a vector of {MODEL} has {SIZE} numbers, not the shape {vector.shape}")
    return vector * np.float32(_LENGTH)
