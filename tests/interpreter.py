"""Makes Triton's interpreter faster.

Each call of a Triton function by another one patches the language again, though nothing has restored it. This
takes 40% of the time of our kernels.
"""

from collections.abc import Callable
from typing import Any

import pytest


def patch_once(patch: pytest.MonkeyPatch) -> None:
    """From now on, a kernel patches the language once for each module that it calls functions of."""
    from triton.runtime import interpreter

    scope_type: Any = interpreter._LangPatchScope
    patch_language: Callable[[Any], Any] = interpreter._patch_lang
    restore: Callable[[Any], None] = scope_type.restore
    patched: set[int] = set()

    def patched_once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return scope_type()
        patched.add(id(function.__globals__))
        return patch_language(function)

    def restored(scope: Any) -> None:
        patched.clear()
        restore(scope)

    patch.setattr(interpreter, "_patch_lang", patched_once)
    patch.setattr(scope_type, "restore", restored)
