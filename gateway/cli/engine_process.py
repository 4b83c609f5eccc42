"""Commands whose work is the engine's: it runs as a process of its own and answers with JSON on standard output."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gateway.cli.common import Exit, fail


def ask_engine(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """What `python -m MODULE ARGUMENTS` prints. Its standard error is shown as it comes: progress, or why it failed.

    Ends the command where that one fails, with its exit code 2 as 2, and where the engine is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        fail("this needs the engine: pip install 'tierline[engine]'.")
    done = subprocess.run([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(Exit.USAGE if done.returncode == Exit.USAGE else Exit.FAILED)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
