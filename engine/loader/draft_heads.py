"""Finds and loads draft heads (`engine.models.draft_heads`)."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from baton.engine.api.config import SpeculativeConfig
from baton.engine.layers.weights import Checkpoint, PlainFormat, Weights
from baton.engine.loader.hf import DummyCheckpoint, HFCheckpoint
from baton.engine.loader.hf_config import model_config_from_hf
from baton.engine.loader.rearranged import Piece, Rearranged
from baton.engine.loader.settings import Settings, read_json
from baton.engine.model_config import ModelConfig
from baton.engine.models.draft_heads import DRAFT_HEADS, DraftHead, HeadConfig
from baton.engine.models.llama import Llama

EAGLE3 = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Names of EAGLE-3 heads in `architectures`."""


class EagleCheckpoint(Rearranged):
    """The tensors of an EAGLE-3 head by one set of names: those of a Llama with one layer, and `model.fc`."""

    left_out = "t2d"

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        name = name if name == "d2t" or name.startswith("lm_head.") else f"model.{name}"
        yield from super()._split(name, stored)


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A draft head whose weights are not loaded yet."""

    config: HeadConfig
    checkpoint: Checkpoint
    weight_format: PlainFormat

    def build(self, target: Llama, max_model_len: int, weights: Weights) -> DraftHead:
        """The head with these weights, which are those of its checkpoint."""
        model = replace(self.config.model, max_model_len=max_model_len)
        return DRAFT_HEADS[self.config.method](replace(self.config, model=model), weights, target)

    def identity(self, weights: Weights) -> str:
        """What the fingerprint says of it."""
        model = replace(self.config.model, max_model_len=0, eos_ids=(), dtype=None)
        identity = f"{replace(self.config, model=model)} {weights.fingerprint()}"
        return f"{self.config.method} {hashlib.sha256(identity.encode()).hexdigest()[:32]}"


def find_head(
    wanted: SpeculativeConfig, checkpoint: Checkpoint, weight_format: PlainFormat, directory: Path | None
) -> FoundHead:
    """The draft head for the model of this checkpoint. `directory`: that of `wanted.model`. Raises
    `ValueError` naming the model or the file and what does not fit."""
    model = checkpoint.config
    if directory is None:
        if (layer := checkpoint.next_token_layer()) is None:
            raise ValueError(
                f"--speculative-config: {checkpoint.source} has no layer that predicts further tokens; "
                "choose another method than mtp"
            )
        return FoundHead(HeadConfig(wanted.method, model), layer, weight_format)
    config = _eagle_config(directory / "config.json", model)
    if isinstance(checkpoint, DummyCheckpoint):
        return FoundHead(config, checkpoint.of(config.model), PlainFormat())
    return FoundHead(config, EagleCheckpoint(HFCheckpoint(directory, config.model)), PlainFormat())


def _eagle_config(path: Path, target: ModelConfig) -> HeadConfig:
    if not path.is_file():
        raise ValueError(f"--speculative-config: {path.parent} has no config.json, so it is no EAGLE-3 head")
    fields = read_json(path)
    architecture = (fields.get("architectures") or ["(none named)"])[0]
    if architecture not in EAGLE3:
        raise ValueError(f"{path}: {architecture} is no EAGLE-3 head ({', '.join(EAGLE3)} are)")
    settings = Settings({"target_hidden_size": target.hidden_size, **fields}, str(path))
    model = model_config_from_hf(
        {**fields, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}, {}, str(path)
    )
    shapes = (model.num_kv_heads, model.head_dim), settings.integer("target_hidden_size"), model.vocab_size
    needed = (target.num_kv_heads, target.head_dim), target.hidden_size, target.vocab_size
    names = "KV heads and their size", "target_hidden_size", "vocab_size"
    for name, value, other in zip(names, shapes, needed, strict=True):
        if value != other:
            raise ValueError(f"{path}: {name} is {value}, but {other} in the model; choose a head for it")
    if model.num_layers != 1 or model.quantization is not None:
        raise ValueError(f"{path}: only heads with one layer and plain weights are supported")
    settings_of_taps = {**fields, **(fields.get("eagle_config") or {})}
    taps = settings_of_taps.get("eagle_aux_hidden_state_layer_ids")
    layers = target.num_layers
    if taps is None:
        taps = [2, layers // 2, layers - 3]
    # The inputs of the layers come in the order of the layers, each once.
    if not isinstance(taps, list) or any(type(i) is not int for i in taps) or taps != sorted({*taps}):
        raise ValueError(f"{path}: eagle_aux_hidden_state_layer_ids {taps} must be layers in ascending order")
    if not taps or taps[0] < 0 or taps[-1] >= layers:
        raise ValueError(
            f"{path}: eagle_aux_hidden_state_layer_ids {taps} must be layers of the model, 0 to {layers - 1}"
        )
    return HeadConfig("eagle3", model, tuple(taps), bool(fields.get("norm_before_residual")))
