"""Torch's own attention (cuDNN's, on Hopper) for prompts that start here: their keys and values are still
dense from the QKV product, nothing is looked up in the cache. And the choice who takes such a prompt."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

DENSE_FROM: dict[tuple[int, int], int] = {}
"""Compute capability → tokens of a prompt from which torch's kernel is faster than ours; missing: never.
To be filled with what `python -m bench.kernels` measures."""

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def dense_from(device: torch.device) -> int | None:
    return DENSE_FROM.get(torch.cuda.get_device_capability(device))


def dense_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """One whole prompt: q and out [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim]."""
    with sdpa_kernel(BACKENDS, set_priority=True):
        heads = q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        result = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    out.copy_(result[0].transpose(0, 1))
