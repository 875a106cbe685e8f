"""Llama (2, 3.x), models with its architecture (SmolLM2, Mistral, Phi-3), and those that differ in
a few places."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from baton.engine.kernels import Experts, HeadNorm, Index, LatentHeads, LatentNorm, LinearMethod, Terms
from baton.engine.layers.current_step import current_step
from baton.engine.layers.mlp import MLP, MoE
from baton.engine.layers.norm import InputNorm, RMSNorm
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.rotary import Rotary
from baton.engine.layers.vocabulary import Embedding, OutputProjection
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.cache_spec import AttentionCache, CacheSpec

Attend = Callable[[int, Tensor, Tensor, HeadNorm | None, Tensor | None, float], Tensor]
"""(layer, qkv [tokens, num_heads + 2 * num_kv_heads, head_dim], rotary, norm of heads, sinks, scale) → output
of attention [tokens, num_heads, head_dim]. Rotates qkv, writes KV to the layer's cache, and attends to the
cache, within the span of the layer's `AttentionCache`. `scale` is that of `Kernels.attention`."""
AttendLatent = Callable[[int, Tensor, Tensor, Tensor, LatentNorm, Tensor, LatentHeads, Index | None], Tensor]
"""What models with latents get in its place: (layer, q, latent, shared, norm, rotary, heads, index) → output
of attention, as in `Kernels.write_latent`, `write_index` and `latent_attention`. `index` None: the layer has
none. In a model with an index it attends to what an earlier layer chose."""


class Norms(NamedTuple):
    """The norms of a layer, by the names of their weights. None: there is none."""

    before_mixer: str | None = "input_layernorm"
    before_mlp: str | None = "post_attention_layernorm"
    after_mixer: str | None = None
    after_mlp: str | None = None

    @property
    def summed(self) -> bool:
        """Whether what is added to the residual stream is normalized before: then it is no term of a sum over
        ranks."""
        assert (self.after_mixer is None) == (self.after_mlp is None), "the stream has one kind of delta"
        return self.after_mlp is not None


class LlamaAttention:
    qkv_bias: ClassVar[bool] = False
    """Whether these three projections have biases even without `attention_bias`."""
    out_bias: ClassVar[bool] = True
    """Whether the output has a bias with `attention_bias`."""
    inputs: ClassVar[int] = 1
    """Vectors of the hidden size that the projections take side by side."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        self.head_dim = config.head_dim
        self.q_heads = weights.ranks.shard(config.num_heads)
        self.kv_heads = weights.ranks.shard_with_copies(config.num_kv_heads)
        q_rows, kv_rows = self.q_heads.of(config.head_dim), self.kv_heads.of(config.head_dim)
        hidden = unsharded(config.hidden_size)
        self.input = weights.linear(
            [f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj"],
            [q_rows, kv_rows, kv_rows],
            unsharded(self.inputs * config.hidden_size),
            bias=self.qkv_bias or config.attention_bias,
        )
        self.out = weights.linear(
            [f"{name}.o_proj"], [hidden], q_rows, bias=self.out_bias and config.attention_bias
        )
        self.head_norm: HeadNorm | None = None
        self.sinks: Tensor | None = None  # [num_heads]
        self.scale = config.multipliers.attention if config.multipliers else config.head_dim**-0.5

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        qkv = self.input(x).unflatten(-1, (-1, self.head_dim))
        out = attend(layer, qkv, rotary, self.head_norm, self.sinks, self.scale)
        return self.out(out.flatten(1))


class LlamaLayer:
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        name: str,
        norms: Norms,
        mixer: Any,
        mlp: MLP | MoE | None,
    ) -> None:
        """`mixer`: attention, or what takes its place. `mlp` None: the layer ends behind it."""

        def norm(of: str | None, *, summed: bool) -> RMSNorm | None:
            if of is None:
                return None
            return RMSNorm(weights, f"{name}.{of}", config.hidden_size, config.rms_norm_eps, summed=summed)

        def before(of: str | None, product: LinearMethod | Experts) -> InputNorm:
            return InputNorm(weights, norm(of, summed=norms.summed), product)

        self.tapped = False
        """Whether a draft head takes the layer's input, in `CurrentStep.taps`."""
        self.mixer_norm = before(norms.before_mixer, mixer.input)
        self.mixer = mixer
        self.after_mixer = norm(norms.after_mixer, summed=False)
        self.mlp: Any = mlp
        if mlp is not None:
            self.mlp_norm = before(norms.before_mlp, mlp.input)
        self.after_mlp = norm(norms.after_mlp, summed=False)

    def __call__(
        self, layer: int, residual: Tensor, delta: Tensor | Terms | None, rotary: Tensor, attend: Any
    ) -> Tensor | Terms:
        """`attend`: what the mixer calls. `delta` [tokens, hidden_size] is the output of the layer before.
        The first norm adds it to `residual`, in place. Returns this layer's output, which is not added yet.
        With several ranks both are terms of sums over ranks, unless the layer normalizes what it adds."""
        x = self.mixer_norm(residual, delta)
        if self.tapped:
            current_step().taps.append(residual.clone())
        mixed = self.mixer(layer, x, rotary, attend)
        if self.after_mixer is not None:
            mixed = self.after_mixer.of_sum(mixed)
        if self.mlp is None:
            return mixed
        x = self.mlp_norm(residual, mixed)
        if self.after_mlp is not None:
            return self.after_mlp.of_sum(self.mlp(x))
        return self.mlp(x, summed=False) if isinstance(self.mlp, MoE) else self.mlp(x)


class Llama:
    attention: ClassVar[type[Any]] = LlamaAttention
    norms: ClassVar[Norms] = Norms()
    mlp_name: ClassVar[str] = "mlp"
    router_name: ClassVar[str] = "gate"
    shared_name: ClassVar[str] = "shared_expert"
    passes_norm: ClassVar[bool] = False
    """Of the layer that predicts a further token: whether the next guess takes the norm of its hidden state,
    and position 0 the embedding of a token."""

    @staticmethod
    def cache_spec(config: ModelConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[CacheSpec, ...]:
        spans = config.spans or (None,) * config.num_layers
        shapes = map(config.of_layer, range(config.num_layers))
        return tuple(
            AttentionCache(shape.num_kv_heads, shape.head_dim, kv_dtype, span)
            for shape, span in zip(shapes, spans, strict=True)
        )

    @classmethod
    def mixer(cls, config: ModelConfig, weights: Weights, layer: int) -> Any:
        """The attention of a layer, or what takes its place."""
        return cls.attention(config.of_layer(layer), weights, f"model.layers.{layer}.self_attn")

    @classmethod
    def mlp(cls, config: ModelConfig, weights: Weights, layer: int) -> MLP | MoE | None:
        """The feed-forward part of a layer. None: it has none."""
        name, experts = f"model.layers.{layer}.{cls.mlp_name}", config.experts
        if layer in config.without_mlp:
            return None
        if experts is None or layer not in experts.layers:
            return MLP(config, weights, name, config.intermediate_size, config.activation)
        return MoE(config, experts, weights, layer, name, cls.router_name, cls.shared_name)

    @classmethod
    def layer(cls, config: ModelConfig, weights: Weights, layer: int) -> LlamaLayer:
        name = f"model.layers.{layer}"
        mixer, mlp = cls.mixer(config, weights, layer), cls.mlp(config, weights, layer)
        return LlamaLayer(config, weights, name, cls.norms, mixer, mlp)

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.embedding = Embedding(config, weights, summed=self.norms.summed)
        if not config.tie_embeddings:  # else the output projection derives from it
            self.embedding = weights.part_built("embedding", self.embedding)
        # It has the size of the embedding, and fits where that was. Layers would leave holes there.
        self.head = weights.part_built("head", OutputProjection(config, weights, self.embedding))
        factors = config.multipliers
        self.embedding_scale = factors.embedding / factors.residual if factors else None
        self.rotary, *self.other_rotary = (self.rotation(shape, weights) for shape in config.shapes)
        other = config.other_attention
        self.other_layers = frozenset(() if other is None else other.layers)
        self.state_layers = frozenset(() if config.state is None else config.state.layers)
        self.layers = [
            weights.part_built(f"layers.{i}", self.layer(config, weights, i))
            for i in range(config.num_layers)
        ]
        self.norm = RMSNorm(
            weights, "model.norm", config.hidden_size, config.rms_norm_eps, summed=self.norms.summed
        )

    @staticmethod
    def rotation(config: ModelConfig, weights: Weights) -> Rotary:
        """Of the layers with this shape."""
        return Rotary(config, weights)

    def rotations(self, positions: Tensor) -> list[Tensor]:
        """As `Rotary.at`: of most layers, and of `other_layers` if there are some."""
        return [rotary.at(positions) for rotary in (self.rotary, *self.other_rotary)]

    def embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `Embedding`."""
        residual, delta = self.embedding(token_ids)
        if self.embedding_scale is not None:
            (residual if delta is None else delta).mul_(self.embedding_scale)
        return residual, delta

    def __call__(self, token_ids: Tensor, positions: Tensor, *callers: Any) -> Tensor:
        """Returns the hidden states [tokens, hidden_size] of a step's tokens. `callers`: what layers attend
        with, and what layers with states call."""
        residual, delta = self.embed(token_ids)
        rotary = self.rotations(positions)
        for i, layer in enumerate(self.layers):
            caller = callers[i in self.state_layers]
            delta = layer(i, residual, delta, rotary[i in self.other_layers], caller)
        return self.norm(residual, delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size]."""
        return self.head(hidden)


class Glm4Attention(LlamaAttention):
    out_bias = False


class Glm4(Llama):
    """GLM-4, dense: with norms after attention and after the MLP too, and no bias of attention's output."""

    attention = Glm4Attention
    norms = Norms(after_mixer="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


class Qwen2Attention(LlamaAttention):
    qkv_bias = True


class Qwen2(Llama):
    """Qwen2 and Qwen2.5, dense: with biases on query, key and value."""

    attention = Qwen2Attention


class GptOssAttention(LlamaAttention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        self.sinks = weights.stack([f"{name}.sinks"], [[self.q_heads]])


class GptOss(Llama):
    """gpt-oss: with sinks in attention, windows in every other layer, and a mixture of experts.

    Router and experts have biases. The activation of the experts is `ClampedSwiGLU`."""

    attention = GptOssAttention
    router_name = "router"


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        q_scale = weights.take(f"{name}.q_norm.weight", (self.head_dim,))
        k_scale = weights.take(f"{name}.k_norm.weight", (self.head_dim,))
        scale = torch.stack([q_scale] * self.q_heads.length + [k_scale] * self.kv_heads.length)
        self.head_norm = HeadNorm(scale, config.rms_norm_eps)


class Qwen3(Llama):
    """Qwen3, dense or with experts: with RMSNorm of each query and key head before rotation."""

    attention = Qwen3Attention


class Gemma3(Llama):
    """Gemma 3, the text model: with RMSNorm of each query and key head, with norms after attention and after
    the MLP too, and with GeGLU."""

    attention = Qwen3Attention
    norms = Norms(
        before_mixer="input_layernorm",
        after_mixer="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
    )

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        assert self.embedding_scale is not None, "the loader sets the multipliers"
        # The model was trained with a factor in its dtype.
        self.embedding_scale = torch.tensor(self.embedding_scale, dtype=weights.dtype).item()


class Olmo2Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        super().__init__(config, weights, name)
        self.eps = config.rms_norm_eps
        self.ranks = weights.ranks
        self.scales = [
            weights.stack([f"{name}.{norm}.weight"], [[heads.of(self.head_dim)]]).view(-1, self.head_dim)
            for norm, heads in (("q_norm", self.q_heads), ("k_norm", self.kv_heads))
        ]

    def __call__(self, layer: int, x: Tensor, rotary: Tensor, attend: Attend) -> Tensor:
        def attend_normalized(layer: int, qkv: Tensor, *others: Any) -> Tensor:
            self._normalize(qkv)
            return attend(layer, qkv, *others)

        return super().__call__(layer, x, rotary, attend_normalized)

    def _normalize(self, qkv: Tensor) -> None:
        """Applies both norms, in place. With several ranks, each has some of the heads that a norm spans."""
        q, k, _ = qkv.split((self.q_heads.length, self.kv_heads.length, self.kv_heads.length), dim=1)
        squares = torch.stack([self._squares(*part) for part in ((q, self.q_heads), (k, self.kv_heads))])
        factors = (self.ranks.all_reduce(squares) + self.eps).rsqrt_()
        for heads, factor, scale in zip((q, k), factors, self.scales, strict=True):
            heads.copy_(heads * factor[:, None, None] * scale)

    def _squares(self, heads: Tensor, part: Shard) -> Tensor:
        """This rank's term of the mean of the squares of all heads [tokens] float32."""
        holders = max(1, self.ranks.size // part.size)  # ranks with the same heads
        return heads.float().square().sum((1, 2)) / (part.size * self.head_dim * holders)


class Olmo2(Llama):
    """OLMo 2: with its norms after attention and the MLP, and RMSNorm of all query and of all key heads."""

    attention = Olmo2Attention
    norms = Norms(
        before_mixer=None,
        after_mixer="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    )


class Llama4(Llama):
    """Llama 4, the text model.

    Most layers rotate queries and keys, and attend within chunks of the context. The others have no positions
    (NoPE, Kazemnejad 2023) and attend to the whole context; their queries grow with their position. Some
    layers or all have a mixture of experts beside an MLP that computes every token."""

    mlp_name = "feed_forward"
    router_name = "router"

    @classmethod
    def layer(cls, config: ModelConfig, weights: Weights, layer: int) -> LlamaLayer:
        built, nope = super().layer(config, weights, layer), config.nope
        assert nope is not None, "the loader sets it for this architecture"
        if nope.head_norm and layer not in nope.layers:
            heads = built.mixer.q_heads.length + built.mixer.kv_heads.length
            scale = torch.ones(heads, config.head_dim, dtype=weights.dtype, device=weights.device)
            # The model normalizes after it rotates, which does not change the norm of a head.
            built.mixer.head_norm = HeadNorm(scale, config.rms_norm_eps)
        return built

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        nope = config.nope
        assert nope is not None, "the loader sets it for this architecture"
        self.nope_layers = nope.layers
        self.num_heads = self.layers[0].mixer.q_heads.length
        ends = torch.arange(1.0, config.max_model_len + 1, device=weights.device)
        self.scales = (ends / nope.floor_scale).floor().log1p() * nope.attention_scale + 1
        """[positions] float32: of the queries of layers without positions (Nakanishi 2025)."""

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        unrotated = self.rotary.at(torch.zeros_like(positions))
        scales = self.scales.index_select(0, positions)[:, None, None]

        def attend_in(layer: int, qkv: Tensor, rotary: Tensor, *others: Any) -> Tensor:
            if layer not in self.nope_layers:
                return attend(layer, qkv, rotary, *others)
            qkv[:, : self.num_heads] *= scales
            return attend(layer, qkv, unrotated, *others)

        return super().__call__(token_ids, positions, attend_in)
