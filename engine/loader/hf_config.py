"""Reads `config.json` of Hugging Face transformers, versions 4 and 5."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.engine.loader.families import FAMILIES, family_of, qwen3_vl
from baton.engine.loader.families.family import Family
from baton.engine.loader.hybrid_config import with_dtype
from baton.engine.loader.rope_config import one_rope, rope_scaling, rope_theta, ropes, rotary_dim
from baton.engine.loader.settings import Settings, read_json
from baton.engine.model_config import (
    ModelConfig,
    Multipliers,
    NoPEConfig,
    Span,
    VisionConfig,
    YarnScaling,
    known_ids,
)
from baton.vision.images import image_settings, processor_settings

log = logging.getLogger(__name__)

LLAMA4 = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
GRANITE = "GraniteMoeHybridForCausalLM"

INTERMEDIATE_SIZE = {**dict.fromkeys(LLAMA4, "intermediate_size_mlp"), GRANITE: "shared_intermediate_size"}
"""The key with the inner size of a dense layer, where it has another name."""

GEMMA3 = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

GPT_OSS = "GptOssForCausalLM"
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

COUNTS_PLAIN_LAYERS = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


def model_config_from_hf(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    source: str,
    processor: Mapping[str, Any] = NO_SETTINGS,
    *,
    images: bool = True,
) -> ModelConfig:
    """The configuration from parsed `config.json`, `generation_config.json` and the settings of the processor
    of images. `images`: whether the model takes some, if it can. Raises `ValueError` naming `source` and the
    key that is wrong or not supported."""
    architecture, settings = Settings(config, source).architecture, _settings_of_text(config, source)
    family = family_of(architecture, source)
    rotation, _ = ropes(settings)
    for setting in _not_supported(settings, rotation, architecture, family):
        raise ValueError(f"{source}: {setting} is not supported")
    rope = Settings(rotation, source)

    num_heads, hidden_size = settings.integer("num_attention_heads"), settings.integer("hidden_size")
    latent = family.latent(settings, rope) if family.latent else None
    head_dim = settings.integer("head_dim", hidden_size // num_heads) if latent is None else latent.size
    context = settings.integer("max_position_embeddings", 2048)
    rotated = None
    if family.without_positions(settings):
        rotated = 0
    elif family.rotated is not None:
        rotated = rotary_dim(settings, rope, family.rotated, head_dim)
    turned = latent.rope_dim if latent else head_dim if rotated is None else rotated
    scaling = rope_scaling(rope, context, turned // 2)
    if isinstance(scaling, YarnScaling):  # the context before scaling may be the one that is named
        context = max(context, round(scaling.factor * scaling.original_context))
    norm_eps = settings.number("rms_norm_eps", 1e-6)
    nope = _nope(settings) if architecture in LLAMA4 else None
    types = [] if family.state else _layer_types(settings, architecture, nope)
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
        experts=family.experts(settings) if family.experts else None,
        nope=nope,
        state=with_dtype(family.state(settings, norm_eps), settings) if family.state else None,
        rotary_dim=rotated,
        multipliers=_multipliers(settings, architecture, hidden_size, family),
        other_attention=family.other_attention(settings, types) if family.other_attention else None,
        head_gates=family.head_gates,
        latent=latent,
        quantization=settings.get("quantization_config") or None,
        gemma=family.gemma(settings) if family.gemma else None,
        mimo=family.mimo(settings) if family.mimo else None,
        vision=_vision(settings, rope, family, processor) if images else None,
        without_mlp=tuple(settings.integers("layers_without_mlp")),
        activation=family.activation,
        further_layers=settings.integer(family.further) if settings.get(family.further) else 0,
    )
    shape.check(source)
    return shape


def read_config(directory: Path, *, images: bool = True, model_impl: str = "auto") -> ModelConfig:
    """Reads a model's configuration. `images`: as in `model_config_from_hf`. `model_impl`: as in
    `EngineConfig`. Raises `ValueError` naming the file and the key that is wrong."""
    path = directory / "config.json"
    if not path.is_file():
        models = sorted([*directory.glob("*.gguf"), *directory.glob("snapshots/*/")])
        remedy = f"; name {models[0]}" if models else ""
        raise ValueError(f"{directory}: no config.json in there, so it is not a model directory{remedy}")

    read = reader_of(directory)
    generation, values = read("generation_config.json"), read_json(path)
    architecture = Settings(values, str(path)).architecture
    if model_impl == "transformers" or (model_impl == "auto" and architecture not in FAMILIES):
        from baton.engine.loader.modules import has_modules, modules_config  # late: others do without

        if model_impl == "auto" and not has_modules(values, str(path)):
            family_of(architecture, str(path))
        of_text = {**values, **_text_config(values, str(path))}
        eos_ids = _eos_ids(Settings(of_text, str(path)), generation)
        log.info("%s: modules of transformers compute %s", directory, architecture)
        vision = vision_of(values, processor_settings(read), str(path)) if images else None
        return replace(modules_config(values, eos_ids, str(path)), vision=vision)
    return model_config_from_hf(values, generation, str(path), processor_settings(read), images=images)


def vision_of(config: Mapping[str, Any], processor: Mapping[str, Any], source: str) -> VisionConfig | None:
    """How a model takes images whose text modules of transformers compute. Raises as
    `model_config_from_hf`."""
    architecture = Settings(config, source).architecture
    if (family := FAMILIES.get(architecture)) is not None:
        settings = _settings_of_text(config, source)
        return _vision(settings, Settings(ropes(settings)[0], source), family, processor)
    images = image_settings(config, processor, source)
    if images is None:
        return None
    text, tower = _text_config(config, source), {"model_type": config.get("model_type")}
    settings = Settings({**config, **text, "vision_config": tower | config["vision_config"]}, source)
    return qwen3_vl.vision_config(settings, Settings(ropes(settings)[0], source), images)


def reader_of(directory: Path) -> Callable[[str], Mapping[str, Any]]:
    """Reads files of a model by their names. A file that is missing is empty."""

    def read(name: str) -> Mapping[str, Any]:
        file = directory / name
        return read_json(file) if file.is_file() else {}

    return read


def _vision(
    settings: Settings, rope: Settings, family: Family, processor: Mapping[str, Any]
) -> VisionConfig | None:
    if family.vision is None:
        return None
    images = image_settings(settings.values, processor, settings.source)
    if images is None and not family.needs_vision:
        return None
    if images is None:
        raise ValueError(f"{settings.source}: vision_config is missing, so the model cannot see")
    return family.vision(settings, rope, images)


def _settings_of_text(config: Mapping[str, Any], source: str) -> Settings:
    """The settings of the text model, also if the model sees images, too."""
    family = family_of(Settings(config, source).architecture, source)
    if text := _text_config(config, source):
        present = {key: value for key, value in text.items() if value is not None}
        if family.vision is not None and (tied := config.get("tie_word_embeddings")) is not None:
            # As in transformers: the text model alone may say otherwise.
            present["tie_word_embeddings"] = tied
        if (eos := config.get("eos_token_id")) is not None:  # that of the text model may be a default
            present["eos_token_id"] = eos
        config = {**config, **present}
    settings = Settings(family.settings(Settings(one_rope(config, source), source)), source)
    if settings.get("rope_parameters") and (scaling := settings.get("rope_scaling")):
        # The family reads the rotation of each type of layers from other keys.
        raise ValueError(f"{source}: rope_scaling {scaling!r} of {settings.architecture} is not supported")
    return settings


def _text_config(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The settings of the text model of a model that sees images, too. Empty: it has none of its own."""
    text = config.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ValueError(f"{source}: text_config must be a mapping of settings, not {text!r}")
    return text


def _eos_ids(settings: Settings, generation: Mapping[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id")
    eos = settings.get("eos_token_id") if eos is None else eos
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


def _multipliers(
    settings: Settings, architecture: str, hidden_size: int, family: Family
) -> Multipliers | None:
    number = settings.number
    if family.gemma:
        return Multipliers(embedding=hidden_size**0.5, residual=1.0, attention=1.0, logits=1.0)
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


def _not_supported(settings: Settings, rope: Any, architecture: str, family: Family) -> Iterator[str]:
    """`rope`: the settings of rotation, if they are a mapping."""
    if not isinstance(settings.get("quantization_config", {}), Mapping | None):
        yield f"quantization_config {settings.get('quantization_config')!r}"
    key, activation = "hidden_act", "silu"
    if architecture in GEMMA3:
        key, activation = "hidden_activation", "gelu_pytorch_tanh"
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if settings.get(name):
                yield name
    if settings.get(key) not in (None, activation):
        yield f"{key} {settings.get(key)!r}"
    if settings.get("per_layer_config") and not family.reads_layers:
        yield "per_layer_config"
    yield from family.not_supported(settings)
    if settings.get("mlp_bias"):
        yield "mlp_bias"
    if not isinstance(rope, Mapping):
        yield f"rope scaling {rope!r}"
    elif family.rotated is None and any(
        values.get("partial_rotary_factor") not in (None, 1.0) for values in (settings, rope)
    ):
        yield "partial_rotary_factor"
