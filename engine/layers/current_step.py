"""What layers know of the step that they compute, beside the tensors that they are called with.

with computing(step):       the runner, around a pass of the model
    …  current_step()       the layers that need it
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class ImageRows(NamedTuple):
    """The rows of a step that are part of an image."""

    index: Tensor  # [rows] int32: of each row of the step its image row, −1: it is text
    features: Tensor  # [image rows, 1 + layers, hidden_size]: the embedding, and what layers add
    positions: Tensor  # [image rows, 3] int64


@dataclass(frozen=True, slots=True)
class CurrentStep:
    decodes: int
    """The rows [0, decodes) of the tensors belong to requests that decode, the others to prompts. Some
    products compute few rows and many rows in different ways. They choose the way by it, so that the result
    of a row does not depend on the other rows of its step."""
    slots: Tensor | None = None
    """[rows]: where the KV of each row goes. −1: the row pads a graph, and has no expert. None: none does."""
    expert_counts: Tensor | None = None
    """[layers with experts, experts] int32, zeros: each layer counts the rows of its experts. None: a dense
    model."""
    images: ImageRows | None = None
    """None: the step has none."""
    rotary_shift: Tensor | None = None
    """[rows]: as in `Step`. None: no request has an image."""
    taps: list[Tensor] = field(default_factory=list)
    """Each tapped layer adds its input [rows, hidden_size]."""


_STEP: ContextVar[CurrentStep] = ContextVar("step")  # engines may run in several threads


def current_step() -> CurrentStep:
    return _STEP.get()


@contextmanager
def computing(step: CurrentStep) -> Iterator[None]:
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)
