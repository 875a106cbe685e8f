"""Makes Triton's interpreter several times faster, and watches which memory kernels use.

The interpreter takes nearly all of its time for types, shapes and patches of the language, and little for
numbers.
"""

from bisect import bisect_right
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
    _keep_numbers(patch)
    _convert_rarely(patch)


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
        patch.setattr(owner, name, _itself if name == "to_ir" else value, raising=False)

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
    plain = {block, core.dtype, core.block_type, core.pointer_type, slice, type(None), bool, int, float, str}

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is around else member

        def direct(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **named)

        if owner is block and name in _OPERATORS:
            scope.set_attr(owner, name, _operator(name, direct))
        elif owner is block and name == "__getitem__":
            scope.set_attr(owner, name, _with_new_axes(direct))
        elif owner is not block and name == "where":
            scope.set_attr(owner, name, _where(direct))
        else:
            scope.set_attr(owner, name, direct)

    def unwrap_unless_plain(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constant else unwrap(value)

    patch.setattr(interpreter, "_patch_attr", patch_attribute)
    patch.setattr(core, "_unwrap_if_constexpr", unwrap_unless_plain)


def _nothing() -> None:
    pass


def _itself(dtype: Any, builder: Any) -> Any:
    """The interpreter has no other representation of a type."""
    return dtype


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "__add__": np.add, "__radd__": np.add, "__mul__": np.multiply, "__rmul__": np.multiply,
    "__sub__": np.subtract, "__rsub__": lambda lhs, rhs: rhs - lhs,
}  # fmt: skip
_COMPARISONS = {
    "__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal,
    "__eq__": np.equal, "__ne__": np.not_equal,
}  # fmt: skip
_OF_MASKS = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
_OF_INTEGERS: dict[str, Callable[[Any, Any], Any]] = {
    "__floordiv__": lambda lhs, rhs: (lhs - np.fmod(lhs, rhs)) // rhs, "__mod__": np.fmod,
}  # fmt: skip
_OF_FLOATS = {"__truediv__": np.divide}
_OPERATORS = _ARITHMETIC | _COMPARISONS | _OF_MASKS | _OF_INTEGERS | _OF_FLOATS
_INTEGERS = ("int32", "int64")


def _kinds(name: str) -> tuple[str, ...]:
    """The types of operands, of which NumPy makes the same result as Triton."""
    if name in _OF_MASKS:
        return ("int1",)
    return ("fp32",) * (name not in _OF_INTEGERS) + _INTEGERS * (name not in _OF_FLOATS)


def _operator(name: str, otherwise: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """An operator of two blocks, or of a block and a number, for types that NumPy treats as Triton does.

    Others, such as halves, go the interpreter's way.
    """
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    operate, kinds, compares = _OPERATORS[name], _kinds(name), name in _COMPARISONS
    block, constant, of_type = core.tensor, core.constexpr, core.block_type

    def quick(lhs: Any, rhs: Any) -> Any:
        if type(rhs) is constant:
            rhs = rhs.value
        dtype, handle = lhs.dtype, lhs.handle
        kind, is_block = dtype.name, type(lhs.type) is of_type
        if type(rhs) is block:
            is_block = is_block or type(rhs.type) is of_type
            other = rhs.dtype.name
            if other == kind and kind in kinds:
                made = TensorHandle(operate(handle.data, rhs.handle.data), handle.dtype)
            elif name == "__add__" and other in _INTEGERS and dtype.is_ptr():
                made = interpreter_builder.create_addptr(handle, rhs.handle)
            elif kind in _INTEGERS and other in _INTEGERS and "int64" in kinds:
                dtype = core.int64
                made = TensorHandle(operate(handle.data, rhs.handle.data), dtype)
            else:
                return otherwise(lhs, rhs)
        elif kind in kinds and (
            (type(rhs) is int and -(2**31) <= rhs < 2**31) or (type(rhs) is float and kind == "fp32")
        ):
            made = TensorHandle(operate(handle.data, rhs), handle.dtype)
        else:
            return otherwise(lhs, rhs)
        if compares:
            dtype = core.int1
        return block(made, of_type(dtype, made.data.shape) if is_block else dtype)

    return quick


def _with_new_axes(otherwise: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """`block[:, None]`"""
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    block, of_type = core.tensor, core.block_type

    def getitem(x: Any, index: Any) -> Any:
        if type(index) is not tuple or type(x.type) is not of_type:
            return otherwise(x, index)
        for part in index:
            whole = type(part) is slice and part.start is part.stop is part.step is None
            if part is not None and not whole:
                return otherwise(x, index)
        data = x.handle.data[index]
        return block(TensorHandle(data, x.handle.dtype), of_type(x.dtype, data.shape))

    return getitem


def _where(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Of blocks with one type, or of such a block and a number."""
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    block, of_type, single = core.tensor, core.block_type, core.float32

    def where(condition: Any, x: Any, y: Any) -> Any:
        if not (type(condition) is block and condition.dtype.name == "int1"):
            return otherwise(condition, x, y)
        if type(x) is block and type(y) is block and x.dtype is y.dtype:
            dtype, values = x.dtype, (x.handle.data, y.handle.data)
        elif type(x) is block and x.dtype is single and type(y) is float:
            dtype, values = single, (x.handle.data, np.float32(y))
        elif type(y) is block and y.dtype is single and type(x) is float:
            dtype, values = single, (np.float32(x), y.handle.data)
        else:
            return otherwise(condition, x, y)
        data = np.where(condition.handle.data, *values)
        is_block = any(type(part.type) is of_type for part in (condition, x, y) if type(part) is block)
        return block(TensorHandle(data, dtype), of_type(dtype, data.shape) if is_block else dtype)

    return where


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

    fits: Callable[[Any, Any], bool] = interpreter._validate_np_data_size
    fitting: set[tuple[np.dtype, str]] = set()

    def known_to_fit(data: Any, dtype: Any) -> bool:
        key = data.dtype, dtype.name
        if key in fitting:
            return True
        if not fits(data, dtype):
            return False
        fitting.add(key)
        return True

    def init_handle(self: Any, data: Any, dtype: Any) -> None:
        self.data, self.dtype, self.attr = data, dtype, {}
        if (data.dtype, dtype.name) not in fitting:
            self.__post_init__()

    patch.setattr(interpreter, "_validate_np_data_size", known_to_fit)
    patch.setattr(interpreter.TensorHandle, "__init__", init_handle)

    for kind in (core.dtype, core.pointer_type, core.block_type):
        patch.setattr(kind, "__eq__", _same_or(kind.__eq__))

    constexpr, block_type = core.constexpr, core.block_type
    make_block_type: Callable[..., None] = block_type.__init__
    block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(shape) is not tuple:
            shape = tuple(size.value if type(size) is constexpr else size for size in shape)
        key = element_ty.name, shape
        if key not in block_types:
            make_block_type(self, element_ty, list(shape))
            if shape not in shapes:
                shapes[shape] = constexpr(self.numel), core.tuple([constexpr(size) for size in shape])
            block_types[key] = {**self.__dict__, "sizes": shape, "of_tensors": shapes[shape]}
        self.__dict__.update(block_types[key])

    patch.setattr(block_type, "__init__", init_block_type)
    patch.setattr(block_type, "with_element_ty", lambda self, dtype: block_type(dtype, self.sizes))
    patch.setattr(block_type, "to_ir", _itself)

    of_one = constexpr(1), core.tuple([])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else of_one

    patch.setattr(core.tensor, "__init__", init_tensor)


def _keep_numbers(patch: pytest.MonkeyPatch) -> None:
    """A number is converted once for each type. The blocks share its array, which no operation changes."""
    from triton.language import core
    from triton.runtime import interpreter

    semantic: Any = type(interpreter.interpreter_semantic)
    make: Callable[..., Any] = semantic.scalar_constant
    arrays: dict[tuple[Any, ...], np.ndarray] = {}

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = value, type(value), copysign(1, value), dtype.name
        if key not in arrays:
            arrays[key] = make(self, value, dtype).handle.data
        return core.tensor(interpreter.TensorHandle(arrays[key], dtype), dtype)

    patch.setattr(semantic, "scalar_constant", scalar_constant)


_WHOLE = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
_CASTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("int1", *_WHOLE), (*_WHOLE, "fp16", "fp32", "fp64")),
    "fp32": (*_WHOLE, "fp16", "fp64"), "fp16": ("fp32",),
}  # fmt: skip
"""The casts that NumPy makes as Triton does, by the type before."""


def _convert_rarely(patch: pytest.MonkeyPatch) -> None:
    """Operands that have the type and the shape of each other, or of the result, are used as they are."""
    from triton.language import core
    from triton.runtime import interpreter

    block, block_type = core.tensor, core.block_type
    semantic: Any = type(interpreter.interpreter_semantic)
    to_tensor: Callable[..., Any] = semantic.to_tensor
    cast: Callable[..., Any] = semantic.cast
    load: Callable[..., Any] = semantic._load_legacy

    def to_block(self: Any, x: Any, check_type: bool = True) -> Any:
        return x if type(x) is block else to_tensor(self, x, check_type)

    def cast_to_another(self: Any, x: Any, dtype: Any, rounding: str | None = None) -> Any:
        if x.dtype is dtype:
            return x
        if rounding is not None or dtype.name not in _CASTS.get(x.dtype.name, ()):
            return cast(self, x, dtype, rounding)
        values = x.handle.data.astype(interpreter._get_np_dtype(dtype))
        return block(interpreter.TensorHandle(values, dtype), x.type.with_element_ty(dtype))

    def load_alike(self: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        *unusual, cache, eviction, volatile = options
        element, at = pointers.dtype.element_ty, pointers.handle
        alike = mask is None or (
            mask.type.is_block() and pointers.type.is_block() and mask.handle.data.shape == at.data.shape
        )
        others = mask is not None and other is not None
        zeros = other is None or (others and not other.type.is_block() and not other.handle.data.any())
        if any(unusual) or element.name == "int1" or not (alike and zeros):
            return load(self, pointers, mask, other, *options)
        if mask is None:
            handle = self.builder.create_load(at, cache, eviction, volatile)
        else:  # zero is the default
            handle = self.builder.create_masked_load(at, mask.handle, None, cache, eviction, volatile)
        return block(handle, block_type(element, at.data.shape) if pointers.type.is_block() else element)

    patch.setattr(semantic, "to_tensor", to_block)
    patch.setattr(semantic, "cast", cast_to_another)
    patch.setattr(semantic, "_load_legacy", load_alike)

    convert: Callable[..., tuple[Any, Any]] = semantic.binary_op_type_checking_impl
    numbers: dict[tuple[Any, ...], Any] = {}

    def convert_unless_alike(self: Any, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> tuple[Any, Any]:
        # The third rule and later ones are of divisions, which may need another type.
        if type(lhs) is not block or len(rules) > 2 or named:
            return convert(self, lhs, rhs, *rules, **named)
        if type(rhs) is block:
            if lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
                return (lhs, rhs) if lhs.shape is rhs.shape else self.broadcast_impl_value(lhs, rhs)
            return convert(self, lhs, rhs, *rules)
        # A number becomes a block, which is kept if the other operand needs no conversion.
        key = (rhs, type(rhs), copysign(1, rhs), lhs.dtype.name, id(lhs.shape), rules)
        if key not in numbers:
            converted, number = convert(self, lhs, rhs, *rules)
            if converted is not lhs:
                return converted, number
            numbers[key] = number
        return lhs, numbers[key]

    patch.setattr(semantic, "binary_op_type_checking_impl", convert_unless_alike)

    broadcast: Callable[..., tuple[Any, Any]] = semantic.broadcast_impl_value

    def broadcast_blocks(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
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


def _same_or(equals: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda one, other: one is other or equals(one, other)


def watch_memory(patch: pytest.MonkeyPatch) -> None:
    """Kernels may read and write the elements of their arguments only. Elsewhere a GPU may fault, or another
    tensor may change. The interpreter would do either without a word."""
    from triton.runtime import interpreter
    from triton.tools.tensor_descriptor import TensorDescriptor

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    arguments = executor._init_args_hst
    dtype_of: Callable[[Any], np.dtype] = interpreter._get_np_dtype
    begins, ends = np.zeros(0, np.int64), np.zeros(0, np.int64)
    begin_list, end_list = list[int](), list[int]()
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
        nonlocal begins, ends, begin_list, end_list, kernel
        copies = arguments(self, args, named)
        merged: list[list[int]] = []
        for begin, end in sorted(extents((*copies[0], *copies[1].values()))):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        begins, ends = np.array(merged, np.int64).reshape(-1, 2).T
        begin_list, end_list = begins.tolist(), ends.tolist()
        kernel = self.fn.__name__
        return copies

    def check(pointers: Any, mask: Any, element: Any) -> None:
        at = np.asarray(pointers.data)
        if at.size:  # most accesses are to one argument, also where the mask is false
            index = bisect_right(begin_list, int(np.minimum.reduce(at, axis=None))) - 1
            last = int(np.maximum.reduce(at, axis=None))
            if index >= 0 and last + dtype_of(element).itemsize <= end_list[index]:
                return
        at, used = np.broadcast_arrays(at, np.asarray(mask.data))
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
