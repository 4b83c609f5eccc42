"""The names of the forms in which models write tool calls and thoughts; `reply_form.py` knows what they mean.

Apart from it, because the command line is read before anything else is loaded.
"""

from __future__ import annotations

HARMONY = "harmony"
TOOL_PARSERS = ("auto", "qwen3_coder", "pythonic", "mistral", "llama3", "phi4", "gemma", "hermes", HARMONY)
REASONING_PARSERS = ("auto", "none", "think", HARMONY)
