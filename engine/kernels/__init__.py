"""What a layer computes between its matrix products, on whichever device.

    once a step    plan(metadata)                     where to read and write, prepared for all layers
    each layer     add_rms_norm → [QKV product] → rope_and_write → attention → [output product]
                   add_rms_norm → [gate-up product] → silu_mul → [down product]
    at its end     greedy, or draw with or without thresholds: from logits to tokens

`TorchKernels` is plain torch: the definition of each operation, and what runs on a CPU. `TritonKernels` runs
on CUDA and must match it; one file per idea, each with its maths. Only `kernels_for` chooses between them.

In a CUDA graph: every operation, and `plan` of a step without prefill chunks, launches the same grid whatever
the tensors hold, reads lengths on the device and never waits for it. Keep the metadata in static tensors, and
mark rows that pad the batch by context 0 and slot −1.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.kernels.attention import AttentionMetadata

__all__ = ["SMALLEST_TEMPERATURE", "AttentionMetadata", "HeadNorm", "Kernels", "kernels_for"]


SMALLEST_TEMPERATURE = 1e-5
"""Below, logits / temperature might overflow."""


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head before it is rotated (Qwen3)."""

    scale: Tensor  # [num_heads + num_kv_heads, head_dim]
    eps: float


class Kernels(Protocol):
    """Tensors are contiguous unless told otherwise, and of one dtype but where a dtype is named."""

    def add_rms_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """residual [rows, size] += delta, in place; returns its RMSNorm (Zhang & Sennrich 2019) times weight
        [size]. Without delta, residual is only read."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * size] → [rows, size]: silu of the first half times the second (SwiGLU, Shazeer 2020)."""
        ...

    def rope_and_write(
        self, qkv: Tensor, rotary: Tensor, norm: HeadNorm | None, kv: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotates the query and key heads of qkv [tokens, num_heads + 2 * num_kv_heads, head_dim] by
        `Rotary.at(positions)` (after `norm`), and writes key and value heads into the layer's cache kv at
        slots [tokens] int64. Returns q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads,
        head_dim]: views, strided, of qkv or of new memory. What else qkv holds afterwards is undefined."""
        ...

    def plan(self, metadata: AttentionMetadata, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> Any:
        """What `attention` needs to know, the same for all layers of a step."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, plan: Any) -> Tensor:
        """Every query attends to its request's cache up to its own position; q, k, v as `rope_and_write`
        returns them, kv with this step's keys and values written. Returns [tokens, num_heads, head_dim]."""
        ...

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Of logits [rows, vocabulary] float32: the column of the largest [rows] int64, and whether all of
        the row is finite [rows] bool; of a row that is not, any column."""
        ...

    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        keys: Tensor,
        probs: Tensor | None = None,
        least: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `greedy`, at temperature [rows] float32 (0: greedy). A race of exponential clocks, also known as
        the Gumbel-max trick: token i wins with probability p[i]. One number per row, looked up in the
        cumulative distribution, would do, but there a rounding error in any logit moves all the boundaries;
        here it matters only if it swaps the first two. The clocks of a row are a function of its key, keys
        [rows] int32. With probs [rows, vocabulary] (softmax of logits / temperature) and least [rows] only
        tokens of at least that probability take part."""
        ...

    def thresholds(self, probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """[rows]: the probability of the least likely token that top_k [rows] int32 (vocabulary: no limit),
        then top_p [rows] (above 1: none), and min_p [rows] leave in a row of probs [rows, vocabulary]."""
        ...


def kernels_for(device: torch.device, head_dim: int) -> Kernels:
    """Raises `ValueError` naming the extra if Triton is needed and not installed, and if it has no kernel for
    this head_dim."""
    if device.type == "cpu":
        from engine.kernels.torch_kernels import TorchKernels

        return TorchKernels()
    try:
        from engine.kernels.triton_kernels import TritonKernels
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ValueError(
            f"--device {device} needs Triton: in Baton's source directory `pip install -e '.[cuda]'` "
            "installs it; or use --device cpu"
        ) from error
    return TritonKernels(device, head_dim)
