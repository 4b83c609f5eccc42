"""The kinds of server that can stand behind a backend, by the name that `tierline.yaml` has for them."""

from __future__ import annotations

from collections.abc import Mapping

from backends.anthropic import ANTHROPIC
from backends.dialect import Dialect
from backends.openai import OPENAI

DIALECTS: Mapping[str, Dialect] = {OPENAI.name: OPENAI, ANTHROPIC.name: ANTHROPIC}
