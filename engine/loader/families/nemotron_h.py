"""Nemotron-H: Mamba-2 or attention without positions, and behind most of them an MLP or experts.

A checkpoint counts each of these as a layer. Here a layer has a mixer, and the MLP or the experts behind it
if there are any.

Time steps are bounded by `time_step_limit`, as in the code that NVIDIA publishes with its checkpoints, and in
training. transformers 5.23 bounds them by `time_step_min`, which is of the initial weights
(huggingface/transformers, pull request 48989), and vLLM 0.32 has no bounds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from baton.engine.loader.families.family import Family
from baton.engine.loader.hybrid_config import dt_limits, state_layers
from baton.engine.loader.latent_config import latent_experts
from baton.engine.loader.rearranged import Files, Piece, Rearranged
from baton.engine.loader.settings import Settings
from baton.engine.model_config import ExpertsConfig, SquaredReLU, StateConfig
from baton.engine.models.hybrids import Bamba

LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
"""Of `hybrid_override_pattern`."""
WORDS = {"linear_attention": "mamba", "full_attention": "attention"}
"""Of newer versions, and of older ones."""
MIXERS = {True: "mamba", False: "self_attn"}
"""The names of mixers here, by whether they have states."""


class NemotronH(Bamba):
    shared_name = "shared_experts"


class NemotronHCheckpoint(Rearranged):
    left_out = "mtp."

    def __init__(self, files: Files) -> None:
        self._blocks: list[tuple[str, str]] = []
        """Of each layer of the checkpoint, the names of its parts here: its norm, and the rest."""
        config = files.config
        assert config.state is not None, "the loader sets it for this architecture"
        for layer in range(config.num_layers):
            name, mixer = f"model.layers.{layer}.", MIXERS[layer in config.state.layers]
            self._blocks.append((f"{name}input_layernorm.", f"{name}{mixer}."))
            if layer not in config.without_mlp:
                self._blocks.append((f"{name}post_attention_layernorm.", f"{name}mlp."))
        super().__init__(files)

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        yield from super()._split(self._renamed(name), stored)

    def _renamed(self, name: str) -> str:
        name = name.replace("backbone.", "model.", 1)
        name = name.replace("model.embeddings.", "model.embed_tokens.").replace(
            "model.norm_f.", "model.norm."
        )
        words = name.split(".", 4)
        if len(words) < 5 or words[:2] != ["model", "layers"]:
            return name
        _, _, number, part, parameter = words
        if not number.isdecimal() or int(number) >= len(self._blocks) or part not in ("norm", "mixer"):
            return name
        return self._blocks[int(number)][part == "mixer"] + parameter


def blocks(settings: Settings) -> Sequence[str]:
    """The kind of each layer of the checkpoint, in the words of older versions."""
    kinds, pattern = (
        settings.get("layers_block_type") or settings.get("layer_types"),
        settings.get("hybrid_override_pattern"),
    )
    if kinds is None and isinstance(pattern, str):
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    kinds = [WORDS.get(str(kind), str(kind)) for kind in kinds] if isinstance(kinds, list) else []
    for before, kind in zip(["mlp", *kinds], kinds, strict=False):
        if kind not in LETTERS.values():
            raise ValueError(
                f"{settings.source}: layer type {kind!r} is not supported ({', '.join(WORDS)}, moe, mlp are)"
            )
        if before in ("mlp", "moe") and kind in ("mlp", "moe"):
            raise ValueError(
                f"{settings.source}: a layer {kind!r} without a mixer before it is not supported"
            )
    if not kinds:
        raise ValueError(
            f"{settings.source}: layers_block_type or hybrid_override_pattern must name the layers"
        )
    return kinds


def in_words_of_others(settings: Settings) -> Mapping[str, Any]:
    kinds = blocks(settings)
    mixers = [at for at, kind in enumerate(kinds) if kind in ("mamba", "attention")]
    behind = [kinds[at + 1] if at + 1 < len(kinds) and at + 1 not in mixers else None for at in mixers]
    return {
        **settings.values,
        "num_hidden_layers": len(mixers),
        "layer_types": [kinds[at] for at in mixers],
        "rms_norm_eps": settings.get("layer_norm_epsilon", 1e-5),
        "mlp_layer_types": ["sparse" if kind == "moe" else "dense" for kind in behind],
        "layers_without_mlp": [layer for layer, kind in enumerate(behind) if kind is None],
        "num_nextn_predict_layers": None,
    }


def mamba2_config(settings: Settings, norm_eps: float) -> StateConfig:
    integer = settings.integer
    heads, groups = integer("mamba_num_heads", 128), integer("n_groups", 8)
    if heads % groups:
        raise ValueError(f"{settings.source}: {heads} Mamba heads in {groups} groups is not supported")
    return StateConfig(
        state_layers(settings, integer("num_hidden_layers")),
        heads,
        integer("mamba_head_dim", 64),
        integer("ssm_state_size", 128),
        groups,
        integer("conv_kernel", 4),
        bool(settings.get("use_conv_bias", True)),
        bool(settings.get("use_bias", False)),
        dt_limits(settings),
        norm_eps,
    )


def experts(settings: Settings) -> ExpertsConfig | None:
    if "sparse" not in settings.values["mlp_layer_types"]:
        return None
    shared = settings.integer("moe_shared_expert_intermediate_size")
    experts = latent_experts(settings, first_dense=0)
    size = settings.integer("moe_latent_size") if settings.get("moe_latent_size") else 0
    return replace(experts, shared_intermediate_size=shared, activation=SquaredReLU(), latent_size=size)


def not_supported(settings: Settings) -> Iterator[str]:
    supported = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
    for name, value in supported.items():
        if settings.get(name) not in (None, value):
            yield f"{name} {settings.get(name)!r} of {settings.architecture}"


FAMILY = Family(
    model=NemotronH,
    checkpoint=NemotronHCheckpoint,
    settings=in_words_of_others,
    without_positions=lambda settings: True,
    experts=experts,
    state=mamba2_config,
    activation=SquaredReLU(),
    not_supported=not_supported,
)
