"""Layers behind a model that guess its next tokens.

    hidden state of position i, token i + 1 ─▶ layer (KV of position i) ─▶ hidden state ─▶ token i + 2
    that hidden state, token i + 2          ─▶ layer (KV of position i + 1) …

The KV of a position depends on the token after it, which the name of its block does not cover. So where two
requests part at the end of a shared block, one of them finds an entry with the other's token. This may cost
it a draft, and never changes a token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from baton.engine.layers.mlp import MLP
from baton.engine.layers.norm import InputNorm, RMSNorm
from baton.engine.layers.ranks import unsharded
from baton.engine.layers.rotary import Rotary
from baton.engine.layers.vocabulary import Embedding
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.llama import Llama, LlamaAttention, LlamaLayer, Norms


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of a draft head. The fingerprint covers its repr."""

    method: str
    """A key of `DRAFT_HEADS`."""
    model: ModelConfig
    """Of its layer."""
    taps: tuple[int, ...] = ()
    """Layers of the model whose input the head takes in place of the last hidden state."""
    adds_norm: bool = False
    """Whether the residual stream begins with the norm of what the head takes."""

    def of_rank(self, ranks: int) -> "HeadConfig":
        """The shape that one of `ranks` ranks computes with."""
        return replace(self, model=self.model.of_rank(ranks))


class DraftHead:
    """One layer. It has the embedding and the output projection of the model, or its own."""

    layer: LlamaLayer
    norm: RMSNorm

    def __init__(self, config: HeadConfig, weights: Weights, target: Llama) -> None:
        """`target`: this rank's part of the model."""
        self.ranks = weights.ranks
        self.embedding = target.embedding
        self.rotary = Rotary(config.model, weights)
        self.project: Callable[[Tensor], Tensor] = target.head
        self.token_ids: Tensor | None = None
        """[columns of the logits] int64: their tokens. None: column i is token i."""

    def first(self, of_model: Tensor) -> Tensor:
        """What the head takes of the model: of its hidden states, or of the inputs of the taps, [tokens,
        number · hidden_size]."""
        return of_model

    def joined(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream, and what the layer takes. May overwrite `hidden`."""
        raise NotImplementedError

    def __call__(
        self, index: int, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Any
    ) -> Tensor:
        """Hidden states [tokens, hidden_size]. `index`: of the layer, for `attend`. `token_ids`: the token
        after each position. `hidden`: the result of `first` or of an earlier call, which this may
        overwrite."""
        residual, term = self.embedding(token_ids)
        embedded = residual if term is None else self.ranks.all_reduce(term)
        residual, x = self.joined(embedded, hidden, positions)
        layer = self.layer
        mixed = layer.mixer(index, layer.mixer_norm(x), self.rotary.at(positions), attend)
        return residual.add_(self.ranks.all_reduce(layer.mlp(layer.mlp_norm(residual, mixed))))

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, columns], on rank 0."""
        return self.project(self.norm(hidden))


class NextTokenLayer(DraftHead):
    """The layer behind the others of a checkpoint, which predicts one token further (DeepSeek-V3, 2024)."""

    def __init__(self, config: HeadConfig, weights: Weights, target: Llama) -> None:
        super().__init__(config, weights, target)
        model, kind = config.model, type(target)
        index, size, eps = model.num_layers, model.hidden_size, model.rms_norm_eps
        if model.experts is not None:
            model = replace(model, experts=replace(model.experts, layers=(index,)))
        name = f"model.layers.{index}"
        self.layer = kind.layer(model, weights, index)
        self.of_token = RMSNorm(weights, f"{name}.enorm", size, eps)
        self.of_hidden = RMSNorm(weights, f"{name}.hnorm", size, eps)
        self.join = weights.linear([f"{name}.eh_proj"], [unsharded(size)], unsharded(2 * size))
        self.join_input = InputNorm(weights, None, self.join)
        self.norm = RMSNorm(weights, f"{name}.shared_head.norm", size, eps)
        self.passes_norm = kind.passes_norm

    def __call__(self, *args: Any) -> Tensor:
        hidden = super().__call__(*args)
        return self.norm(hidden) if self.passes_norm else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.project(hidden) if self.passes_norm else super().logits(hidden)

    def joined(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if not self.passes_norm:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0)  # as in training
        both = torch.cat((self.of_token(embedded), self.of_hidden(hidden)), dim=1)
        residual = self.join(self.join_input(both))
        return residual, residual


class WideAttention(LlamaAttention):
    """Its input is an embedding beside a hidden state."""

    inputs: ClassVar[int] = 2


class Eagle3(DraftHead):
    """A layer that takes the inputs of three layers of the model (EAGLE-3, Li 2025), and may know only the
    most frequent tokens. `loader.draft_heads.EagleCheckpoint` names its weights."""

    def __init__(self, config: HeadConfig, weights: Weights, target: Llama) -> None:
        super().__init__(config, weights, target)
        model, name = config.model, "model.layers.0"
        size, eps, hidden = model.hidden_size, model.rms_norm_eps, unsharded(model.hidden_size)
        if weights.has("model.embed_tokens.weight"):
            self.embedding = Embedding(model, weights, summed=True)
        if weights.has("lm_head.weight") and (shape := weights.shape("lm_head.weight")) is not None:
            product = weights.linear(["lm_head"], [weights.ranks.shard(shape[0])], hidden)
            self.project = lambda x: weights.ranks.gather(product(x), shape[0])
        if weights.has("d2t"):
            offsets = weights.stored("d2t", None, torch.int64)
            self.token_ids = offsets + torch.arange(len(offsets), device=offsets.device)
        of_model = len(config.taps) * target.norm.weight.shape[0]
        self.combine = weights.linear(["model.fc"], [hidden], unsharded(of_model))
        attention = WideAttention(model, weights, f"{name}.self_attn")
        mlp = MLP(model, weights, f"{name}.mlp", model.intermediate_size)
        self.layer = LlamaLayer(model, weights, name, Norms(before_mixer=None), attention, mlp)
        self.of_token = RMSNorm(weights, f"{name}.input_layernorm", size, eps)
        self.of_hidden = RMSNorm(weights, f"{name}.hidden_norm", size, eps)
        self.norm = RMSNorm(weights, "model.norm", size, eps)
        self.adds_norm = config.adds_norm

    def first(self, of_model: Tensor) -> Tensor:
        return self.combine(of_model)

    def joined(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.of_hidden(hidden)
        return normed if self.adds_norm else hidden, torch.cat((self.of_token(embedded), normed), dim=1)


DRAFT_HEADS: Mapping[str, type[DraftHead]] = {"mtp": NextTokenLayer, "eagle3": Eagle3}
"""By `SpeculativeConfig.method`."""
