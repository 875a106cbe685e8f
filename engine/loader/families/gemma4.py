"""Checkpoints of Gemma 4, and their settings: a text model, which takes images where the checkpoint has an
encoder.

The tokens of an image depend on its size. In the larger models, layers with windows let a token of an image
see all of it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from baton.engine.loader.families.family import Family
from baton.engine.loader.families.gemma3 import tower_of
from baton.engine.loader.rearranged import Piece, Rearranged
from baton.engine.loader.rope_config import rope_theta, rotary_dim
from baton.engine.loader.settings import Settings
from baton.engine.model_config import GeLU, GemmaConfig, OtherAttention, VisionConfig
from baton.engine.models.gemma4 import gemma_of
from baton.engine.models.vision import Gemma4WithImages
from baton.vision.images import ImageSettings

DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
"""Of settings that published checkpoints leave out."""
PERIOD = 6
"""Without `layer_types`, each layer at a multiple of it attends to all tokens, and the last one."""


class Gemma4Checkpoint(Rearranged):
    """Layers that read the KV of others may have keys and values in the files, which nothing uses."""

    renamed: ClassVar[Mapping[str, str]] = {"model.language_model.": "model."}
    encoder: ClassVar[Mapping[str, str]] = {
        "model.vision_tower.": "vision_tower.",
        "model.embed_vision.": "embed_vision.",
    }
    left_out = ("model.audio_tower.", "model.embed_audio.")

    def _rows(self, kind: str) -> Mapping[str, Tensor]:
        return {}

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        words, sources = name.split("."), gemma_of(self.config).sources
        if words[-2:-1] and words[-2] in ("k_proj", "v_proj", "k_norm") and words[2].isdecimal():
            layer = int(words[2])
            if layer < len(sources) and sources[layer] != layer:
                return
        yield from super()._split(name, stored)


def in_words_of_others(settings: Settings) -> Mapping[str, Any]:
    """The rotation is that of layers with windows."""
    fields = {**DEFAULTS, **settings.values}
    rope = fields.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"{settings.source}: rope_parameters must be an object, not {rope!r}")
    full = rope.get("full_attention") or {}
    if not isinstance(full, Mapping):
        raise ValueError(
            f"{settings.source}: rope_parameters of full_attention must be an object, not {full!r}"
        )
    local = rope.get("sliding_attention") or {"rope_type": "default", "rope_theta": 10000.0}
    if fields.get("layer_types") is None:
        count = Settings(fields, settings.source).integer("num_hidden_layers")
        wide = [layer % PERIOD == 0 or layer == count for layer in range(1, count + 1)]
        fields["layer_types"] = ["full_attention" if each else "sliding_attention" for each in wide]
    return {**fields, "rope_parameters": local, "wide_rope": full}


def wide_attention(settings: Settings, types: Sequence[str]) -> OtherAttention:
    """Of the layers that attend to all tokens. Raises as `gemma_config`."""
    source, integer = settings.source, settings.integer
    wide = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    head_dim, kv_heads = integer("global_head_dim", 512), integer("num_key_value_heads")
    if settings.get("attention_k_eq_v", False) and settings.get("num_global_key_value_heads") is not None:
        kv_heads = integer("num_global_key_value_heads")
    if "per_layer_config" in settings.values:  # how transformers 5 writes these; it then ignores the others
        shape = _wide_shape(settings, wide)
        head_dim = shape.integer("head_dim", integer("head_dim"))
        kv_heads = shape.integer("num_key_value_heads", integer("num_key_value_heads"))
    rope = Settings(settings.values["wide_rope"], source)
    if rope.get("rope_type", "proportional") != "proportional":
        raise ValueError(f"{source}: rope_type {rope.get('rope_type')!r} of full attention is not supported")
    rotated = rotary_dim(Settings({}, source), rope, 0.25, head_dim)
    # Pair i of a head turns by θ^(−2i / head_dim).
    theta = rope_theta(rope, 1e6) ** (rotated / head_dim)
    return OtherAttention(wide, theta, rotated, num_kv_heads=kv_heads, head_dim=head_dim)


def gemma_config(settings: Settings) -> GemmaConfig:
    """Raises `ValueError` naming the key that is wrong or not supported."""
    source, integer = settings.source, settings.integer
    has_inputs = settings.get("hidden_size_per_layer_input", 256) not in (None, 0)
    size = integer("hidden_size_per_layer_input", 256) if has_inputs else 0
    vocabulary = integer("vocab_size_per_layer_input", 262144) if size else 262144
    if size and vocabulary < integer("vocab_size"):
        raise ValueError(f"{source}: vocab_size_per_layer_input {vocabulary} is less than vocab_size")
    return GemmaConfig(
        bool(settings.get("attention_k_eq_v", False)),
        _sources(settings, settings.get("layer_types"), integer("num_hidden_layers")),
        bool(settings.get("use_double_wide_mlp", False)),
        size,
        vocabulary,
        settings.number("final_logit_softcapping") if settings.get("final_logit_softcapping") else None,
        _pad_id(settings),
    )


def _wide_shape(settings: Settings, wide: Sequence[int]) -> Settings:
    """What layers with full attention have of their own, by `per_layer_config`. It has only what differs from
    other layers, and is empty if nothing does."""
    overrides = settings.get("per_layer_config") or {}
    numbered = overrides.items() if isinstance(overrides, Mapping) else [("", None)]
    shape_of = {int(at) if str(at).isdecimal() else at: shape for at, shape in numbered}  # "05" of 30 layers
    shapes: list[Any] = [*shape_of.values()] or [{}]
    is_shape = isinstance(shapes[0], Mapping) and {*shapes[0]} <= {"head_dim", "num_key_value_heads"}
    if not is_shape or any(each != shapes[0] for each in shapes) or {*shape_of} not in (set(), {*wide}):
        raise ValueError(
            f"{settings.source}: per_layer_config must give all layers with full attention one shape"
        )
    return Settings(shapes[0], settings.source)


def _pad_id(settings: Settings) -> int:
    token_id, size = settings.get("pad_token_id") or 0, settings.integer("vocab_size")
    if type(token_id) is not int or not 0 <= token_id < size:
        raise ValueError(f"{settings.source}: pad_token_id must be a token below {size}, not {token_id!r}")
    return token_id


def _sources(settings: Settings, types: list[str], count: int) -> tuple[int, ...]:
    """Of each layer, the layer that keeps the KV it reads: the last one of its type that keeps some."""
    shared = settings.integer("num_kv_shared_layers") if settings.get("num_kv_shared_layers") else 0
    unshared = types[: count - shared]
    if shared >= count or any(kind not in unshared for kind in types):
        raise ValueError(
            f"{settings.source}: num_kv_shared_layers {shared} leaves no KV for some of {count} layers"
        )
    last = {kind: layer for layer, kind in enumerate(unshared)}
    return tuple(layer if layer < len(unshared) else last[kind] for layer, kind in enumerate(types))


def vision_config(settings: Settings, _: Settings, images: ImageSettings) -> VisionConfig:
    layers_seen_whole: list[int] = []
    if settings.get("use_bidirectional_attention") == "vision":
        types = settings.get("layer_types")
        layers_seen_whole = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    return VisionConfig(images, tower_of(settings, "gemma4"), whole_layers=tuple(layers_seen_whole))


def not_supported(settings: Settings) -> Iterator[str]:
    supported = {
        "attention_bias": (False,),
        "enable_moe_block": (False,),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": ("vision",),
    }
    yield from settings.unlike(supported)


FAMILY = Family(
    activation=GeLU(),
    model=Gemma4WithImages,
    checkpoint=Gemma4Checkpoint,
    settings=in_words_of_others,
    gemma=gemma_config,
    other_attention=wide_attention,
    reads_layers=True,
    vision=vision_config,
    needs_vision=False,
    not_supported=not_supported,
)
