"""The vision tower of transformers, with the weights of a checkpoint."""

import hashlib
import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import ModuleList

from baton.vision.embeddings import CACHE_BYTES
from baton.vision.images import CHANNELS, ImageSettings
from baton.vision.pinned_memory import PinnedMemory
from baton.vision.tower_graphs import TowerGraphs
from baton.vision.turns import Turns
from baton.vision.vision_models import OfSize, package_of, vision_model

SAMPLED = 256
"""Values of a tensor that its fingerprint has."""
SIZES_KEPT = 64
"""Of images, of which a tower remembers what it computes from the size alone: half a MB for 1080p."""


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
        graphs: TowerGraphs | None = None,
        part_built: Callable[[str, Any], Any] = lambda name, part: part,
    ) -> None:
        """`config`: as `VisionConfig.tower`. `tensors`: the weights, by the names that
        transformers gives them. Empty: dummy weights, drawn from `seed`. `turns`: when a layer may begin.
        `graphs`: of this tower alone. None: each pass is launched. `part_built`: as in `Weights` of the
        engine. It may move the weights to other memory.

        Raises `ValueError` if transformers is not installed, or does not know this tower or its tensors.
        """
        fields: dict[str, Any] = json.loads(config)
        kind = str(fields.get("model_type", "qwen3_vl")).removesuffix("_vision")
        family = vision_model(kind)
        package = package_of(family)
        with torch.device("meta"):
            model = family.build(package, fields)
        drawn = dict(tensors) or {
            name: _drawn(name, parameter.shape, device, dtype, seed)
            for name, parameter in model.state_dict().items()
        }
        missing, unknown = model.load_state_dict(drawn, strict=False, assign=True)
        if missing or unknown:
            raise ValueError(f"the vision tower lacks {missing[:3]} and has {unknown[:3]} too many")
        part_built("tower", [*drawn.values(), *model.parameters()])
        for module in model.modules():  # which are no weights: computed from the configuration
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    setattr(module, name, _computed(module, name, buffer, device))
        self._features = family.features
        self._model = model.eval().requires_grad_(False)
        self._of_size = lru_cache(SIZES_KEPT)(partial(family.of_size, self._model, settings, device))
        layers = max((each for each in model.modules() if isinstance(each, ModuleList)), key=len)
        for layer in layers:
            layer.register_forward_pre_hook(self._layer_begins)
        self._before_layer: Callable[[], None] = self._next_layer  # of the pass under way
        self._graphs = graphs
        self._turns = turns
        self._launched = deque[torch.cuda.Event]()  # layers, each from when the one before it has ended
        self._settings = settings
        self._device = device
        self._dtype = dtype
        # A stream of its own: steps of the engine do not wait for an image.
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._memory = PinnedMemory(CACHE_BYTES if self._on_gpu else 0, pinned=self._on_gpu)
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

    def give_back(self) -> None:
        """Gives back the memory of the device that no weights have and that no image is computed in."""
        if self._graphs is not None:
            self._graphs.drop()

    def _layer_begins(self, *_: object) -> None:
        self._before_layer()

    def _next_layer(self) -> None:
        """Runs before each layer. Beside decodes one layer is launched ahead, so that the device does not
        idle between two, and no more: those that are launched cannot wait. Otherwise more of them are, since
        a thread that launches steps holds up this one (`Turns.ahead`)."""
        if self._stream is not None:
            while len(self._launched) >= self._turns.ahead:
                self._launched.popleft().synchronize()
            self._launched.append(torch.cuda.Event(blocking=True))
            self._launched[-1].record(self._stream)
        self._turns.next_layer()

    def _encode(self, pixels: bytes, rows: int, columns: int) -> np.ndarray:
        self._launched.clear()
        side = self._settings.side
        # Neither copy holds up the threads of this process.
        image = torch.empty(rows * columns * side**2 * CHANNELS, dtype=torch.uint8, pin_memory=self._on_gpu)
        image.numpy()[:] = np.frombuffer(pixels, np.uint8)
        run = partial(self._pass, rows, columns, self._of_size(rows * side, columns * side))
        if self._graphs is not None:
            run = self._graphs.pass_of((rows, columns), run)
        return self._on_host(run(image, self._next_layer))

    def _pass(
        self, rows: int, columns: int, of_size: OfSize, image: Tensor, before_layer: Callable[[], None]
    ) -> Tensor:
        """As `Pass`."""
        self._before_layer, side = before_layer, self._settings.side
        image = image.to(self._device, non_blocking=True).view(rows * side, columns * side, CHANNELS)
        values = self._values[image.int(), torch.arange(CHANNELS, device=self._device)]
        features = self._features(self._model, values, self._settings, of_size)
        packed = torch.cat([feature.to(self._dtype) for feature in features], dim=1).contiguous()
        if len(packed) != rows * columns:
            raise ValueError(f"the vision tower made {len(packed)} tokens, not {rows * columns}")
        return packed.view(torch.uint8)

    def _on_host(self, values: Tensor) -> np.ndarray:
        """On a GPU in pinned memory: a copy to other memory takes most of the time of an image, and steps of
        the engine wait for it. A step reads them from there (`upload`)."""
        if self._stream is None:
            return values.numpy()
        copied = self._memory.take(values.nbytes).reshape(values.shape)
        torch.from_numpy(copied).copy_(values, non_blocking=True)
        self._stream.synchronize()
        return copied


def tower_fingerprint(settings: ImageSettings, config: str, tensors: Mapping[str, Tensor], dummy: str) -> str:
    """Towers with equal ones make equal embeddings of equal pixels, but for rounding. Looks at some values of
    each tensor. `dummy`: what dummy weights are drawn from, if there are no tensors."""
    digest = hashlib.sha256(f"{settings} {config} {dummy}".encode())
    for name in sorted(tensors):
        values = tensors[name].flatten()
        some = values[:: max(1, len(values) // SAMPLED)][:SAMPLED].float().cpu()
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode() + some.numpy().tobytes())
    return f"images={digest.hexdigest()[:32]}"


def _computed(module: Any, name: str, buffer: Tensor, device: torch.device) -> Tensor:
    """A buffer that no checkpoint has: positions, or the frequencies of the rotation of a tower."""
    if name == "position_ids":
        return torch.arange(buffer.shape[-1], device=device).expand(buffer.shape)
    values, _ = module.compute_axial_rope_parameters(module.config)
    return values.to(device)


def _drawn(name: str, shape: torch.Size, device: torch.device, dtype: torch.dtype, seed: int) -> Tensor:
    """A dummy weight. It depends only on the seed, the name and the kind of device."""
    if not shape:  # the bound of a value
        return torch.tensor(-math.inf if name.endswith("_min") else math.inf, device=device, dtype=dtype)
    if len(shape) == 1:
        return torch.ones(shape, device=device, dtype=dtype)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, device=device).normal_(std=0.02, generator=generator).to(dtype)
