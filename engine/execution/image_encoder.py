"""The encoder of images: in an engine that computes a whole model, or alone."""

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from baton.engine.api.config import EngineConfig
from baton.engine.api.stats import EncoderStats
from baton.engine.execution.cache_limits import choose_dtype
from baton.engine.execution.graphs import LateCapture
from baton.engine.execution.memory_sizing import memory_for
from baton.engine.execution.threads import set_threads
from baton.engine.layers.ranks import Ranks
from baton.engine.layers.weights import Weights, as_built
from baton.engine.loader import check_encoder, choose_format, open_checkpoint
from baton.engine.model_config import ModelConfig, VisionConfig
from baton.engine.models.vision import TOWER
from baton.vision.embeddings import EmbeddingFormat
from baton.vision.encoder import Encoder
from baton.vision.images import MOST_PIXELS, ImageSettings
from baton.vision.tower import Tower, tower_fingerprint
from baton.vision.tower_graphs import TowerGraphs
from baton.vision.turns import Turns

log = logging.getLogger(__name__)

COMMON_PIXELS = 1920 * 1080
"""Of the image that shows what images cost. No larger one has graphs: a GPU computes it for longer than its
launches take."""
COMMON_PASSES = 3
"""Of that image: graphs are captured in the second one, and the third one shows the cost."""


def start_encoder(
    config: EngineConfig, progress: Callable[[str, float], None], hold_seconds: float
) -> tuple[Encoder, EmbeddingFormat, ModelConfig]:
    """Loads only the encoder of images. `hold_seconds`: as for `Encoder`.

    Raises `ValueError` for mistakes that the user can mend."""
    device, ranks = torch.device(config.device), Ranks()
    set_threads(config, ranks)
    checkpoint = open_checkpoint(config, device, progress)
    model = checkpoint.config
    weight_format = choose_format(config, model, device)
    dtype = choose_dtype(config, model, weight_format, device)
    with memory_for(device, "the weights of the encoder", "choose a smaller --model"):
        weights = Weights(checkpoint, dtype, device, progress, weight_format, ranks).below(TOWER)
    check_encoder(config, model, has_weights=bool(weights))
    assert model.vision is not None, "it has been checked"
    if find_spec("transformers") is None:
        raise ValueError("an encoder needs transformers: install Baton with the extra `images`")
    made = embedding_format(config, model, weights, dtype, device)
    encoder = _encoder_with(config, model.vision, weights, dtype, device, hold_seconds)
    if device.type == "cuda":
        with memory_for(device, "the largest image", "choose a smaller --model"):
            rehearse(encoder, model.vision.settings, device)
    return encoder, made, model


def encoder_stats(encoder: Encoder) -> EncoderStats:
    return EncoderStats(
        encoder.encoded,
        encoder.tokens,
        encoder.seconds,
        encoder.hits,
        encoder.waiting,
        encoder.kept_bytes,
        encoder.turns.token_seconds,
        encoder.queue_seconds,
    )


def embedding_format(
    config: EngineConfig,
    model: ModelConfig,
    tower: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> EmbeddingFormat:
    """`tower`: the weights of the encoder. Empty: dummy weights."""
    vision = model.vision
    assert vision is not None, "the caller has looked"
    dummy = "" if tower else f"{config.seed} {device.type}"
    return EmbeddingFormat(
        tower_fingerprint(vision.settings, vision.tower, tower, dummy),
        str(dtype).removeprefix("torch."),
        (1 + vision.deepstack) * model.hidden_size * dtype.itemsize,
        MOST_PIXELS // vision.settings.side**2,
    )


def encoder_of(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Any,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    part_built: Callable[[str, Any], Any],
) -> tuple[Encoder | None, Mapping[str, Tensor], EmbeddingFormat | None]:
    """Takes the weights of the encoder from the model, and returns them, too. None: it takes no images, its
    files have no encoder, transformers is not installed, or another rank or another worker encodes. In the
    last case there is the format of embeddings from there. `part_built`: as in `Weights`."""
    vision = model_config.vision
    if config.encoder_pool:  # ranks other than 0 have no weights of the encoder
        check_encoder(config, model_config, has_weights=bool(ranks.rank or getattr(model, "tower", {})))
    if vision is None:
        return None, {}, None
    weights, model.tower = model.tower, {}
    if config.encoder_pool:
        return None, {}, embedding_format(config, model_config, weights, dtype, device)
    if ranks.rank:
        return None, {}, None
    if not weights and config.load_format != "dummy":
        log.warning("the model takes no images: its files have no weights of an encoder")
        return None, {}, None
    if find_spec("transformers") is None:
        log.warning("the model takes no images: transformers is missing, install the extra `images`")
        return None, {}, None
    encoder = _encoder_with(config, vision, weights, dtype, device, part_built=part_built)
    return encoder, weights, None


def _encoder_with(
    config: EngineConfig,
    vision: VisionConfig,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    hold_seconds: float = 0.0,
    part_built: Callable[[str, Any], Any] = as_built,
) -> Encoder:
    settings, turns = vision.settings, Turns()
    graphs = tower_graphs(settings, device) if config.cuda_graphs and device.type == "cuda" else None
    with memory_for(device, "the encoder of images", "choose a smaller --model"):
        tower = Tower(
            settings, vision.tower, weights, device, dtype, turns,
            seed=config.seed, graphs=graphs, part_built=part_built,
        )  # fmt: skip
    return Encoder(tower.encode, turns, hold_seconds=hold_seconds, give_back=tower.give_back)


def tower_graphs(settings: ImageSettings, device: torch.device) -> TowerGraphs:
    """For a tower on a GPU."""
    rows, columns = settings.grid_within(COMMON_PIXELS)
    return TowerGraphs(LateCapture, rows * columns, settings.pixel_bytes(1, 1), device)


def rehearse(encoder: Encoder, settings: ImageSettings, device: torch.device) -> int:
    """Encodes the largest image, and then one from which the cost of images is learned. Returns the bytes of
    the GPU that they take at the peak beyond what is allocated afterwards. Graphs keep a part of these."""
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    for pixels in (settings.max_pixels, *[COMMON_PIXELS] * COMMON_PASSES):
        rows, columns = settings.grid_within(pixels)
        encoder.rehearse(rows, columns, bytes(settings.pixel_bytes(rows, columns)))
    peak = torch.cuda.max_memory_allocated(device) - allocated
    peak = max(peak, torch.cuda.max_memory_reserved(device) - reserved)
    return peak - (torch.cuda.memory_allocated(device) - allocated)
