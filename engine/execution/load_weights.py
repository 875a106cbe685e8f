"""A rank's part of the model, with its weights in the memory where they stay."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from baton.engine.api.config import EngineConfig
from baton.engine.execution.cache_limits import CacheLimits, gib
from baton.engine.execution.image_encoder import encoder_of
from baton.engine.execution.memory_sizing import memory_for
from baton.engine.execution.shared_weights import SharedWeights
from baton.engine.layers.ranks import Ranks
from baton.engine.layers.weights import Checkpoint, PlainFormat, as_built
from baton.engine.loader import load_model
from baton.engine.loader.draft_heads import FoundHead
from baton.engine.models.draft_heads import DraftHead
from baton.engine.models.llama import Llama
from baton.system.background import at_low_priority
from baton.system.kept_pages import Shelf
from baton.vision.embeddings import EmbeddingFormat
from baton.vision.encoder import Encoder

log = logging.getLogger(__name__)
T = TypeVar("T")


class Loaded(NamedTuple):
    model: Llama
    drafter: DraftHead | None
    fingerprint: str
    """As `load_model` returns it."""
    encoder: Encoder | None
    tower: Mapping[str, Tensor]
    embeddings: EmbeddingFormat | None
    """This and the two before: as `encoder_of` returns them."""
    memory: SharedWeights | None
    """Of the weights. None: that of torch."""


def load_weights(
    config: EngineConfig,
    checkpoint: Checkpoint,
    limits: CacheLimits,
    weight_format: PlainFormat,
    head: FoundHead | None,
    device: torch.device,
    ranks: Ranks,
    progress: Callable[[str, float], None],
    shelf: Shelf | None,
    *,
    stands_by: bool,
) -> Loaded:
    """`shelf`: for weights that engine processes share. None: they share none. `stands_by`: another process
    serves, so this one loads at a low priority. Raises `ValueError` for mistakes that the user can mend, and
    if there is not enough memory."""
    run = partial(_in_background, device) if stands_by else _at_once
    if checkpoint.config.modules is not None and not config.skip_model_check:
        from baton.engine.execution.module_check import check_modules  # late: others need no transformers

        run(partial(check_modules, checkpoint.config, checkpoint.source))
    shared: SharedWeights | None = None
    with memory_for(device, "the weights", "choose a smaller --model"):
        if shelf is not None or config.enable_memory_saver:
            alone = shelf is None or not stands_by
            shared = run(partial(SharedWeights, shelf, device, ranks, alone=alone))
        part_built = as_built if shared is None else shared.part_built
        model, drafter, fingerprint = run(
            partial(
                load_model,
                checkpoint,
                limits.max_model_len,
                limits.dtype,
                device,
                progress,
                weight_format,
                ranks,
                head=head,
                exact=config.batch_invariant,
                part_built=part_built,
            )
        )
    encoder = run(
        partial(encoder_of, config, checkpoint.config, model, limits.dtype, device, ranks, part_built)
    )
    if shared is not None:
        with memory_for(device, "the weights", "choose a smaller --model"):
            run(partial(shared.finish, (model, drafter)))
        if apart := shared.apart_bytes:
            log.warning("%s of weights are others than those of the process that serves", gib(apart))
    return Loaded(model, drafter, fingerprint, *encoder, shared)


def _at_once(work: Callable[[], T]) -> T:
    return work()


def _in_background(device: torch.device, work: Callable[[], T]) -> T:
    """At a low priority."""

    def in_thread() -> T:
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)  # it refuses a device without a number
        return work()

    return at_low_priority(in_thread)
