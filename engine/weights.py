"""Hands the tensors of a checkpoint to a model under construction, checked, in the right dtype and place."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels import kernels_for
from engine.model_config import ModelConfig

FINGERPRINT_SAMPLE = 256
"""Elements of each tensor that its identity is judged by: two checkpoints of a shape that differ in training
differ in all tensors, and hashing gigabytes would cost more than loading them."""

IGNORED = "rotary_emb.inv_freq"
"""Old checkpoints carry this; it follows from the configuration."""


class Checkpoint(Protocol):
    """Where weights come from. `read` raises `ValueError` naming the file if it is incomplete or corrupt."""

    config: ModelConfig
    source: str
    """File or directory, for error messages."""

    def names(self) -> Collection[str]:
        """All tensors, by the names that Hugging Face gives them. Empty: any tensor can be read."""
        ...

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the checkpoint's own dtype. `shape` is what is expected; the caller checks."""
        ...


class Weights:
    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[str, float], None],
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.kernels = kernels_for(device, checkpoint.config.head_dim)
        self._checkpoint = checkpoint
        self._names = set(checkpoint.names())
        self._progress = progress
        self._taken: dict[str, str] = {}  # name → digest

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, which must have this shape. Raises `ValueError` naming file and tensor."""
        return self._read(name, shape).to(self.device, self.dtype)

    def stack(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Tensor:
        """Tensors that differ in their first dimension at most, as one: each goes straight to its rows."""
        rows = [shape[0] for shape in shapes]
        whole = torch.empty((sum(rows), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for name, shape, part in zip(names, shapes, whole.split(rows), strict=True):
            part.copy_(self._read(name, shape))
        return whole

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if self._names and name not in self._names:
            raise ValueError(
                f"{self._checkpoint.source}: tensor {name} is missing, the checkpoint is incomplete"
            )
        tensor = self._checkpoint.read(name, shape)
        if tensor.shape != shape:
            raise ValueError(
                f"{self._checkpoint.source}: tensor {name} is {list(tensor.shape)}, "
                f"by the model's configuration it should be {list(shape)}"
            )
        sample = tensor.flatten()[:FINGERPRINT_SAMPLE].float().cpu().numpy()
        self._taken[name] = hashlib.sha256(f"{name} {shape}".encode() + sample.tobytes()).hexdigest()
        if self._names:
            self._progress("loading weights", len(self._taken) / len(self._names))
        return tensor

    def finish(self) -> str:
        """To be called when the model is complete: returns the fingerprint of its weights. Raises
        `ValueError` if the checkpoint has tensors that the model has no use for: it is another model then."""
        left = {name for name in self._names - self._taken.keys() if not name.endswith(IGNORED)}
        if self._checkpoint.config.tie_embeddings:
            left.discard("lm_head.weight")
        if left:
            some = ", ".join(sorted(left)[:3])
            raise ValueError(
                f"{self._checkpoint.source}: {len(left)} tensors are unknown to "
                f"{self._checkpoint.config.architecture}, such as {some}"
            )
        self._progress("loading weights", 1.0)
        digests = sorted(self._taken.items())
        return hashlib.sha256(repr(digests).encode()).hexdigest()
