"""Finds the tensors of a loaded model, and those of another one with the same layers.

The constructors of a model make what it keeps of a checkpoint: fused, transposed, packed, quantized. So what
derives from a new checkpoint is found by building the model again, and by walking both objects side by side.
No layer has to say what it derives.
"""

import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baton.engine.kernels.scratch import Scratch

_LEAVES = (Tensor, Scratch, type, types.ModuleType, torch.dtype, torch.device, str, bytes)
_OF_CALLABLES = ("__self__", "func", "args", "keywords")
"""Of bound methods and of `functools.partial`."""


class Pair(NamedTuple):
    """A tensor of a model, and what another model has in its place."""

    name: str
    """Where the tensor is, such as `layers.3.mixer.qkv.weight`."""
    kept: Tensor
    new: Tensor


def pairs(kept: object, new: object, name: str = "model") -> Iterator[Pair]:
    """All tensors of `kept`, each once, with those of `new`. What both share is left out. Raises `ValueError`
    naming the place if both differ in more than the values of their tensors."""
    yield from _pairs(kept, new, name, set())


def tensors(x: object, *, without: object = None) -> Iterator[Tensor]:
    """All tensors of a model, each once, without those of `without`, which it refers to."""
    return _tensors(x, {id(without)})


def _tensors(x: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(x) in seen:
        return
    if isinstance(x, Tensor):
        seen.add(id(x))
        yield x
    elif parts := _parts(x):
        seen.add(id(x))
        for part in parts.values():
            yield from _tensors(part, seen)


def _pairs(kept: Any, new: Any, name: str, seen: set[int]) -> Iterator[Pair]:
    if kept is new or id(kept) in seen:
        return
    if isinstance(kept, float):
        if kept != new:
            raise ValueError(f"{name} is {kept} and would be {new}: it cannot change in place")
        return
    parts, others = _parts(kept), _parts(new)
    if not isinstance(kept, Tensor) and not parts:
        return
    seen.add(id(kept))
    if type(kept) is not type(new):
        raise ValueError(f"{name} is a {type(kept).__name__} and would be a {type(new).__name__}")
    if isinstance(kept, Tensor):
        actual, wanted = ((x.shape, x.dtype, x.device.type) for x in (new, kept))
        if actual != wanted:
            raise ValueError(f"{name} is {_form(kept)} and would be {_form(new)}")
        yield Pair(name, kept, new)
        return
    for key, part in parts.items():
        if key not in others:
            raise ValueError(f"{name}.{key} is missing in the new weights")
        yield from _pairs(part, others[key], f"{name}.{key}", seen)


def _form(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype}"


def _parts(x: Any) -> Mapping[str, Any]:
    """What an object refers to and may hold tensors, by name."""
    if isinstance(x, _LEAVES):
        return {}
    if isinstance(x, dict):
        return {str(key): value for key, value in x.items()}
    if isinstance(x, list | tuple):
        return {str(i): value for i, value in enumerate(x)}
    if isinstance(x, types.FunctionType):
        return {f"cell {i}": cell.cell_contents for i, cell in enumerate(x.__closure__ or ())}
    names = [slot for kind in type(x).__mro__ for slot in getattr(kind, "__slots__", ())]
    names += getattr(x, "__dict__", {})
    names = [name for name in names if name[:2] != "__"]
    return {name: getattr(x, name) for name in (*names, *_OF_CALLABLES) if hasattr(x, name)}
