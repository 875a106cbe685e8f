"""What Baton knows of the models of one architecture."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.engine.loader.rearranged import Rearranged
from baton.engine.loader.settings import Settings
from baton.engine.model_config import (
    Activation,
    ExpertsConfig,
    GemmaConfig,
    LatentConfig,
    MiMoConfig,
    OtherAttention,
    StateConfig,
    VisionConfig,
)
from baton.engine.models.llama import Llama
from baton.vision.images import ImageSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How to read a model, and the class that computes it. All that reads settings raises `ValueError` naming
    the key that is wrong or not supported."""

    model: type[Llama]
    checkpoint: type[Rearranged] | None = None
    """Shows the tensors of a checkpoint in the form of most families. None: they have it."""
    settings: Callable[[Settings], Mapping[str, Any]] = lambda settings: settings.values
    """`config.json` with the names of most families, and with what published checkpoints leave out."""
    rotated: float | None = None
    """The part of each head that is rotated, where the configuration does not say. None: no head of such a
    model is rotated in part."""
    without_positions: Callable[[Settings], bool] = lambda settings: False
    """Whether attention has no positions (NoPE)."""
    experts: Callable[[Settings], ExpertsConfig | None] | None = None
    """None: no such model has experts."""
    state: Callable[[Settings, float], StateConfig] | None = None
    """The state layers; the number is the eps of norms. None: no such model has any."""
    latent: Callable[[Settings, Settings], LatentConfig] | None = None
    """Multi-head latent attention, from all settings and those of the rotation. None: no such model has
    it."""
    further: str = "num_nextn_predict_layers"
    """The setting with the number of layers behind the others that predict further tokens."""
    gemma: Callable[[Settings], GemmaConfig] | None = None
    """As in `ModelConfig`. None: a model of another family."""
    mimo: Callable[[Settings], MiMoConfig] | None = None
    """The same."""
    other_attention: Callable[[Settings, Sequence[str]], OtherAttention] | None = None
    """From all settings and the types of layers. None: all layers of such a model attend alike."""
    head_gates: bool = False
    """As in `ModelConfig`."""
    reads_layers: bool = False
    """Whether `per_layer_config` is read, or says what other settings say, too."""
    vision: Callable[[Settings, Settings, ImageSettings], VisionConfig] | None = None
    """How the model takes images, from all settings, those of the rotation, and those of the processor. None:
    no such model takes any."""
    needs_vision: bool = True
    """Whether a checkpoint without an encoder of images is refused."""
    activation: Activation = None
    """As in `ModelConfig`."""
    not_supported: Callable[[Settings], Iterator[str]] = lambda settings: iter(())
    """What a checkpoint of this family may have, and no class can do."""
