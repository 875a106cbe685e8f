"""The vision towers of transformers, by family: how each is built, and what it reads.

A family has a module, whose weights have the names of the checkpoint, and a function from the pixels of one
image to the embeddings of its tokens.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear, scaled_dot_product_attention

from baton.vision.images import ImageSettings

OfSize = dict[str, Any]
"""What a tower computes from the size of an image alone."""


class VisionModel(NamedTuple):
    package: str
    """In transformers."""
    build: Callable[[Any, Mapping[str, Any]], Module]
    """From the package and the settings of the encoder (`VisionConfig.tower`)."""
    of_size: Callable[[Any, ImageSettings, torch.device, int, int], OfSize]
    """From the module, the settings and the device of the tower, and height and width in pixels."""
    features: Callable[[Any, Tensor, ImageSettings, OfSize], Sequence[Tensor]]
    """(module, pixels [height, width, channels] float32 as the tower reads them, settings, what `of_size`
    gave) → tensors [tokens, hidden_size]: embeddings, then what layers of the language model add to them. The
    host neither waits for the device nor copies to it, so that a CUDA graph can hold the pass."""


def vision_model(kind: str) -> VisionModel:
    """Raises `ValueError` for a kind that is not supported."""
    if kind not in KINDS:
        raise ValueError(f"vision_config: model_type {kind!r} is not supported ({', '.join(KINDS)} are)")
    return KINDS[kind]


def package_of(model: VisionModel) -> Any:
    """Raises `ValueError` if transformers is not installed, or does not know the family."""
    try:
        return importlib.import_module(f"transformers.models.{model.package}")
    except ImportError as error:
        raise ValueError(
            f"images need transformers, which cannot be imported ({error}): "
            "install Baton with the extra `images`"
        ) from error


# Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5


def _qwen(package: str, config_class: str, model_class: str) -> VisionModel:
    def build(classes: Any, settings: Mapping[str, Any]) -> Module:
        config = getattr(classes, config_class)(**_settings(settings))
        module = getattr(getattr(classes, f"modeling_{package}"), model_class)(config)
        # A convolution whose windows do not overlap is a product, which takes a twentieth of its time.
        module.patch_embed.forward = partial(_embedded, module.patch_embed.proj)
        for block in module.blocks:
            block.attn.forward = partial(_attended, block.attn)
        return module

    return VisionModel(package, build, _of_grid, _qwen_features)


def _qwen_features(module: Any, pixels: Tensor, settings: ImageSettings, of_size: OfSize) -> Sequence[Tensor]:
    patches = _patches_by_token(
        pixels, settings.patch_size, settings.merge_size, settings.temporal_patch_size
    )
    output = module(patches, **of_size)
    return [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]


def _embedded(convolution: Any, patches: Tensor) -> Tensor:
    weight = convolution.weight.flatten(1)
    return linear(patches.to(weight.dtype), weight, convolution.bias)


def _attended(
    attention: Any,
    hidden_states: Tensor,
    *,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> Tensor:
    """The patches of one image attend to each other: all of them, or those of a window. Windows of one length
    that follow each other are computed as one batch. `cu_seqlens`: their bounds, on the host.

    The rotation has half of the launches, and reads and writes half of the bytes, of that in transformers."""
    rows, (cosines, sines) = len(hidden_states), position_embeddings
    projected = attention.qkv(hidden_states).view(rows, 3, attention.num_heads, -1).permute(1, 2, 0, 3)
    first, second = projected[:2].chunk(2, dim=-1)  # of queries and keys
    cosines, sines = cosines[:, : first.shape[-1]].float(), sines[:, : first.shape[-1]].float()
    rotated = torch.empty_like(projected[:2], memory_format=torch.contiguous_format)
    left, right = rotated.chunk(2, dim=-1)
    left.copy_((first * cosines).addcmul_(second, sines, value=-1))
    right.copy_((second * cosines).addcmul_(first, sines))
    attended, start = hidden_states.new_empty(rows, attention.num_heads, rotated.shape[-1]), 0
    for length, windows in groupby(cu_seqlens.diff().tolist()):
        stop = start + length * len(list(windows))
        queries, keys, values = (
            x[:, start:stop].unflatten(1, (-1, length)).transpose(0, 1) for x in (*rotated, projected[2])
        )
        of_windows = scaled_dot_product_attention(queries, keys, values, scale=attention.scaling)
        attended[start:stop].unflatten(0, (-1, length)).copy_(of_windows.transpose(1, 2))
        start = stop
    return attention.proj(attended.flatten(1))


def _of_grid(module: Any, settings: ImageSettings, device: torch.device, height: int, width: int) -> OfSize:
    """Arguments of the tower. The grid is on the host, which reads it."""
    vision, merge = importlib.import_module("transformers.vision_utils"), module.config.spatial_merge_size
    grid = torch.tensor([[1, height // settings.patch_size, width // settings.patch_size]])
    found = {"grid_thw": grid, "position_ids": vision.get_vision_position_ids(grid, merge).to(device)}
    if hasattr(module, "num_grid_per_side"):
        indices, weights = vision.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=module.num_grid_per_side,
            mode=module.interpolation_mode,
            align_corners=module.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        found |= {"interp_indices": indices.to(device), "interp_weights": weights.to(device)}
    if hasattr(module, "window_size"):
        index, bounds = vision.get_vision_window_index(grid, merge, module.window_size, module.patch_size)
        # Windows at the edges are smaller. Those of one size follow each other: they are one batch.
        windows: list[Tensor] = list(index.tensor_split(bounds[1:-1].div(merge**2).long()))
        windows.sort(key=len)
        bounds = torch.tensor([0, *map(len, windows)], dtype=torch.int32).cumsum(0) * merge**2
        found |= {"window_index": torch.cat(windows).to(device), "cu_window_seqlens": bounds}
    return found


def _patches_by_token(pixels: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """[patches, channels · frames · pixels], the patches of a token one after the other, as the processor of
    transformers makes them."""
    height, width, channels = pixels.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    values = pixels.permute(2, 0, 1).reshape(channels, rows, merge, patch, columns, merge, patch)
    values = values.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    values = values.expand(-1, -1, -1, -1, -1, frames, -1, -1)
    return values.reshape(rows * columns * merge**2, channels * frames * patch**2)


# Gemma


def _build_gemma3(classes: Any, settings: Mapping[str, Any]) -> Module:
    from transformers import AutoModel

    config, module = classes.Gemma3Config(**_settings(settings)), Module()
    module.vision_tower = AutoModel.from_config(config.vision_config)
    module.multi_modal_projector = classes.modeling_gemma3.Gemma3MultiModalProjector(config)
    return module


def _gemma3_features(
    module: Any, pixels: Tensor, settings: ImageSettings, of_size: OfSize
) -> Sequence[Tensor]:
    output = module.vision_tower(pixel_values=pixels.permute(2, 0, 1)[None])
    return [module.multi_modal_projector(output.last_hidden_state)[0]]


def _build_gemma4(classes: Any, settings: Mapping[str, Any]) -> Module:
    from transformers import AutoModel

    config, module = classes.Gemma4Config(**_settings(settings)), Module()
    module.vision_tower = AutoModel.from_config(config.vision_config)
    embedder = classes.modeling_gemma4.Gemma4MultimodalEmbedder
    module.embed_vision = embedder(config.vision_config, config.text_config)
    return module


def _gemma4_positions(
    module: Any, settings: ImageSettings, device: torch.device, height: int, width: int
) -> OfSize:
    rows, columns = height // settings.patch_size, width // settings.patch_size
    tops, lefts = torch.meshgrid(
        torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij"
    )
    positions = torch.stack((lefts, tops), dim=-1).view(1, -1, 2)
    return {"positions": positions, "padding": torch.zeros_like(positions[..., 0], dtype=torch.bool)}


def _gemma4_features(
    module: Any, pixels: Tensor, settings: ImageSettings, of_size: OfSize
) -> Sequence[Tensor]:
    """As the tower's own `forward`, which looks for padding. One image has none."""
    tower, patch, (height, width, channels) = module.vision_tower, settings.patch_size, pixels.shape
    patches = pixels.reshape(height // patch, patch, width // patch, patch, channels).permute(0, 2, 1, 3, 4)
    positions, padding = of_size["positions"], of_size["padding"]
    patches = patches.reshape(1, positions.shape[1], -1)
    embedded = tower.patch_embedder(patches, positions, padding)
    output = tower.encoder(inputs_embeds=embedded, attention_mask=None, pixel_position_ids=positions)
    hidden, _ = tower.pooler(
        hidden_states=output.last_hidden_state,
        pixel_position_ids=positions,
        padding_positions=padding,
        output_length=height * width // settings.side**2,
    )
    if tower.config.standardize:
        hidden = (hidden - tower.std_bias.float()) * tower.std_scale.float()
    return [module.embed_vision(hidden[0].to(embedded.dtype))]


def _nothing(*_: Any) -> OfSize:
    return {}


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "model_type"}


KINDS = {
    "qwen2_vl": _qwen("qwen2_vl", "Qwen2VLVisionConfig", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": _qwen("qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": _qwen("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel"),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", "Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionModel"),
    "qwen3_5": _qwen("qwen3_5", "Qwen3_5VisionConfig", "Qwen3_5VisionModel"),
    "qwen3_5_moe": _qwen("qwen3_5_moe", "Qwen3_5MoeVisionConfig", "Qwen3_5MoeVisionModel"),
    "gemma3": VisionModel("gemma3", _build_gemma3, _nothing, _gemma3_features),
    "gemma4": VisionModel("gemma4", _build_gemma4, _gemma4_positions, _gemma4_features),
}
"""By the `model_type` of the settings of the encoder without `_vision`."""
