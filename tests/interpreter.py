"""Makes Triton's interpreter faster, by a half where kernels call many small functions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def interpret_faster(patch: pytest.MonkeyPatch) -> None:
    """Changes two functions of the interpreter.

    Each call of a Triton function by another one patches the language again, though nothing has restored it.
    Now a kernel patches it once for each module that it calls functions of. And each operation makes a table
    of all types of numbers, to look up one. Now the answers are kept.
    """
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

    dtype_of: Callable[[Any], np.dtype] = interpreter._get_np_dtype
    known: dict[str, np.dtype] = {}

    def known_dtype(dtype: Any) -> np.dtype:
        if dtype.name not in known:
            known[dtype.name] = dtype_of(dtype)
        return known[dtype.name]

    patch.setattr(interpreter, "_patch_lang", patched_once)
    patch.setattr(scope_type, "restore", restored)
    patch.setattr(interpreter, "_get_np_dtype", known_dtype)
