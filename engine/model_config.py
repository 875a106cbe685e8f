"""The shape of a model, the same for all formats of checkpoints."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from baton.vision.images import ImageSettings

log = logging.getLogger(__name__)

MOST_HEAD_DIM = 1024
"""More would be a mistake, for which tables of rotary angles might not fit the memory."""

FULL_STEP = 512
"""Rows with which a product is bound by arithmetic, and not by reading its weights. From there on its time
grows with the rows."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are scaled to a longer context.

    Kinds: "linear" divides all frequencies by `factor`. "llama3" divides the low ones by `factor`, keeps the
    high ones, and interpolates between. "tensor" divides by a tensor of the checkpoint, as GGUF files do for
    llama3.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """How YaRN (Peng 2023) scales rotary frequencies: the low ones are divided by `factor`, the high ones are
    kept, and those between are interpolated."""

    factor: float
    original_context: int
    attention_factor: float
    """Multiplies the rotated queries and keys."""
    beta_fast: float
    """A frequency with at least so many turns over the original context is high."""
    beta_slow: float
    """A frequency with at most so many turns is low."""
    truncate: bool
    """The first and last frequency between high and low are rounded to whole ones."""


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """How LongRoPE (Ding 2024) scales rotary frequencies: each is divided by a factor of its own."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_context: int
    attention_factor: float
    """Multiplies the rotated queries and keys."""

    def factors(self, context: int) -> tuple[float, ...]:
        """Those of a model that is served with this context. A request cannot have its own, as cached keys
        are rotated already."""
        return self.long_factors if context > self.original_context else self.short_factors


@dataclass(frozen=True, slots=True)
class OtherAttention:
    """Layers whose attention has another shape or rotation than that of the other layers: those with windows,
    or those without. None: as the others. Rotary frequencies are not scaled."""

    layers: tuple[int, ...]
    rope_theta: float
    rotary_dim: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None

    def of_rank(self, ranks: int) -> "OtherAttention":
        """The heads of one of `ranks` ranks."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        return replace(
            self, num_heads=heads and heads // ranks, num_kv_heads=kv_heads and max(1, kv_heads // ranks)
        )


class Scoring(Enum):
    """The weights of the experts that a router chooses for a token: those with the largest logits."""

    SOFTMAX = "softmax"
    """The probability of each expert, by a softmax over all experts. It multiplies the expert's output."""
    NORMALIZED_SOFTMAX = "normalized softmax"
    """The same, scaled to a sum of 1."""
    SIGMOID_ON_INPUT = "sigmoid on input"
    """The sigmoid of the expert's logit. It multiplies the expert's input (Llama 4)."""
    SIGMOID = "sigmoid"
    """The same, but it multiplies the expert's output (DeepSeek-V3). The expert has a bias beside it, which
    counts for the choice only."""
    NORMALIZED_SIGMOID = "normalized sigmoid"
    """The same, scaled to a sum of 1."""

    @property
    def is_biased(self) -> bool:
        """Whether experts have a bias that counts for the choice only."""
        return self in (Scoring.SIGMOID, Scoring.NORMALIZED_SIGMOID)


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The activation of gpt-oss: (up + 1) · gate · sigmoid(alpha · gate), where gate is at most `limit`, and
    up at most `limit` in magnitude."""

    alpha: float | None
    """None: up · silu(gate), with the same bounds of up and of silu(gate) (Step-3.7)."""
    limit: float


@dataclass(frozen=True, slots=True)
class SquaredReLU:
    """max(up, 0)², without a gate."""


@dataclass(frozen=True, slots=True)
class GeLU:
    """up · gelu(gate), approximated by tanh (GeGLU)."""


Activation = ClampedSwiGLU | SquaredReLU | GeLU | None
"""Of an MLP or an expert. None: up · silu(gate) (SwiGLU, Shazeer 2020)."""


@dataclass(frozen=True, slots=True)
class Span:
    """Limits the keys that a query sees.

    A sliding window: those of the last `length` positions, its own included. Chunked: the positions are cut
    into chunks of `length`, and a query sees the keys of its own chunk up to its own position."""

    length: int
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixtures of experts of a model: MLPs, of which a router chooses a few for each token."""

    num_experts: int
    num_chosen: int
    """Experts that compute a token."""
    intermediate_size: int
    """Of one expert."""
    scoring: Scoring
    layers: tuple[int, ...]
    """The layers with experts. The others are dense."""
    shared_intermediate_size: int = 0
    """Of the shared expert, which computes every token. 0: there is none."""
    latent_size: int = 0
    """Numbers of a token that the experts compute on: a projection of the hidden state. 0: on that itself."""
    activation: Activation = None
    limits: tuple[tuple[float, float], ...] = ()
    """Of each layer with experts, `ClampedSwiGLU.limit` of its experts and of the shared one. 0: none. Empty:
    no layer has one."""
    bias: bool = False
    """Whether the router and the experts have biases."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a gate."""
    groups: int = 1
    """The experts are in so many groups of equal size."""
    groups_chosen: int = 1
    """A token chooses its experts from so many groups: those with the best expert, or with the best two if
    experts have a bias."""
    scale: float = 1.0
    """Of the weights of the chosen experts."""

    def read_by(self, tokens: int) -> float:
        """The expected number of experts that a step of `tokens` tokens reads in a layer, if each token
        chooses all experts with the same probability."""
        return self.num_experts * (1 - (1 - self.num_chosen / self.num_experts) ** tokens)


@dataclass(frozen=True, slots=True)
class NoPEConfig:
    """Attention of Llama 4, where some layers have no positions (NoPE)."""

    layers: tuple[int, ...]
    """The layers without positions."""
    floor_scale: float
    attention_scale: float
    """A query at position p of these layers is multiplied by 1 + attention_scale · log(1 + ⌊(p + 1) /
    floor_scale⌋)."""
    head_norm: bool
    """The other layers apply RMSNorm, without weights, to each query and key head."""


@dataclass(frozen=True, slots=True)
class StateConfig:
    """The state layers of a model: Mamba-2 (`engine.kernels.state.mamba2`), or the gated delta rule or KDA
    (`engine.kernels.state.gated_delta`), which keep the same states."""

    layers: tuple[int, ...]
    """The others have attention."""
    num_heads: int
    head_dim: int
    state_size: int
    """0: a layer has a short convolution alone."""
    groups: int
    conv_width: int
    conv_bias: bool
    proj_bias: bool
    """Whether the two products have biases."""
    dt_limits: tuple[float, float]
    norm_eps: float
    dtype: str = field(default="float32", repr=False)
    """Of the states of heads: as the checkpoint says, or the user. Inputs of the convolution are of the
    model's dtype. Not in the repr, which the fingerprint covers: workers of one model may have several."""
    says_dtype: bool = field(default=False, compare=False, repr=False)
    """Whether the checkpoint or the user names it."""
    low_rank: int = 0
    """Numbers from which the gates of all heads are made, and what each dimension of a key decays by. 0: they
    are made from the hidden state."""

    def of_rank(self, ranks: int) -> "StateConfig":
        """The heads and groups of one of `ranks` ranks."""
        return replace(self, num_heads=self.num_heads // ranks, groups=max(1, self.groups // ranks))

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: x of all heads, B and C of all groups."""
        return self.inner_size + 2 * self.groups * self.state_size


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """How queries choose the positions that they attend to (DeepSeek-V3.2, 2025): those with the largest
    scores. A layer without an index of its own takes the choice of the layer before it."""

    num_heads: int
    head_dim: int
    """Of a query head, and of the key that all heads share. As many dimensions as in attention are rotated,
    the first ones."""
    most_chosen: int
    """Positions that a query attends to. It chooses them if it sees more."""
    interleaved: bool
    """Whether neighbours are a pair that is rotated, as in attention. If not, the halves are."""
    without: tuple[int, ...] = ()
    """The layers that have no index."""

    def parameters(self, hidden_size: int, query_rank: int) -> int:
        """Number of parameters in the matrices of a layer with an index."""
        return hidden_size * (self.head_dim + self.num_heads) + query_rank * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024). The cache has one vector of a token for all heads: a
    latent of `rank` numbers, and `rope_dim` rotated numbers of the key that all heads share."""

    query_rank: int | None
    """Numbers from which the queries of all heads are made. None: they are made from the hidden state."""
    rank: int
    nope_dim: int
    """Of a query and of a key head, without positions. The `rope_dim` others are rotated, pair by pair."""
    rope_dim: int
    value_dim: int
    """Of a value head."""
    scale: float
    """Of the products of queries and keys."""
    index: IndexConfig | None = None
    """None: a query attends to all positions up to its own."""

    @property
    def size(self) -> int:
        """Numbers of a token in the cache."""
        return self.rank + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Numbers of a key head in memory: padded to a power of two, which kernels take."""
        return 1 << (self.nope_dim + self.rope_dim - 1).bit_length()

    @property
    def min_expanded_queries(self) -> int:
        """The least queries of a chunk for which keys and values of the heads are made of the latents. For
        fewer, making those of a position takes more multiplications than it saves: a query of a head then
        multiplies by a key and a value in place of a latent, which is both, and its rotated part."""
        made = self.nope_dim + self.value_dim
        saved = 2 * self.rank - made
        return made * self.rank // saved + 1 if saved > 0 else 1

    def parameters(self, hidden_size: int, heads: int) -> int:
        """Number of parameters in the matrices of a layer."""
        query = heads * (self.nope_dim + self.rope_dim)
        made_from = hidden_size if self.query_rank is None else self.query_rank
        queries = query * made_from + hidden_size * (self.query_rank or 0)
        latents = hidden_size * (self.rank + self.rope_dim)
        up = heads * self.rank * (self.nope_dim + self.value_dim)
        return queries + latents + up + hidden_size * heads * self.value_dim


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """What Gemma 4 has beside Gemma 3."""

    k_is_v: bool
    """In `other_attention`, values are the keys, before these are normalized and rotated."""
    sources: tuple[int, ...]
    """Of each layer, the layer whose KV it reads."""
    double_wide: bool
    """Whether layers that read the KV of another one have MLPs of twice the size."""
    layer_input: int
    """Numbers that each layer gets of a token. 0: none."""
    layer_vocab: int
    """Tokens in the table of these."""
    softcap: float | None
    """The bound of logits. None: there is none."""
    pad_id: int
    """The token from which layers get their input at the positions of an image."""


@dataclass(frozen=True, slots=True)
class MiMoConfig:
    """What MiMo-V2-Flash has beside a mixture of experts with windows."""

    value_dim: int
    """Numbers of a value head. Query and key heads have `ModelConfig.head_dim`."""
    value_scale: float
    """Values are multiplied by it."""


@dataclass(frozen=True, slots=True)
class ModuleAttention:
    """How transformers' modules call attention in a pass."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """In the cache: the largest of query, key and value heads, padded to a power of two."""
    span: Span | None
    softcap: float | None
    """The bound of the products of queries and keys. None: there is none."""
    sinks: bool
    chosen: bool = False
    """Whether a query sees only the positions that an index chose for it."""


@dataclass(frozen=True, slots=True)
class ModuleIndex:
    """One of transformers' modules that chooses positions by keys of its own, one for each token."""

    module: str
    """The name of the module."""
    head_dim: int


@dataclass(frozen=True, slots=True)
class ModuleState:
    """A tensor that one of transformers' modules keeps of a request."""

    name: str
    """`conv_states` or `recurrent_states`, as transformers' cache has them."""
    index: int
    """Among those of this name in a layer of transformers' cache."""
    shape: tuple[int, ...]
    float32: bool
    """Whether it is in float32 whatever the model's dtype is."""


@dataclass(frozen=True, slots=True)
class ModuleStates:
    """What one of transformers' modules keeps of a request."""

    module: str
    """The name of the module."""
    layer: int
    """Of transformers' cache."""
    states: tuple[ModuleState, ...]
    goes_on: bool = True
    """Whether a pass of several tokens begins with the states. If not, only that of one token does."""


@dataclass(frozen=True, slots=True)
class ModulesConfig:
    """A model that transformers' modules compute (`engine.models.transformers`)."""

    settings: str
    """JSON of `config.json`, with the defaults of transformers."""
    layers: tuple[ModuleAttention | ModuleStates | ModuleIndex, ...]
    """Of each call of attention in a pass, and of each module with states or an index, which has a layer of
    the cache."""
    parameters: int
    linear_parameters: int
    """Those of linear modules but the output projection. Only these have the format of the weights: all
    others, such as experts, are kept in the model's dtype."""
    read: frozenset[str] = field(default=frozenset(), repr=False)
    """The linear modules and norms whose weights are read without a call."""

    @property
    def attention(self) -> dict[int, ModuleAttention]:
        """Of the layers that attend, by their number."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, ModuleAttention)}

    @property
    def states(self) -> dict[int, ModuleStates]:
        """Of the layers with states, by their number."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, ModuleStates)}

    @property
    def indexes(self) -> dict[int, ModuleIndex]:
        """Of the layers with an index, by their number."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, ModuleIndex)}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """How a model takes images."""

    settings: ImageSettings
    tower: str
    """The settings of the encoder, as JSON: `vision_config` of the checkpoint, and what it lacks."""
    sections: tuple[int, int, int] | None = None
    """Of the frequencies of a head: how many turn by the position in time, from the top and from the left.
    They take turns, and the rest turns by the position in time (interleaved M-RoPE, Qwen3-VL). None: tokens
    of an image have positions as those of text."""
    deepstack: int = 0
    """Layers of the model, the first ones, behind which features of an image are added (DeepStack, Meng
    2024)."""
    whole_layers: tuple[int, ...] = ()
    """Layers in which a token of an image sees all tokens of it, also those behind its own (Gemma 3). So no
    chunk of a prompt may end inside an image. Empty: there are none."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of Granite and Gemma models."""

    embedding: float
    residual: float
    """Of what a layer adds to the residual stream."""
    attention: float
    """Of the products of queries and keys. The other models have 1 / √head_dim."""
    logits: float
    """The logits are divided by it."""


def known_ids(end_tokens: Sequence[int], vocab_size: int, source: str) -> tuple[int, ...]:
    """The end tokens that a model can sample. Some fine-tunes name one that their embedding lacks."""
    if unknown := [token for token in end_tokens if not 0 <= token < vocab_size]:
        log.warning("%s: no output ends with %s, beyond the vocabulary of %d", source, unknown, vocab_size)
    return tuple(token for token in end_tokens if token not in unknown)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that a model class and the sizing of memory need to know about a model. Its fingerprint
    covers all fields that are in the repr."""

    architecture: str
    """Name of the model class in Hugging Face transformers, a key of `engine.loader.families.FAMILIES`."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Most tokens of prompt and output together."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | YarnScaling | LongRopeScaling | None
    tie_embeddings: bool
    """The output projection is the input embedding."""
    attention_bias: bool
    """Whether all four attention projections have biases. Qwen2, which always has three, ignores it. GLM-4
    has three with it."""
    eos_ids: tuple[int, ...]
    dtype: str | None
    """Data type in the checkpoint's configuration. None: it names none."""
    spans: tuple[Span | None, ...] = ()
    """The span of each layer (None: all keys up to the query's own). Empty: no layer has a span."""
    experts: ExpertsConfig | None = None
    """None: a dense model."""
    nope: NoPEConfig | None = None
    """None: all layers have positions."""
    state: StateConfig | None = None
    """None: all layers have attention."""
    rotary_dim: int | None = None
    """Dimensions of a head that are rotated. None: all; 0: attention has no positions (NoPE)."""
    multipliers: Multipliers | None = None
    """None: a model without them."""
    other_attention: OtherAttention | None = None
    """None: all layers that attend have the same heads and frequencies."""
    head_gates: bool = False
    """Whether attention has a gate for each query head (Step-3.7)."""
    latent: LatentConfig | None = None
    """None: each KV head has its own keys and values. With latents, the model has one KV head, and `head_dim`
    is the size of what a token has in the cache."""
    gemma: GemmaConfig | None = None
    """None: a model of another family."""
    mimo: MiMoConfig | None = None
    """None: a model of another family."""
    vision: VisionConfig | None = None
    """None: the model takes no images."""
    without_mlp: tuple[int, ...] = ()
    """Layers with neither an MLP nor experts."""
    activation: Activation = None
    """Of MLPs beside experts."""
    modules: ModulesConfig | None = None
    """None: a class of Baton computes the model. With modules, `num_layers` counts calls of attention."""
    further_layers: int = field(default=0, repr=False)
    """Layers of the checkpoint behind the others, which predict further tokens. They are not loaded."""
    quantization: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    """`quantization_config` of the checkpoint. None: its matrices are plain. Not in the repr, which the
    fingerprint covers: the format that `engine.loader.formats` chooses is in the fingerprint itself."""

    @property
    def kernel_head_dim(self) -> int:
        """The size of the heads that the kernels of a GPU attend to. Those that are made of latents, and
        those with values of another size, are padded to a power of two."""
        latent = self.latent
        if self.modules is not None:
            return max(layer.head_dim for layer in self.modules.attention.values())
        if self.mimo is not None:
            return 1 << (self.head_dim - 1).bit_length()
        if latent is None:  # of two sizes, the one that they refuse, if any
            sizes = [shape.head_dim for shape in self.shapes]
            return max(sizes, key=lambda size: (size.bit_count() > 1, size))
        if any(size.bit_count() > 1 for size in (latent.rank, latent.rope_dim, latent.value_dim)):
            return self.head_dim  # which they refuse
        return latent.key_dim

    def of_layer(self, layer: int) -> "ModelConfig":
        """The shape with the heads and the rotation of this layer."""
        other = self.other_attention
        if other is None or layer not in other.layers:
            return self
        names = "num_heads", "num_kv_heads", "head_dim", "rotary_dim"
        own: dict[str, Any] = {name: x for name in names if (x := getattr(other, name)) is not None}
        return replace(self, rope_theta=other.rope_theta, rope_scaling=None, **own)

    @property
    def shapes(self) -> Sequence["ModelConfig"]:
        """As `of_layer`: of most layers, and of `other_attention` if it has layers."""
        other = self.other_attention
        return [self] if other is None or not other.layers else [self, self.of_layer(other.layers[0])]

    def heads(self, layer: int) -> int:
        """Query heads of a layer."""
        if self.modules is not None:
            return self.modules.attention[layer].num_heads
        return self.of_layer(layer).num_heads

    def check(self, source: str) -> None:
        """Raises `ValueError` naming `source`, the checkpoint, if this shape is not supported."""
        if self.num_heads % self.num_kv_heads or self.head_dim % 2 or self.head_dim > MOST_HEAD_DIM:
            raise ValueError(
                f"{source}: {self.num_heads} heads of {self.head_dim} on {self.num_kv_heads} KV heads is not "
                "supported"
            )

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks over which the heads of attention and of state layers divide, ascending."""
        state = self.state
        heads = [(shape.num_heads, shape.num_kv_heads) for shape in self.shapes]
        heads += [] if state is None else [(state.num_heads, state.groups)]

        def divides(ranks: int) -> bool:
            return all(
                of_all % ranks == 0 and (shared % ranks == 0 or ranks % shared == 0)
                for of_all, shared in heads
            )

        return tuple(filter(divides, range(1, self.num_heads + 1)))

    def of_rank(self, ranks: int) -> "ModelConfig":
        """The shape that one of `ranks` ranks computes with: its heads of attention and of state layers.
        Fewer KV heads than ranks are held by several ranks each, and so are fewer groups of a state layer.
        Raises `ValueError` if the heads do not divide so."""
        state, other = self.state, self.other_attention
        if self.modules is not None and ranks > 1:
            raise ValueError(
                f"--tensor-parallel-size {ranks}: modules of transformers compute {self.architecture}, on "
                "one device; leave it out"
            )
        if ranks not in (sizes := self.group_sizes):
            possible = ", ".join(map(str, sizes))
            states = "" if state is None else f", and {state.num_heads} state heads in {state.groups} groups"
            raise ValueError(
                f"--tensor-parallel-size {ranks}: the model has {self.num_heads} query heads and "
                f"{self.num_kv_heads} KV heads{states}; choose one of {possible}"
            )
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=max(1, self.num_kv_heads // ranks),
            state=state and state.of_rank(ranks),
            other_attention=other and other.of_rank(ranks),
        )

    def check_step(self, tokens: int, requests: int) -> None:
        """Raises `ValueError` if a step of so many tokens and requests has no room for an image that no chunk
        may cut."""
        if self.vision is None or not self.vision.whole_layers:
            return
        needed = requests - 1 + self.vision.settings.most_tokens
        if tokens < needed:
            raise ValueError(
                f"--max-num-batched-tokens {tokens}: a step must have room for a whole image of "
                f"{self.vision.settings.most_tokens} tokens, beside the other {requests - 1} requests; "
                f"raise it to at least {needed}, or lower --max-num-seqs"
            )

    def check_expert_parallel(self, ranks: int) -> None:
        """Raises `ValueError` if `ranks` ranks cannot have as many whole experts each."""
        if self.experts is None:
            raise ValueError("--enable-expert-parallel: the model has no experts; leave it out")
        if self.experts.num_experts % ranks:
            raise ValueError(
                f"--tensor-parallel-size {ranks}: with --enable-expert-parallel it must divide the model's "
                f"{self.experts.num_experts} experts"
            )

    @property
    def num_parameters(self) -> int:
        """Number of parameters in the matrices, which are nearly all."""
        return round(self._parameters(self.experts.num_experts if self.experts else 0))

    def parameters_read(self, tokens: int) -> float:
        """As `num_parameters`, but only with the experts that a step of `tokens` tokens is expected to read,
        and without the table of the layers. With one token: the *active* parameters."""
        read = self._parameters(self.experts.read_by(tokens) if self.experts else 0)
        return read - self.layer_table_parameters

    @property
    def full_step(self) -> int:
        """Tokens of a step from which on it gains nothing from more: each expert has `FULL_STEP` of them."""
        experts = self.experts
        return FULL_STEP * experts.num_experts // experts.num_chosen if experts else FULL_STEP

    @property
    def attention_doubles_at(self) -> int:
        """The position of a prompt whose token costs twice as much as the first one, because it attends to
        all positions before it. From the multiplications of matrices and of attention."""
        sizes = 2 * self.head_dim
        if self.mimo is not None:
            sizes = self.head_dim + self.mimo.value_dim
        if self.latent is not None:
            sizes = self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim
        layers = self.num_layers - sum(span is not None for span in self.spans)
        layers -= len(self.state.layers) if self.state is not None else 0
        matrices = self.parameters_read(1) - self.embedding_parameters
        return round(matrices / (self.num_heads * sizes * max(1, layers)))

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the input embedding and the output projection."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)

    @property
    def layer_table_parameters(self) -> int:
        """Number of parameters of the table from which each layer gets an input of a token. A step reads one
        row of it for each token."""
        gemma = self.gemma
        return 0 if gemma is None else self.num_layers * gemma.layer_input * gemma.layer_vocab

    def weight_bytes(self, embedding: float, output: float, matrix: float) -> int:
        """Bytes of all weights, from the bytes of one parameter: of the input embedding and the table of the
        layers, of an output projection that is not tied to it, and of the other matrices."""
        one, of_layers = self.vocab_size * self.hidden_size, self.layer_table_parameters
        tables = one * (embedding if self.tie_embeddings else embedding + output) + of_layers * embedding
        return round(tables + self.matrix_parameters * matrix)

    @property
    def matrix_parameters(self) -> int:
        """Number of parameters of the matrices of `weight_bytes` that are no tables."""
        return self.num_parameters - self.embedding_parameters - self.layer_table_parameters

    @property
    def expert_parameters(self) -> int:
        """Those of routed experts. 0 also for modules of transformers."""
        return self.num_parameters - round(self._parameters(0))

    @property
    def plain_parameters(self) -> int:
        """Those of `matrix_parameters` that are kept in the model's dtype in any format of weights."""
        return 0 if self.modules is None else self.matrix_parameters - self.modules.linear_parameters

    def _parameters(self, experts: float) -> float:
        """Number of parameters with this many experts in each layer that has experts."""
        if self.modules is not None:
            return self.modules.parameters
        dense, sparse = self.num_layers - len(self.without_mlp), 0.0
        matrices = 2 if isinstance(self.activation, SquaredReLU) else 3
        if self.experts is not None:
            dense -= len(self.experts.layers)
            router = self.hidden_size * self.experts.num_experts
            inner, size = self.experts.intermediate_size * experts, self.experts.latent_size
            inner *= (size or self.hidden_size) / self.hidden_size
            inner += self.experts.shared_intermediate_size + 2 * size / matrices
            sparse = len(self.experts.layers) * (router + matrices * self.hidden_size * inner)
        mlp = matrices * self.hidden_size * self.intermediate_size
        with_attention = self.num_layers
        states = 0
        if (state := self.state) is not None:
            with_attention -= len(state.layers)
            projected = state.inner_size + state.channels + state.num_heads
            projected += 2 * state.low_rank if state.low_rank else state.inner_size
            projected += 0 if state.state_size else state.inner_size
            made = state.low_rank * state.num_heads * (state.head_dim + state.state_size)
            states = len(state.layers) * (self.hidden_size * projected + made)
        if self.latent is not None and (index := self.latent.index) is not None:
            indexed = self.num_layers - len(index.without)
            states += indexed * index.parameters(self.hidden_size, self.latent.query_rank or 0)
        attention = [self.of_layer(layer)._attention_parameters for layer in range(with_attention)]
        if (gemma := self.gemma) is not None:
            states += self.layer_table_parameters + self.num_layers * gemma.layer_input * 3 * self.hidden_size
            for layer, source in enumerate(gemma.sources):
                shape, shared = self.of_layer(layer), source != layer
                lacking = 2 if shared else 1 if shape is not self and gemma.k_is_v else 0
                states -= self.hidden_size * shape.head_dim * shape.num_kv_heads * lacking
                states += mlp if shared and gemma.double_wide else 0
        return sum(attention) + states + dense * mlp + sparse + self.embedding_parameters

    @property
    def _attention_parameters(self) -> int:
        """Of a layer of this shape."""
        if self.latent is not None:
            return self.latent.parameters(self.hidden_size, self.num_heads)
        sizes = self.head_dim + (self.head_dim if self.mimo is None else self.mimo.value_dim)
        gates = self.num_heads if self.head_gates else 0
        return self.hidden_size * (sizes * (self.num_heads + self.num_kv_heads) + gates)
