"""Metadata of GGUF files: each key that llama.cpp knows is read, refused, or changes nothing."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from baton.engine.loader.gguf_checkpoint import KINDS, GGUFCheckpoint
from baton.engine.loader.gguf_metadata import KNOWN, NEUTRAL, OF_OTHER_USES, OF_TENSORS
from baton.engine.model_config import ModelConfig, RopeScaling, YarnScaling
from tests.engine.checkpoints import is_refused
from tests.engine.test_gguf import write

METADATA: dict[str, Any] = {
    "block_count": 8,
    "context_length": 1000,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
USUAL = 1 + 0.1 * math.log(4)
"""What YaRN makes of attention."""
OF_KIND: dict[str, dict[str, Any]] = {
    "gemma3": {"attention.sliding_window": 8, **YARN},
    "qwen3moe": {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32, **YARN},
}
VALUES = (500, 0.5, True, "linear", [1, 0])


def config_of(path: Path, kind: str, **metadata: Any) -> ModelConfig:
    """Of a file with these metadata and no layer."""
    file = gguf.GGUFWriter(path, kind)
    for key, value in metadata.items():
        of_type = {int: file.add_uint32, float: file.add_float32, bool: file.add_bool, list: file.add_array}
        add: Any = of_type.get(type(value), file.add_string)
        add(f"{kind}.{key}", value)
    file.add_tensor("token_embd.weight", np.zeros((8, 64), np.float16))
    write(file)
    return GGUFCheckpoint(path).config


@pytest.mark.parametrize("kind", KINDS)
def test_each_key_is_read_or_refused_or_changes_nothing(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    usual = METADATA | OF_KIND.get(kind, YARN)
    expected, refused = config_of(path, kind, **usual), 0

    def differs(**metadata: Any) -> None:
        assert config_of(path, kind, **metadata) != expected, metadata

    for key in sorted(KNOWN - OF_TENSORS - OF_OTHER_USES):
        for value in VALUES:
            if value not in NEUTRAL.get(key, ()):
                refused += is_refused(partial(differs, **{**usual, key: value}), str(path))
    assert refused > 100


@pytest.mark.parametrize("kind", KINDS)
def test_neutral_values_change_nothing(kind: str, tmp_path: Path) -> None:
    usual = METADATA | OF_KIND.get(kind, {})
    neutral = {key: value for key, values in NEUTRAL.items() for value in values}
    others = {"final_logit_softcapping": 0.0, "attention.value_length": 16, "vocab_size": 8}
    path = tmp_path / "model.gguf"
    assert config_of(path, kind, **usual, **neutral, **others) == config_of(path, kind, **usual)


def test_a_key_that_is_not_read_is_named(tmp_path: Path) -> None:
    """Mixtral, and OLMo 3 in the architecture of OLMo 2."""
    for kind, more in {"llama": {"expert_count": 8}, "olmo2": {"attention.sliding_window": 4096}}.items():
        (key, value), path = *more.items(), tmp_path / "model.gguf"
        with pytest.raises(ValueError, match=rf"gguf: metadata {kind}\.{key} {value} is not supported$"):
            config_of(path, kind, **METADATA, **more)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"rope.scaling.factor": 2.0}, RopeScaling("linear", 2.0)),
        ({"rope.scale_linear": 2.0}, RopeScaling("linear", 2.0)),  # before 2024
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, RopeScaling("linear", 4.0)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, None),
        (YARN, YarnScaling(4.0, 16, USUAL, 32.0, 1.0, truncate=True)),
        (
            {**YARN, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
            YarnScaling(4.0, 16, USUAL, 16.0, 2.0, truncate=True),
        ),
        ({**YARN, "rope.scaling.yarn_attn_factor": 1.5}, YarnScaling(4.0, 16, 1.5, 32.0, 1.0, truncate=True)),
        (
            {**YARN, "rope.scaling.attn_factor": 0.5},
            YarnScaling(4.0, 16, 0.5 * USUAL, 32.0, 1.0, truncate=True),
        ),
    ],
)
def test_rotations_are_scaled_as_in_llama_cpp(
    metadata: dict[str, Any], expected: RopeScaling | YarnScaling | None, tmp_path: Path
) -> None:
    """A factor without a type is linear. `attn_factor` multiplies what a factor of YaRN makes of attention.
    Further settings of YaRN are those of the model in transformers; llama.cpp reads them for some
    architectures."""
    found = config_of(tmp_path / "model.gguf", "llama", **METADATA, **metadata).rope_scaling
    assert found == expected


@pytest.mark.parametrize(
    "metadata",
    [
        {"rope.scaling.type": "longrope"},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 0.5},
        {"rope.scaling.type": "yarn", "rope.scaling.attn_factor": 0.5},
        {**YARN, "rope.scaling.yarn_ext_factor": 0.5},
        {**YARN, "rope.scaling.yarn_log_multiplier": 0.1},
    ],
)
def test_other_rotations_are_refused(metadata: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.gguf: .*rope.*scaling.* is not supported"):
        config_of(tmp_path / "model.gguf", "llama", **METADATA, **metadata)
