"""The CEL library without the command-line program that its package imports.

That program's own dependencies (a terminal editor among them) would be a tenth of a gateway's memory.
"""

from __future__ import annotations

import sys
from types import ModuleType

_PROGRAM = "cel.cli"

if _PROGRAM not in sys.modules:
    sys.modules[_PROGRAM] = ModuleType(_PROGRAM)
    try:
        from cel import Context, Program, compile, evaluate
    finally:
        del sys.modules[_PROGRAM]
else:
    from cel import Context, Program, compile, evaluate

__all__ = ["Context", "Program", "compile", "evaluate"]
