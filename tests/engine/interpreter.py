"""Triton's interpreter, without a search of its whole language at each call within a kernel.

For a kernel that is interpreted, `triton.language` is patched. A helper that the kernel calls, be it `tl.sum`, has all
names of the language looked through once more, finds them patched already, and changes nothing. That was a third to a
half of the time that a kernel took. Here the language is searched once a launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Have the language searched when a launch begins, and for what it does not cover; a second call does nothing."""
    patch: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if patch is None or not hasattr(interpreter, "_LangPatchScope") or hasattr(patch, "patched"):
        return  # done, or a release that goes about it in another way
    patched: set[str] = set()  # modules of the language

    def once(fn: Any) -> Any:
        visible = {lang.__name__ for lang in (tl, tl.core) if any(one is lang for one in fn.__globals__.values())}
        if visible and visible <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.update(visible)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    once.patched = patched  # type: ignore[attr-defined]
    interpreter._patch_lang = once
