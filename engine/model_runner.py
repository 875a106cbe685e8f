"""What the device computes of a step: from token ids to the next tokens. On a GPU all of it is launched, and
nothing waited for.

    run(batch) ──▶ forward pass (writes KV) ──▶ logits of the sampled rows ──▶ sampling ──▶ tokens

Steps are replayed from CUDA graphs, once these are captured; those of more rows than graphs are for are
launched kernel by kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.attention import AttentionMetadata
from engine.batch import StepBatch, upload
from engine.grammar import Grammars
from engine.kernels import HeadNorm, Kernels
from engine.kernels.tiles import SHORT
from engine.live_request import LiveRequest, Phase
from engine.model_config import ModelConfig
from engine.sampler import (
    Draws,
    TopLogprobs,
    Variant,
    adjust,
    adjusts,
    choose,
    draws_of,
    to_host,
    top_logprobs,
)
from engine.step_graphs import LayerDone, Size, StepGraphs, Widths


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a step samples; its tensors are right once the step is over."""

    tokens: Tensor | None = None  # [sampled] int64, on the host; negative: why there is none. None: no rows
    logprobs: TopLogprobs | None = None
    refused: dict[int, str] = field(default_factory=dict)  # by row: what is wrong with its grammar


@dataclass(frozen=True, slots=True)
class Computed:
    """A step before its tokens are chosen. Nothing else may be computed before they are."""

    requests: list[LiveRequest]
    """Who gets a token, in the order of its rows."""
    variant: Variant
    size: Size | None
    """Of the graphs that the step was replayed from, which have the rest; None: it was not."""
    logits: Tensor | None = None  # [sampled, vocabulary] float32
    draws: Draws[Tensor] | None = None


class ModelRunner:
    """Owns the model, its KV cache and its graphs. `kv_cache` is as `engine.Engine` has it."""

    def __init__(
        self,
        model: Any,
        kernels: Kernels,
        grammars: Grammars,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        block_size: int,
        max_num_seqs: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.kv_cache: list[Tensor] = []
        self._kernels = kernels
        self._grammars = grammars
        self._config = config
        self._dtype = dtype
        self._block_size = block_size
        self._device = device
        self._graphs: StepGraphs | None = None
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """What the newest step samples, by row: pending tokens of the step after it are read from here."""
        self.table_width: int | None = None
        """Blocks of a row of the block tables; None: as many as a step needs."""
        if device.type == "cuda":
            # One width, since Triton compiles a kernel anew for strides that differ in their divisibility.
            self.table_width = -(-config.max_model_len // (16 * block_size)) * 16

    def open(self, num_blocks: int, layers: int | None = None) -> None:
        """An empty cache. With `layers`, only so many layers have memory of their own."""
        config = self._config
        shape = (2, num_blocks, self._block_size, config.num_kv_heads, config.head_dim)
        own = layers or config.num_layers
        # Not zeroed: nothing reads what was not written, and the system maps a page when it is first touched.
        caches = [torch.empty(shape, dtype=self._dtype, device=self._device) for _ in range(own)]
        self.kv_cache = [caches[layer % own] for layer in range(config.num_layers)]

    def close(self) -> None:
        """The cache's memory is free."""
        self.kv_cache = []

    @torch.inference_mode()
    def capture(
        self, max_num_batched_tokens: int, *, by_layer: bool, progress: Callable[[float], None]
    ) -> None:
        """From now on graphs serve the steps that they are for. The cache stays where it is. `by_layer`:
        `layer_done` must be called for steps of prompts."""
        assert self.table_width is not None, "a CPU has no graphs"
        config = self._config
        tile = SHORT.tokens(config.num_heads // config.num_kv_heads)
        widths = Widths(self.table_width, config.hidden_size, config.vocab_size, tile)
        self._graphs = StepGraphs(
            self,
            self._tokens,
            widths,
            dtype=self._dtype,
            block_size=self._block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            by_layer=by_layer,
            progress=progress,
        )

    @torch.inference_mode()
    def run(self, batch: StepBatch, layer_done: LayerDone) -> Computed:
        """`layer_done(i)`: the KV of layer i is written (on CUDA: its writing is enqueued). Not called where
        graphs serve the step that were not captured by layer. Then comes `sample`."""
        requests, graphs = batch.sampled, self._graphs
        variant, draws = draws_of(requests, self._config.vocab_size)
        size = graphs.size(batch) if graphs is not None else None
        if graphs is not None and size is not None:
            graphs.forward(size, batch, draws, layer_done)
            return Computed(requests, variant, size)
        token_ids, positions, attention = batch.on(self._device, self._block_size)
        sampled, *fields = upload([batch.sampled_rows, *draws], self._device)
        hidden = self.forward(token_ids, positions, attention, layer_done)
        logits = self.logits(hidden[sampled]).float() if requests else None
        return Computed(requests, variant, None, logits, Draws(*fields))

    @torch.inference_mode()
    def sample(self, computed: Computed) -> Sampling:
        """Where some of the requests have grammars, the host knows all of their tokens."""
        requests, variant, size, logits, draws = (
            computed.requests, computed.variant, computed.size, computed.logits, computed.draws,
        )  # fmt: skip
        if not requests:
            return Sampling()
        if size is not None:
            assert self._graphs is not None
            logits, draws = self._graphs.logits(len(requests)), self._graphs.draws(len(requests))
            if not any(adjusts(live) for live in requests):
                return Sampling(to_host(self._graphs.choose(len(requests), variant)))
        assert logits is not None
        assert draws is not None
        mask, refused = self._grammars.allowed(
            [(None if live.phase is Phase.GONE else live.grammar, live.token_ids) for live in requests]
        )
        adjusted = adjust(logits, requests, self._tokens, self._config.eos_ids, mask)
        tokens = choose(adjusted, logits, variant, draws, self._kernels)
        self._tokens[: len(requests)] = tokens
        return Sampling(to_host(tokens), top_logprobs(logits, tokens, requests), refused)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, layer_done: LayerDone
    ) -> Tensor:
        """Writes the KV of all tokens, returns the hidden state of each."""
        kernels = self._kernels
        plan = kernels.plan(attention, self._config.num_heads, self._config.num_kv_heads, self._dtype)

        def attend(layer: int, qkv: Tensor, rotary: Tensor, norm: HeadNorm | None) -> Tensor:
            kv = self.kv_cache[layer]
            q, k, v = kernels.rope_and_write(qkv, rotary, norm, kv, attention.slots)
            layer_done(layer)  # so early, since only the rest of the last layer hides that one's transfer
            return kernels.attention(q, k, v, kv, plan)

        pending = self._tokens[(-1 - token_ids).clamp_min(0)].clamp_min(0)
        known = torch.where(token_ids < 0, pending, token_ids)
        return self.model(known, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """In the model's dtype."""
        return self.model.logits(hidden)

    def choose(self, logits: Tensor, variant: Variant, draws: Draws[Tensor]) -> Tensor:
        """Tokens of rows that ask for nothing else."""
        return choose(logits, logits, variant, draws, self._kernels)
