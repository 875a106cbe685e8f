"""The functions that transformers' modules call in place of their own attention and masks.

A pass of the modules calls attention in one order, each time for another layer of the cache. transformers
makes no mask for an implementation that registers none, so positions alone say what a query sees. The pass
that records calls registers one: it returns marks, which say the span of each call.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from baton.engine.model_config import ModuleAttention, ModuleIndex, ModuleStates, Span

SERVING, RECORDING = "baton", "baton_recording"
"""Names of attention, as transformers' `attn_implementation`."""
ERRORS = (
    AssertionError, AttributeError, ImportError, IndexError, KeyError, RuntimeError, StrictDataclassError,
    TypeError, ValueError,
)  # fmt: skip
"""What configurations and modules of transformers raise if something does not fit."""


def words_of(error: Exception) -> str:
    """What one of `ERRORS` says, in a line. Settings of a wrong type or value have their reason below it."""
    first, *others = str(error).strip().splitlines() or [repr(error)]
    return " ".join([first, others[0].strip()]) if first.endswith(":") and others else first


IGNORED = {
    "cu_seq_lens_k", "cu_seq_lens_q", "dropout", "is_causal", "logits_to_keep", "max_length_k",
    "max_length_q", "output_attentions", "output_hidden_states", "output_router_logits", "position_ids",
    "sliding_window", "use_cache",
}  # fmt: skip
"""Arguments of attention that say nothing new of a layer whose mask is known."""


@dataclass
class Calls:
    """What a pass of modules on the device "meta" calls attention with."""

    layers: list[ModuleAttention | ModuleStates | ModuleIndex] = field(default_factory=list)
    spans: list[tuple[Tensor, Span | None]] = field(default_factory=list)
    """Each mark that took the place of a mask, and what queries see with it."""
    called: set[str] = field(default_factory=set)
    """The names of modules."""

    @property
    def attention(self) -> list[ModuleAttention]:
        return [layer for layer in self.layers if isinstance(layer, ModuleAttention)]


@dataclass
class Pass:
    """A pass of modules that computes a step."""

    attend: Callable[..., Tensor]
    """As `engine.models.llama.Attend`."""
    mix: Callable[..., None]
    """As `engine.models.transformers.states.MixModules`, or as `engine.models.transformers.indexed.MixIndex`
    for a layer with an index."""
    attention: Iterator[tuple[int, ModuleAttention]]
    """The layers that attend and their numbers, from the next one on."""
    rotaries: dict[int, Tensor]
    """By the size of heads: [tokens, 2, size], which rotates nothing."""


_CURRENT: ContextVar[Calls | Pass] = ContextVar("calls")


@contextmanager
def calling(current: Calls | Pass) -> Iterator[None]:
    token = _CURRENT.set(current)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_pass() -> Pass:
    current = _CURRENT.get()
    assert isinstance(current, Pass), "the runner computes a step"
    return current


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, size], key and value [1, KV heads, tokens, size]; values may have another
    size. s_aux [heads]: sinks. indices [1, tokens, positions]: as `indexed.Indexed` returns them. Returns
    [1, tokens, heads, size of values]."""
    current = current_pass()
    layer, shape = next(current.attention)
    size, value_size = shape.head_dim, value.shape[3]
    heads = [x if x.shape[3] == size else F.pad(x, (0, size - x.shape[3])) for x in (query, key, value)]
    qkv = torch.cat([x.transpose(1, 2) for x in heads], dim=2)[0]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    chosen = None if indices is None else indices[0]
    out = current.attend(layer, qkv, current.rotaries[size], None, s_aux, scale, softcap, chosen)
    return out[None, ..., :value_size], None


def record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As `attention`, on the device "meta". Raises `ValueError` naming what Baton's attention cannot do."""
    current = _CURRENT.get()
    assert isinstance(current, Calls), "a pass records calls"
    name, wanted = (
        type(module).__name__,
        {key for key, x in others.items() if x is not None and x is not False},
    )
    if unknown := sorted(wanted - IGNORED):
        raise ValueError(f"{name} calls attention with {', '.join(unknown)}")
    marked = [span for mark, span in current.spans if mark is attention_mask]
    if attention_mask is not None and not marked:
        raise ValueError(f"{name} makes its own mask")
    largest = max(query.shape[3], key.shape[3], value.shape[3])
    current.layers.append(
        ModuleAttention(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=max(16, 1 << (largest - 1).bit_length()),  # as kernels take it
            span=marked[0] if marked else None,
            softcap=softcap,
            sinks=s_aux is not None,
            chosen=indices is not None,
        )
    )
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def mark(*, config: Any, local_size: int | None = None, use_vmap: bool = False, **others: Any) -> Tensor:
    """Stands for a mask. `local_size`: of a window or chunk. `use_vmap`: the mask has a function of its own,
    beside those."""
    current = _CURRENT.get()
    assert isinstance(current, Calls), "a pass records calls"
    if use_vmap:
        raise ValueError("its masks are neither causal nor windows nor chunks")
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    span = None if local_size is None else Span(local_size, chunked=chunked)
    stands = torch.empty(1, 1, 1, 1, device="meta")
    current.spans.append((stands, span))
    return stands


def skip_experts(module: nn.Module, hidden_states: Tensor, *routing: Tensor) -> Tensor:
    """Experts on the device "meta": a loop over those that have tokens would read values."""
    return torch.empty_like(hidden_states)


@functools.cache
def register(experts: Callable[..., Tensor]) -> None:
    """Gives transformers the functions, once a process."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(SERVING, attention)
    ALL_ATTENTION_FUNCTIONS.register(RECORDING, record)
    ALL_MASK_ATTENTION_FUNCTIONS.register(RECORDING, mark)
    ALL_EXPERTS_FUNCTIONS.register(SERVING, experts)
    ALL_EXPERTS_FUNCTIONS.register(RECORDING, skip_experts)
