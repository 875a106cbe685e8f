"""Makes Triton's interpreter several times faster.

It takes nearly all of its time for types, shapes and patches of the language, and little for numbers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest


def interpret_faster(patch: pytest.MonkeyPatch) -> None:
    """Changes functions of the interpreter. Kernels get the same numbers as before."""
    _patch_the_language_once(patch)
    _keep_types(patch)


def _patch_the_language_once(patch: pytest.MonkeyPatch) -> None:
    """A kernel patches the language once for each module that it calls functions of.

    By default each call of a Triton function by another one patches it again, though nothing has restored it.
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

    patch.setattr(interpreter, "_patch_lang", patched_once)
    patch.setattr(scope_type, "restore", restored)


def _keep_types(patch: pytest.MonkeyPatch) -> None:
    """Types of blocks, shapes of tensors and NumPy's types are made once, not with each operation.

    Operands of one type and shape need no conversion. Integer operations are not repeated in 64 bits: the
    interpreter would look for overflows in that result only in debug mode, which tests do not use.
    """
    from triton.language import core
    from triton.runtime import interpreter

    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    patch.setattr(interpreter.interpreter_builder, "options", options)

    dtype_of: Callable[[Any], np.dtype] = interpreter._get_np_dtype
    numpy_types: dict[str, np.dtype] = {}

    def known_dtype(dtype: Any) -> np.dtype:
        if dtype.name not in numpy_types:
            numpy_types[dtype.name] = dtype_of(dtype)
        return numpy_types[dtype.name]

    patch.setattr(interpreter, "_get_np_dtype", known_dtype)

    constexpr, block_type = core.constexpr, core.block_type
    make_block_type: Callable[..., None] = block_type.__init__
    block_types: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[size.value if type(size) is constexpr else size for size in shape])
        if key not in block_types:
            make_block_type(self, element_ty, shape)
            block_types[key] = dict(self.__dict__)
        self.__dict__.update(block_types[key])

    patch.setattr(block_type, "__init__", init_block_type)

    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if isinstance(type, block_type) else ()
        if sizes not in shapes:
            shapes[sizes] = constexpr(int(np.prod(sizes))), core.tuple([constexpr(size) for size in sizes])
        self.numel, self.shape = shapes[sizes]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    patch.setattr(core.tensor, "__init__", init_tensor)

    semantic: Any = type(interpreter.interpreter_semantic)
    convert: Callable[..., tuple[Any, Any]] = semantic.binary_op_type_checking_impl

    def convert_unless_alike(self: Any, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> tuple[Any, Any]:
        alike = type(lhs) is type(rhs) is core.tensor and lhs.shape is rhs.shape and lhs.dtype is rhs.dtype
        # The first two rules allow pointers. The others are of divisions, which may need another type.
        if alike and len(rules) <= 2 and not named and not lhs.dtype.is_ptr():
            return lhs, rhs
        return convert(self, lhs, rhs, *rules, **named)

    patch.setattr(semantic, "binary_op_type_checking_impl", convert_unless_alike)

    broadcast: Callable[..., tuple[Any, Any]] = semantic.broadcast_impl_value

    def broadcast_blocks(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if not (type(lhs.type) is type(rhs.type) is block_type and len(lhs.shape) == len(rhs.shape)):
            return broadcast(self, lhs, rhs)
        pairs = list(zip(lhs.type.shape.values, rhs.type.shape.values, strict=True))
        if any(a != b and 1 not in (a, b) for a, b in pairs):
            return broadcast(self, lhs, rhs)  # it raises the error
        shape = [max(pair) for pair in pairs]

        def widened(block: Any) -> Any:
            if block.type.shape.values == shape:
                return block
            handle = self.builder.create_broadcast(block.handle, shape)
            return self.tensor(handle, block_type(block.dtype, shape))

        return widened(lhs), widened(rhs)

    patch.setattr(semantic, "broadcast_impl_value", broadcast_blocks)
