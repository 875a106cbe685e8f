"""The vision tower of transformers, with the weights of a checkpoint."""

import hashlib
import importlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import ModuleList

from baton.content.images import CHANNELS, ImageSettings
from baton.encode_worker.turns import Turns

TOWERS = {
    "qwen3_vl": ("transformers.models.qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionModel"),
    "qwen3_vl_moe": ("transformers.models.qwen3_vl_moe", "Qwen3VLMoeVisionConfig", "Qwen3VLMoeVisionModel"),
    "qwen3_5": ("transformers.models.qwen3_5", "Qwen3_5VisionConfig", "Qwen3_5VisionModel"),
    "qwen3_5_moe": ("transformers.models.qwen3_5_moe", "Qwen3_5MoeVisionConfig", "Qwen3_5MoeVisionModel"),
}
"""Where the classes of a tower are, by the `model_type` of its configuration without `_vision`."""


class Tower:
    """One tower on one device. Not thread-safe."""

    def __init__(
        self,
        settings: ImageSettings,
        config: str,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        turns: Turns,
        *,
        seed: int = 0,
    ) -> None:
        """`config`: `vision_config` of the checkpoint, as JSON. `tensors`: the weights, by the names that
        transformers gives them. Empty: dummy weights, drawn from `seed`. `turns`: when a layer may begin.

        Raises `ValueError` if transformers is not installed, or does not know this tower or its tensors.
        """
        given: dict[str, Any] = json.loads(config)
        kind = str(given.get("model_type", "qwen3_vl")).removesuffix("_vision")
        if kind not in TOWERS:
            raise ValueError(f"vision_config: model_type {kind!r} is not supported ({', '.join(TOWERS)} are)")
        module, of_config, of_model = TOWERS[kind]
        try:
            package = importlib.import_module(module)
        except ImportError as error:
            raise ValueError(
                f"images need transformers, which cannot be imported ({error}): "
                "install Baton with the extra `images`"
            ) from error
        settings_of = getattr(package, of_config)(**{k: v for k, v in given.items() if k != "model_type"})
        with torch.device("meta"):
            model = getattr(package, of_model)(settings_of)
        drawn = dict(tensors) or {
            name: _drawn(name, parameter.shape, device, dtype, seed)
            for name, parameter in model.state_dict().items()
        }
        missing, unknown = model.load_state_dict(drawn, strict=False, assign=True)
        if missing or unknown:
            raise ValueError(f"the vision tower lacks {missing[:3]} and has {unknown[:3]} too many")
        for module in model.modules():  # which are no weights: computed from the configuration
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    setattr(module, name, _frequencies(module, device))
        self._model = model.eval().requires_grad_(False)
        layers = max((each for each in model.modules() if isinstance(each, ModuleList)), key=len)
        for layer in layers:
            layer.register_forward_pre_hook(self._next_layer)
        self._turns = turns
        self._before: torch.cuda.Event | None = None  # when the layer before the last launched one has ended
        self._settings = settings
        self._device = device
        self._dtype = dtype
        # A stream of its own: steps of the engine do not wait for an image.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Rounded as in the processor of transformers.
        values = torch.arange(256, dtype=torch.float64).mul_(1 / 255).float()[:, None]
        values = (values - torch.tensor(settings.mean)) / torch.tensor(settings.std)
        self._values = values.to(device)  # [256, channels]: what the tower reads for a byte

    @torch.inference_mode()
    def encode(self, pixels: bytes, rows: int, columns: int) -> np.ndarray:
        """Encodes one image: red, green and blue of each pixel, for a grid of tokens.

        Returns [tokens, bytes] uint8: of each token its embedding, then what some layers of the language
        model add to it, in the dtype of the model."""
        with torch.cuda.stream(self._stream), self._turns.image(rows * columns):
            return self._encode(pixels, rows, columns)

    def _next_layer(self, *_: object) -> None:
        """Runs before each layer. One layer is launched ahead, so that the device does not idle between two,
        and no more: those that are launched cannot wait."""
        if self._stream is not None:
            if self._before is not None:
                self._before.synchronize()
            self._before = torch.cuda.Event(blocking=True)
            self._before.record(self._stream)
        self._turns.next_layer()

    def _encode(self, pixels: bytes, rows: int, columns: int) -> np.ndarray:
        side, merge = self._settings.side, self._settings.merge_size
        height, width = rows * side, columns * side
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(height, width, CHANNELS)
        patches = self._patches(image.to(self._device))
        grid = torch.tensor([[1, rows * merge, columns * merge]], device=self._device)
        output = self._model(patches.to(self._dtype), grid_thw=grid)
        features = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        packed = torch.cat([feature.to(self._dtype) for feature in features], dim=1).contiguous()
        return packed.cpu().view(torch.uint8).numpy()

    def _patches(self, image: Tensor) -> Tensor:
        """[patches, channels · frames · pixels] float32, the patches of a token one after the other, as the
        processor of transformers makes them."""
        settings = self._settings
        patch, merge, frames = settings.patch_size, settings.merge_size, settings.temporal_patch_size
        height, width, channels = image.shape
        values = self._values[image.int(), torch.arange(channels, device=self._device)].permute(2, 0, 1)
        rows, columns = height // settings.side, width // settings.side
        values = values.reshape(channels, rows, merge, patch, columns, merge, patch)
        values = values.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        values = values.expand(-1, -1, -1, -1, -1, frames, -1, -1)
        return values.reshape(rows * columns * merge**2, channels * frames * patch**2)


def _frequencies(module: Any, device: torch.device) -> Tensor:
    """The frequencies of the rotation of a tower."""
    values, _ = module.compute_axial_rope_parameters(module.config)
    return values.to(device)


def _drawn(name: str, shape: torch.Size, device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    """A dummy weight. It depends only on the seed, the name and the kind of device."""
    if len(shape) == 1:
        return torch.ones(shape, device=device, dtype=dtype)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device=device).normal_(std=0.02, generator=generator).to(dtype)
