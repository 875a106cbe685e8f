"""New weights for a loaded model: read and checked while it computes, and applied between two steps.

    build the model from the new files, part by part ─▶ keep its tensors in pinned memory of the host,
    in pieces ─▶ check all of them ─▶ copy them over those of the model

The tensors of the model keep their addresses, so graphs stay. Nothing changes before all is checked, so an
error leaves the model as it was. The device has room for the largest part: a layer, the embedding or the
output projection.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from baton.engine.api.config import EngineConfig
from baton.engine.layers.in_place import Pair, pairs
from baton.engine.layers.pieces import pieces
from baton.engine.layers.ranks import Ranks
from baton.engine.loader import draft_head, load_model, open_checkpoint
from baton.engine.loader.formats import choose_format
from baton.engine.model_config import ModelConfig
from baton.engine.models.draft_heads import DraftHead
from baton.engine.models.llama import Llama


def _silent(stage: str, fraction: float) -> None:
    """Nothing waits for the progress."""


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all changes: torch gives memory that was freed in a stream only to that stream again."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True)
class NewWeights:
    """Weights that fit the model and are checked."""

    fingerprint: str
    """As `load_model` returns it."""
    _pairs: Sequence[Pair]
    _writing: Callable[[], AbstractContextManager[None]]

    @property
    def nbytes(self) -> int:
        return sum(pair.new.nbytes for pair in self._pairs)

    @torch.inference_mode()
    def apply(self) -> None:
        """Copies them over those of the model. No step is under way."""
        with self._writing():
            for pair in self._pairs:
                pair.kept.copy_(pair.new, non_blocking=True)
        if self._pairs and self._pairs[0].kept.is_cuda:
            torch.cuda.current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on a device, or the part of a rank, and all that its weights were loaded with."""

    config: EngineConfig
    model_config: ModelConfig
    """As the checkpoint says."""
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks
    model: Llama
    drafter: DraftHead | None
    tower: Mapping[str, Tensor]
    """The weights of the encoder of images that the engine uses."""
    dequantizes_int8: bool
    """As `PlainFormat.with_int8_dequantized` does."""
    writing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """The tensors may be written to within."""

    def stage(self, path: str) -> NewWeights:
        """Reads the weights of the checkpoint at `path`, a directory or GGUF file on this host. May run in
        another thread than the steps. Raises `ValueError` naming what does not fit."""
        if not Path(path).exists():
            remedy = "" if Path(path).is_absolute() else "; give an absolute path"
            raise ValueError(f"{path}: no such file or directory on the host of this worker{remedy}")
        config = replace(self.config, model=path, revision=None, load_format="auto")
        with self._on_a_stream_of_its_own():
            checkpoint = open_checkpoint(config, self.device)
            self._check_same(checkpoint.config, path)
            weight_format = choose_format(config, checkpoint.config, self.device)
            if self.dequantizes_int8:
                weight_format = weight_format.with_int8_dequantized()
            head = draft_head(config, checkpoint, weight_format)
            new_pairs: list[Pair] = []

            def keep(name: str, new: Any) -> Any:
                part, _, index = name.partition(".")
                kept = getattr(self.model, part)
                kept = kept[int(index)] if index else kept
                new_pairs.extend(self._on_host(kept, new, name))
                return kept

            model, drafter, fingerprint = load_model(
                checkpoint, self.max_model_len, self.dtype, self.device, _silent, weight_format, self.ranks,
                head=head, exact=config.batch_invariant, part_built=keep,
            )  # fmt: skip
            new_pairs.extend(self._on_host(self.model, model, "model"))
            new_pairs.extend(self._on_host(self.drafter, drafter, "draft head"))
            new_pairs.extend(self._on_host(self.tower, getattr(model, "tower", {}), "encoder"))
        return NewWeights(fingerprint, new_pairs, self.writing)

    @contextlib.contextmanager
    def _on_a_stream_of_its_own(self) -> Iterator[None]:
        """This thread may have another current device than that of the model."""
        if not self._on_gpu:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(_stream(self.device)):
            yield

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _on_host(self, kept: Any, new: Any, name: str) -> list[Pair]:
        if not self._on_gpu:
            return list(pairs(kept, new, name))
        new_pairs = []
        for pair in pairs(kept, new, name):
            for part, values in pieces(pair.kept, pair.new):
                copy = torch.empty_like(values, device="cpu", pin_memory=True)
                new_pairs.append(Pair(pair.name, part, copy.copy_(values, non_blocking=True)))
        torch.cuda.current_stream().synchronize()  # the device may give the memory of the layer away now
        return new_pairs

    def _check_same(self, config: ModelConfig, path: str) -> None:
        new, loaded = ({f.name: getattr(x, f.name) for f in fields(x)} for x in (config, self.model_config))
        other = [f"{name} {new[name]!r} in place of {x!r}" for name, x in loaded.items() if new[name] != x]
        if other:
            raise ValueError(f"{path}: another model than the one that is loaded: {'; '.join(other)}")
