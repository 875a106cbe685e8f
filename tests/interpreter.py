"""Makes Triton's interpreter several times faster, and watches which memory kernels use.

The interpreter takes nearly all of its time for types, shapes and patches of the language, and little for
numbers.
"""

from collections.abc import Callable
from math import copysign
from typing import Any

import numpy as np
import pytest


def interpret_faster(patch: pytest.MonkeyPatch) -> None:
    """Changes functions of the interpreter. Kernels get the same numbers as before."""
    _patch_the_language_once(patch)
    _call_builtins_directly(patch)
    _keep_types(patch)


def _patch_the_language_once(patch: pytest.MonkeyPatch) -> None:
    """The language is patched once for each module with kernels, and stays so until `patch` is undone.

    By default each launch patches it and restores it, and each call of a Triton function patches it again.
    """
    from triton.runtime import interpreter

    scope_type: Any = interpreter._LangPatchScope
    patch_language: Callable[[Any], Any] = interpreter._patch_lang
    patched: set[int] = set()

    def patched_once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return scope_type()
        patched.add(id(function.__globals__))
        return patch_language(function)

    def set_attribute(scope: Any, owner: Any, name: str, value: Any) -> None:
        patch.setattr(owner, name, value, raising=False)

    patch.setattr(interpreter, "_patch_lang", patched_once)
    patch.setattr(scope_type, "set_attr", set_attribute)


def _call_builtins_directly(patch: pytest.MonkeyPatch) -> None:
    """Functions of the language are called without the two functions around them that only pass arguments.

    Their operands are mostly blocks, in which they need not look for constants.
    """
    from triton.language import core
    from triton.runtime import interpreter

    around = core.builtin(_nothing).__code__
    unwrap: Callable[[Any], Any] = core._unwrap_if_constexpr
    block, constant = core.tensor, core.constexpr

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is around else member

        def direct(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **named)

        quick = owner is block and name in _OPERATORS
        scope.set_attr(owner, name, _operator(name, direct) if quick else direct)

    def unwrap_unless_block(value: Any) -> Any:
        if type(value) is block:
            return value
        return value.value if type(value) is constant else unwrap(value)

    patch.setattr(interpreter, "_patch_attr", patch_attribute)
    patch.setattr(core, "_unwrap_if_constexpr", unwrap_unless_block)


def _nothing() -> None:
    pass


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "__add__": np.add, "__radd__": np.add, "__mul__": np.multiply, "__rmul__": np.multiply,
    "__sub__": np.subtract, "__rsub__": lambda lhs, rhs: rhs - lhs,
}  # fmt: skip
_COMPARISONS = {
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal,
    "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip
_OF_MASKS = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
_OPERATORS = _ARITHMETIC | _COMPARISONS | _OF_MASKS
_INTEGERS = ("int32", "int64")


def _operator(name: str, otherwise: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """An operator of two blocks, or of a block and a number, for types that NumPy treats as Triton does.

    Others, such as halves, go the interpreter's way.
    """
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    operate, of_masks = _OPERATORS[name], name in _OF_MASKS
    kinds = ("int1",) if of_masks else ("fp32", *_INTEGERS)
    block, constant = core.tensor, core.constexpr

    def quick(lhs: Any, rhs: Any) -> Any:
        if type(rhs) is constant:
            rhs = rhs.value
        kind, is_block, handle = lhs.dtype.name, lhs.type.is_block(), None
        if type(rhs) is block:
            is_block = is_block or rhs.type.is_block()
            if rhs.dtype.name == kind and kind in kinds:
                handle = interpreter_builder.binary_op(lhs.handle, rhs.handle, operate)
            elif name == "__add__" and rhs.dtype.name in _INTEGERS and lhs.dtype.is_ptr():
                handle = interpreter_builder.create_addptr(lhs.handle, rhs.handle)
        elif kind in kinds and not of_masks:
            is_exact = type(rhs) is int and -(2**31) <= rhs < 2**31
            if is_exact or (type(rhs) is float and kind == "fp32"):
                handle = TensorHandle(operate(lhs.handle.data, rhs), lhs.handle.dtype)
        if handle is None:
            return otherwise(lhs, rhs)
        dtype = core.int1 if name in _COMPARISONS else lhs.dtype
        return block(handle, core.block_type(dtype, list(handle.data.shape)) if is_block else dtype)

    return quick


def _keep_types(patch: pytest.MonkeyPatch) -> None:
    """Types of blocks, shapes of tensors and NumPy's types are made once, not with each operation.

    Operands of one type need no conversion, and a number is converted once for each type and shape. Integer
    operations are not repeated in 64 bits: the interpreter would look for overflows in that result only in
    debug mode, which tests do not use.
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

    numbers: dict[tuple[Any, ...], Any] = {}

    def convert_unless_alike(self: Any, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> tuple[Any, Any]:
        # The third rule and later ones are of divisions, which may need another type.
        if type(lhs) is not core.tensor or len(rules) > 2 or named:
            return convert(self, lhs, rhs, *rules, **named)
        if type(rhs) is core.tensor:
            if lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
                return (lhs, rhs) if lhs.shape is rhs.shape else self.broadcast_impl_value(lhs, rhs)
            return convert(self, lhs, rhs, *rules)
        # A number becomes a block, which is kept if the other operand needs no conversion.
        key = (rhs, type(rhs), copysign(1, rhs), lhs.dtype.name, id(lhs.shape), rules)
        if key not in numbers:
            converted, block = convert(self, lhs, rhs, *rules)
            if converted is not lhs:
                return converted, block
            numbers[key] = block
        return lhs, numbers[key]

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


def watch_memory(patch: pytest.MonkeyPatch) -> None:
    """Kernels may read and write the elements of their arguments only. Elsewhere a GPU may fault, or another
    tensor may change. The interpreter would do either without a word."""
    from triton.runtime import interpreter
    from triton.tools.tensor_descriptor import TensorDescriptor

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    arguments = executor._init_args_hst
    dtype_of: Callable[[Any], np.dtype] = interpreter._get_np_dtype
    begins, ends = np.zeros(0, np.int64), np.zeros(0, np.int64)
    kernel = ""

    def extents(value: Any) -> list[tuple[int, int]]:
        if isinstance(value, TensorDescriptor):
            return extents(value.base)
        if isinstance(value, tuple):
            return [extent for part in value for extent in extents(part)]
        if not hasattr(value, "data_ptr") or not value.numel():
            return []
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        return [(value.data_ptr(), value.data_ptr() + (last + 1) * value.element_size())]

    def on_host(self: Any, args: Any, named: Any) -> Any:
        nonlocal begins, ends, kernel
        copies = arguments(self, args, named)
        merged: list[list[int]] = []
        for begin, end in sorted(extents((*copies[0], *copies[1].values()))):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        begins, ends = np.array(merged, np.int64).reshape(-1, 2).T
        kernel = self.fn.__name__
        return copies

    def check(pointers: Any, mask: Any, element: Any) -> None:
        at, used = np.asarray(pointers.data), np.asarray(mask.data)
        if at.size and used.all():  # most accesses, and each is to one argument
            index = begins.searchsorted(at.min().astype(np.int64), side="right") - 1
            if index >= 0 and at.max() + dtype_of(element).itemsize <= ends[index]:
                return
        at, used = np.broadcast_arrays(at, used)
        at = at[used.astype(bool)].astype(np.int64)
        index = np.searchsorted(begins, at, side="right") - 1
        inside = (index >= 0) & (at + dtype_of(element).itemsize <= ends[index])
        assert inside.all(), f"{kernel}: {(~inside).sum()} of {inside.size} elements are not in any argument"

    def watched(name: str, element: Callable[..., Any], pointers: int, mask: int) -> None:
        access = getattr(builder, name)

        def access_inside(self: Any, *args: Any, **named: Any) -> Any:
            check(args[pointers], args[mask], element(*args))
            return access(self, *args, **named)

        patch.setattr(builder, name, access_inside)

    patch.setattr(executor, "_init_args_hst", on_host)
    watched("create_masked_load", lambda at, *_: at.get_element_ty(), 0, 1)
    watched("create_masked_store", lambda at, *_: at.get_element_ty(), 0, 2)
    watched("create_atomic_rmw", lambda _, at, value, *__: value.dtype.scalar, 1, 3)
