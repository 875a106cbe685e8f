"""Memory that a kernel writes to, kept beside the weights of a layer."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that calls write to. Walks over the tensors of a model (`engine.layers.in_place`) leave it out:
    two processes may share weights, and never this."""

    tensor: Tensor
