"""Reads `config.json` of Hugging Face transformers, versions 4 and 5."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from baton.engine.loader.hybrid_config import (
    GRANITE,
    HYBRIDS,
    QWEN3_NEXT,
    gated_delta_config,
    mamba2_config,
)
from baton.engine.loader.rope_config import (
    PARTLY_ROTATED,
    local_rope,
    rope_scaling,
    rope_theta,
    ropes,
    rotary_dim,
)
from baton.engine.model_config import (
    ClampedSwiGLU,
    ExpertsConfig,
    ModelConfig,
    Multipliers,
    NoPEConfig,
    Scoring,
    Span,
    YarnScaling,
)
from baton.engine.models import model_class

Integer = Callable[..., int]
Number = Callable[..., float]
"""Reads a key of the configuration: name and default. Without a default, the key is needed."""

COUNTED = ("num_hidden_layers", "num_experts", "num_local_experts")
MOST_COUNTED = 4096
"""Of layers or experts. Lists have an entry for each."""

INTERMEDIATE_SIZE = {
    "Llama4ForCausalLM": "intermediate_size_mlp",
    "Llama4ForConditionalGeneration": "intermediate_size_mlp",
    GRANITE: "shared_intermediate_size",
}
"""The key with the inner size of a dense layer, where it has another name."""

GEMMA3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
"""Of settings that published checkpoints leave out."""

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

COUNTS_PLAIN_LAYERS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


def model_config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any], source: str
) -> ModelConfig:
    """The configuration from parsed `config.json` and `generation_config.json`. Raises `ValueError` naming
    `source` and the key that is wrong or not supported."""
    named = config.get("architectures") or ["(none named)"]
    architecture = str(named[0] if isinstance(named, list) else named)
    model_class(architecture, source)
    config = {**GEMMA3_DEFAULTS, **config} if architecture in GEMMA3 else config
    if isinstance(text := config.get("text_config"), Mapping):  # of a model that also sees images
        config = {**config, **{key: value for key, value in text.items() if value is not None}}
    is_llama4 = architecture.startswith("Llama4")
    is_hybrid = architecture in HYBRIDS
    state_layers = gated_delta_config if architecture == QWEN3_NEXT else mamba2_config
    experts = EXPERTS.get(architecture)

    rope, local = ropes(config)
    for what in _not_supported(config, rope, architecture):
        raise ValueError(f"{source}: {what} is not supported")

    def integer(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ValueError(f"{source}: {name} must be a positive integer, not {value!r}")
        if name in COUNTED and value > MOST_COUNTED:
            raise ValueError(f"{source}: {name} {value} is not supported: it may be {MOST_COUNTED} at most")
        return value

    def number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
        value = values.get(name)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{source}: {name} must be a number above 0, not {value!r}")
        return float(value)

    nope = _nope(config, integer, partial(number, config), source) if is_llama4 else None
    quantization = config.get("quantization_config")
    if architecture == "GptOssForCausalLM" and quantization and quantization.get("quant_method") == "mxfp4":
        quantization = None  # `GptOssCheckpoint` reads these as plain matrices
    num_heads = integer("num_attention_heads")
    hidden_size = integer("hidden_size")
    context = integer("max_position_embeddings", 2048)
    head_dim = integer("head_dim", hidden_size // num_heads)
    rotated = rotary_dim(config, rope, architecture, head_dim, source)
    frequencies = (head_dim if rotated is None else rotated) // 2
    scaling = rope_scaling(rope, partial(number, rope), context, frequencies, source)
    if isinstance(scaling, YarnScaling):  # the context before scaling may be the one that is named
        context = max(context, round(scaling.factor * scaling.original_context))
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(token) is not int for token in eos_ids):
        raise ValueError(f"{source}: eos_token_id must be token ids, not {eos!r}")
    types = [] if is_hybrid else _layer_types(config, integer, architecture, nope, source)
    norm_eps = number(config, "rms_norm_eps", 1e-6)
    shape = ModelConfig(
        architecture=architecture,
        num_layers=integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=integer(INTERMEDIATE_SIZE.get(architecture, "intermediate_size")),
        num_heads=num_heads,
        num_kv_heads=integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=integer("vocab_size"),
        max_model_len=context,
        rms_norm_eps=norm_eps,
        rope_theta=rope_theta(rope, number, number(config, "rope_theta", 10000.0), source),
        rope_scaling=scaling,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        eos_ids=tuple(eos_ids),
        dtype=config.get("dtype") or config.get("torch_dtype"),
        spans=_spans(config, integer, types, context) if types else (),
        experts=experts(config, integer, partial(number, config), source) if experts else None,
        nope=nope,
        state=state_layers(config, integer, norm_eps, source) if is_hybrid else None,
        rotary_dim=rotated,
        multipliers=_multipliers(architecture, hidden_size, partial(number, config)),
        local_rope=local_rope(config, local, types, number, source) if architecture in GEMMA3 else None,
        quantization=quantization,
    )
    shape.check(source)
    return shape


def _layer_types(
    config: Mapping[str, Any], integer: Integer, architecture: str, nope: NoPEConfig | None, source: str
) -> list[str]:
    """The type of attention of each layer, in the words of transformers."""
    layers, types = integer("num_hidden_layers"), config.get("layer_types")
    if types is None and nope is not None:
        types = ["full_attention" if i in nope.layers else "chunked_attention" for i in range(layers)]
    elif types is None and architecture in GEMMA3:
        period = integer("sliding_window_pattern", 6)
        types = ["sliding_attention" if i % period else "full_attention" for i in range(1, layers + 1)]
    elif types is None and architecture != "GptOssForCausalLM":
        # Older Qwen2 and Qwen3 checkpoints say how many layers come before those with a window.
        plain = min(layers, integer("max_window_layers", 28)) if architecture in COUNTS_PLAIN_LAYERS else 0
        types = ["full_attention"] * plain + ["sliding_attention"] * (layers - plain)
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(f"{source}: layer_types must name the type of each of the {layers} layers")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise ValueError(f"{source}: layer type {kind!r} is not supported ({', '.join(LAYER_TYPES)} are)")
    return types


def _spans(
    config: Mapping[str, Any], integer: Integer, types: Sequence[str], context: int
) -> tuple[Span | None, ...]:
    """The span of each layer. Empty if none is shorter than the model's context."""
    window, chunk = None, None
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        window = Span(integer("sliding_window"))
    if config.get("attention_chunk_size"):
        chunk = Span(integer("attention_chunk_size"), chunked=True)
    of_type = dict(zip(LAYER_TYPES, (None, window, chunk), strict=True))
    spans = tuple(of_type[kind] for kind in types)
    return spans if any(span and span.length < context for span in spans) else ()


def _multipliers(architecture: str, hidden_size: int, number: Number) -> Multipliers | None:
    if architecture in GEMMA3:
        attention = number("query_pre_attn_scalar", 256.0) ** -0.5
        return Multipliers(embedding=hidden_size**0.5, residual=1.0, attention=attention, logits=1.0)
    if architecture != GRANITE:
        return None
    return Multipliers(
        embedding=number("embedding_multiplier", 1.0),
        residual=number("residual_multiplier", 1.0),
        attention=number("attention_multiplier", 1.0),
        logits=number("logits_scaling", 1.0),
    )


def _qwen3_experts(config: Mapping[str, Any], integer: Integer, number: Number, source: str) -> ExpertsConfig:
    # transformers 5 writes another name for the number of experts than older versions.
    count = "num_local_experts" if "num_local_experts" in config else "num_experts"
    dense = _integers(config, "mlp_only_layers", source)
    step = integer("decoder_sparse_step", 1)
    layers = [i for i in range(step - 1, integer("num_hidden_layers"), step) if i not in dense]
    scoring = Scoring.NORMALIZED_SOFTMAX if config.get("norm_topk_prob") else Scoring.SOFTMAX
    return _experts(integer, source, layers, scoring, count=count, size="moe_intermediate_size")


def _qwen3_next_experts(
    config: Mapping[str, Any], integer: Integer, number: Number, source: str
) -> ExpertsConfig:
    size = integer("shared_expert_intermediate_size")
    experts = _qwen3_experts(config, integer, number, source)
    return replace(experts, shared_intermediate_size=size, shared_gate=True)


def _llama4_experts(
    config: Mapping[str, Any], integer: Integer, number: Number, source: str
) -> ExpertsConfig:
    step = integer("interleave_moe_layer_step", 1)
    layers: Sequence[int] = range(step - 1, integer("num_hidden_layers"), step)
    if config.get("moe_layers") is not None:
        layers = _integers(config, "moe_layers", source)
    shared = integer("intermediate_size")
    return _experts(integer, source, layers, Scoring.SIGMOID_ON_INPUT, shared_intermediate_size=shared)


def _gpt_oss_experts(
    config: Mapping[str, Any], integer: Integer, number: Number, source: str
) -> ExpertsConfig:
    activation = ClampedSwiGLU(number("swiglu_alpha", 1.702), number("swiglu_limit", 7.0))
    return _experts(integer, source, range(integer("num_hidden_layers")), activation=activation, bias=True)


def _granite_experts(
    config: Mapping[str, Any], integer: Integer, number: Number, source: str
) -> ExpertsConfig | None:
    if config.get("num_local_experts") == 0:
        return None
    layers, shared = range(integer("num_hidden_layers")), integer("shared_intermediate_size")
    return _experts(integer, source, layers, shared_intermediate_size=shared)


EXPERTS: dict[str, Callable[..., ExpertsConfig | None]] = {
    "Qwen3MoeForCausalLM": _qwen3_experts,
    QWEN3_NEXT: _qwen3_next_experts,
    "Llama4ForCausalLM": _llama4_experts,
    "Llama4ForConditionalGeneration": _llama4_experts,
    "GptOssForCausalLM": _gpt_oss_experts,
    GRANITE: _granite_experts,
}
"""Reads the mixtures of experts of these architectures."""


def _experts(
    integer: Integer, source: str, layers: Sequence[int], scoring: Scoring = Scoring.NORMALIZED_SOFTMAX,
    *, count: str = "num_local_experts", size: str = "intermediate_size", **more: Any,
) -> ExpertsConfig:  # fmt: skip
    """`count` and `size`: the names of these settings."""
    num_experts, num_chosen = integer(count), integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise ValueError(f"{source}: num_experts_per_tok {num_chosen} of {num_experts} experts")
    return ExpertsConfig(num_experts, num_chosen, integer(size), scoring, tuple(layers), **more)


def _nope(
    config: Mapping[str, Any],
    integer: Integer,
    number: Number,
    source: str,
) -> NoPEConfig:
    num_layers = integer("num_hidden_layers")
    rotated = _integers(config, "no_rope_layers", source)  # despite its name: 1 for each layer that rotates
    if not rotated:
        interval = integer("no_rope_layer_interval", 4)
        rotated = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(rotated) < num_layers:
        raise ValueError(f"{source}: no_rope_layers has {len(rotated)} of {num_layers} layers")
    tuned = config.get("attn_temperature_tuning", True)
    return NoPEConfig(
        tuple(layer for layer in range(num_layers) if not rotated[layer]),
        floor_scale=number("floor_scale", 8192.0),
        attention_scale=number("attn_scale", 0.1) if tuned else 0.0,
        head_norm=bool(config.get("use_qk_norm", True)),
    )


def _integers(config: Mapping[str, Any], name: str, source: str) -> list[int]:
    """None and no value stand for an empty list."""
    values = config.get(name) or []
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ValueError(f"{source}: {name} must be a list of integers, not {values!r}")
    return values


def _not_supported(config: Mapping[str, Any], rope: Any, architecture: str) -> Iterator[str]:
    if not isinstance(config.get("quantization_config", {}), Mapping | None):
        yield f"quantization_config {config['quantization_config']!r}"
    key, activation = "hidden_act", "silu"
    if architecture in GEMMA3:
        key, activation = "hidden_activation", "gelu_pytorch_tanh"
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if config.get(name):
                yield name
    if config.get(key, activation) != activation:
        yield f"{key} {config[key]!r}"
    if config.get("mlp_bias"):
        yield "mlp_bias"
    if not isinstance(rope, Mapping):
        yield f"rope scaling {rope!r}"
    elif architecture not in PARTLY_ROTATED and any(
        values.get("partial_rotary_factor") not in (None, 1.0) for values in (config, rope)
    ):
        yield "partial_rotary_factor"
