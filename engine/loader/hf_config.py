"""Reads `config.json` of Hugging Face transformers, versions 4 and 5."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from baton.engine.loader.hybrid_config import GRANITE, QWEN3_NEXT, gated_delta_config, mamba2_config
from baton.engine.loader.latent_config import FIRST_DENSE, latent_config, latent_experts, not_supported
from baton.engine.loader.rope_config import (
    PARTLY_ROTATED,
    local_rope,
    rope_scaling,
    rope_theta,
    ropes,
    rotary_dim,
)
from baton.engine.loader.settings import Settings
from baton.engine.model_config import (
    ClampedSwiGLU,
    ExpertsConfig,
    ModelConfig,
    Multipliers,
    NoPEConfig,
    Scoring,
    Span,
    YarnScaling,
    known_ids,
)
from baton.engine.models import model_class

LLAMA4 = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")

INTERMEDIATE_SIZE = {**dict.fromkeys(LLAMA4, "intermediate_size_mlp"), GRANITE: "shared_intermediate_size"}
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

GPT_OSS = "GptOssForCausalLM"

STATES = {"BambaForCausalLM": mamba2_config, GRANITE: mamba2_config, QWEN3_NEXT: gated_delta_config}
"""What reads the state layers of these architectures."""

LATENT = tuple(FIRST_DENSE)
"""Architectures with multi-head latent attention."""

FURTHER = "num_nextn_predict_layers"

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

COUNTS_PLAIN_LAYERS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


def model_config_from_hf(
    config: Mapping[str, Any], generation: Mapping[str, Any], source: str
) -> ModelConfig:
    """The configuration from parsed `config.json` and `generation_config.json`. Raises `ValueError` naming
    `source` and the key that is wrong or not supported."""
    architecture, settings = _settings_of_text(config, source)
    rotation, local = ropes(settings)
    for what in _not_supported(settings, rotation, architecture):
        raise ValueError(f"{source}: {what} is not supported")
    rope = Settings(rotation, source)

    num_heads, hidden_size = settings.integer("num_attention_heads"), settings.integer("hidden_size")
    latent = latent_config(settings, rope) if architecture in LATENT else None
    head_dim = settings.integer("head_dim", hidden_size // num_heads) if latent is None else latent.size
    context = settings.integer("max_position_embeddings", 2048)
    rotated = rotary_dim(settings, rope, architecture, head_dim)
    turned = latent.rope_dim if latent else head_dim if rotated is None else rotated
    scaling = rope_scaling(rope, context, turned // 2)
    if isinstance(scaling, YarnScaling):  # the context before scaling may be the one that is named
        context = max(context, round(scaling.factor * scaling.original_context))
    norm_eps = settings.number("rms_norm_eps", 1e-6)
    nope = _nope(settings) if architecture in LLAMA4 else None
    types = [] if architecture in STATES else _layer_types(settings, architecture, nope)
    shape = ModelConfig(
        architecture=architecture,
        num_layers=settings.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=settings.integer(INTERMEDIATE_SIZE.get(architecture, "intermediate_size")),
        num_heads=num_heads,
        num_kv_heads=1 if latent else settings.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=settings.integer("vocab_size"),
        max_model_len=context,
        rms_norm_eps=norm_eps,
        rope_theta=rope_theta(rope, settings.number("rope_theta", 10000.0)),
        rope_scaling=scaling,
        tie_embeddings=bool(settings.get("tie_word_embeddings", False)),
        attention_bias=bool(settings.get("attention_bias", False)),
        eos_ids=_eos_ids(settings, generation),
        dtype=settings.get("dtype") or settings.get("torch_dtype"),
        spans=_spans(settings, types, context) if types else (),
        experts=EXPERTS[architecture](settings) if architecture in EXPERTS else None,
        nope=nope,
        state=STATES[architecture](settings, norm_eps) if architecture in STATES else None,
        rotary_dim=rotated,
        multipliers=_multipliers(settings, architecture, hidden_size),
        local_rope=local_rope(settings, local, types) if architecture in GEMMA3 else None,
        latent=latent,
        quantization=settings.get("quantization_config"),
        further_layers=settings.integer(FURTHER) if latent and settings.get(FURTHER) else 0,
    )
    shape.check(source)
    return shape


def _settings_of_text(config: Mapping[str, Any], source: str) -> tuple[str, Settings]:
    """The architecture, and the settings of the text model, also if the model sees images, too."""
    named = config.get("architectures") or ["(none named)"]
    architecture = str(named[0] if isinstance(named, list) else named)
    model_class(architecture, source)
    config = {**GEMMA3_DEFAULTS, **config} if architecture in GEMMA3 else config
    if isinstance(text := config.get("text_config"), Mapping):
        config = {**config, **{key: value for key, value in text.items() if value is not None}}
    return architecture, Settings(config, source)


def _eos_ids(settings: Settings, generation: Mapping[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", settings.get("eos_token_id"))
    eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(token) is not int for token in eos_ids):
        raise ValueError(f"{settings.source}: eos_token_id must be token ids, not {eos!r}")
    return known_ids(eos_ids, settings.integer("vocab_size"), settings.source)


def _layer_types(settings: Settings, architecture: str, nope: NoPEConfig | None) -> list[str]:
    """The type of attention of each layer, in the words of transformers."""
    integer, source = settings.integer, settings.source
    layers, types = integer("num_hidden_layers"), settings.get("layer_types")
    if types is None and nope is not None:
        types = ["full_attention" if i in nope.layers else "chunked_attention" for i in range(layers)]
    elif types is None and architecture in GEMMA3:
        period = integer("sliding_window_pattern", 6)
        types = ["sliding_attention" if i % period else "full_attention" for i in range(1, layers + 1)]
    elif types is None and architecture != GPT_OSS:
        # Older Qwen2 and Qwen3 checkpoints say how many layers come before those with a window.
        plain = min(layers, integer("max_window_layers", 28)) if architecture in COUNTS_PLAIN_LAYERS else 0
        types = ["full_attention"] * plain + ["sliding_attention"] * (layers - plain)
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(f"{source}: layer_types must name the type of each of the {layers} layers")
    for kind in types:
        if kind not in LAYER_TYPES:
            raise ValueError(f"{source}: layer type {kind!r} is not supported ({', '.join(LAYER_TYPES)} are)")
    return types


def _spans(settings: Settings, types: Sequence[str], context: int) -> tuple[Span | None, ...]:
    """The span of each layer. Empty if none is shorter than the model's context."""
    window, chunk = None, None
    if settings.get("sliding_window") and settings.get("use_sliding_window", True):
        window = Span(settings.integer("sliding_window"))
    if settings.get("attention_chunk_size"):
        chunk = Span(settings.integer("attention_chunk_size"), chunked=True)
    of_type = dict(zip(LAYER_TYPES, (None, window, chunk), strict=True))
    spans = tuple(of_type[kind] for kind in types)
    return spans if any(span and span.length < context for span in spans) else ()


def _multipliers(settings: Settings, architecture: str, hidden_size: int) -> Multipliers | None:
    number = settings.number
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


def _qwen3_experts(settings: Settings) -> ExpertsConfig:
    # transformers 5 writes another name for the number of experts than older versions.
    count = "num_local_experts" if "num_local_experts" in settings.values else "num_experts"
    dense = settings.integers("mlp_only_layers")
    step = settings.integer("decoder_sparse_step", 1)
    layers = [i for i in range(step - 1, settings.integer("num_hidden_layers"), step) if i not in dense]
    scoring = Scoring.NORMALIZED_SOFTMAX if settings.get("norm_topk_prob") else Scoring.SOFTMAX
    return _experts(settings, layers, scoring, count=count, size="moe_intermediate_size")


def _qwen3_next_experts(settings: Settings) -> ExpertsConfig:
    size = settings.integer("shared_expert_intermediate_size")
    experts = _qwen3_experts(settings)
    return replace(experts, shared_intermediate_size=size, shared_gate=True)


def _llama4_experts(settings: Settings) -> ExpertsConfig:
    step = settings.integer("interleave_moe_layer_step", 1)
    layers: Sequence[int] = range(step - 1, settings.integer("num_hidden_layers"), step)
    if settings.get("moe_layers") is not None:
        layers = settings.integers("moe_layers")
    shared = settings.integer("intermediate_size")
    return _experts(settings, layers, Scoring.SIGMOID_ON_INPUT, shared_intermediate_size=shared)


def _gpt_oss_experts(settings: Settings) -> ExpertsConfig:
    activation = ClampedSwiGLU(settings.number("swiglu_alpha", 1.702), settings.number("swiglu_limit", 7.0))
    return _experts(settings, range(settings.integer("num_hidden_layers")), activation=activation, bias=True)


def _granite_experts(settings: Settings) -> ExpertsConfig | None:
    if settings.get("num_local_experts") == 0:
        return None
    shared = settings.integer("shared_intermediate_size")
    return _experts(settings, range(settings.integer("num_hidden_layers")), shared_intermediate_size=shared)


EXPERTS: dict[str, Callable[[Settings], ExpertsConfig | None]] = {
    "Qwen3MoeForCausalLM": _qwen3_experts,
    QWEN3_NEXT: _qwen3_next_experts,
    **dict.fromkeys(LLAMA4, _llama4_experts),
    GPT_OSS: _gpt_oss_experts,
    GRANITE: _granite_experts,
    **{name: partial(latent_experts, architecture=name) for name in LATENT},
}
"""Reads the mixtures of experts of these architectures."""


def _experts(
    settings: Settings, layers: Sequence[int], scoring: Scoring = Scoring.NORMALIZED_SOFTMAX,
    *, count: str = "num_local_experts", size: str = "intermediate_size", **more: Any,
) -> ExpertsConfig:  # fmt: skip
    """`count` and `size`: the names of these settings."""
    num_experts, num_chosen = settings.integer(count), settings.integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise ValueError(f"{settings.source}: num_experts_per_tok {num_chosen} of {num_experts} experts")
    return ExpertsConfig(num_experts, num_chosen, settings.integer(size), scoring, tuple(layers), **more)


def _nope(settings: Settings) -> NoPEConfig:
    integer, number = settings.integer, settings.number
    num_layers = integer("num_hidden_layers")
    rotated = settings.integers("no_rope_layers")  # despite its name: 1 for each layer that rotates
    if not rotated:
        interval = integer("no_rope_layer_interval", 4)
        rotated = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if len(rotated) < num_layers:
        raise ValueError(f"{settings.source}: no_rope_layers has {len(rotated)} of {num_layers} layers")
    tuned = settings.get("attn_temperature_tuning", True)
    return NoPEConfig(
        tuple(layer for layer in range(num_layers) if not rotated[layer]),
        floor_scale=number("floor_scale", 8192.0),
        attention_scale=number("attn_scale", 0.1) if tuned else 0.0,
        head_norm=bool(settings.get("use_qk_norm", True)),
    )


def _not_supported(settings: Settings, rope: Any, architecture: str) -> Iterator[str]:
    """`rope`: the settings of rotation, if they are a mapping."""
    if not isinstance(settings.get("quantization_config", {}), Mapping | None):
        yield f"quantization_config {settings.get('quantization_config')!r}"
    key, activation = "hidden_act", "silu"
    if architecture in GEMMA3:
        key, activation = "hidden_activation", "gelu_pytorch_tanh"
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if settings.get(name):
                yield name
    if settings.get(key, activation) != activation:
        yield f"{key} {settings.get(key)!r}"
    if architecture in LATENT:
        yield from not_supported(settings, architecture)
    if settings.get("mlp_bias"):
        yield "mlp_bias"
    if not isinstance(rope, Mapping):
        yield f"rope scaling {rope!r}"
    elif architecture not in PARTLY_ROTATED and any(
        values.get("partial_rotary_factor") not in (None, 1.0) for values in (settings, rope)
    ):
        yield "partial_rotary_factor"
