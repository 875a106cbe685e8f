"""Sizes of images are those of transformers' processors."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from baton.vision.images import (
    GEMMA3,
    GEMMA4,
    MEAN,
    SOFT_TOKENS,
    STD,
    Around,
    ImageSettings,
    image_settings,
    processor_settings,
)

SETTINGS = ImageSettings(5, 16, 2, 2, 1 << 16, 1 << 24, (0.5,) * 3, (0.5,) * 3)
sides = st.integers(1, 20_000)


@given(sides, sides)
@example(4110, 4100)  # whole tokens of it have just the most pixels
def test_sizes_equal_transformers(height: int, width: int) -> None:
    try:
        expected = smart_resize(height, width, 32, 1 << 16, 1 << 24)
    except ValueError:
        with pytest.raises(ValueError, match="too narrow"):
            SETTINGS.size(height, width)
        return
    assert SETTINGS.size(height, width) == expected
    rows, columns = SETTINGS.grid(*expected)
    assert SETTINGS.pixel_bytes(rows, columns) == expected[0] * expected[1] * 3


@given(sides, sides, st.sampled_from(SOFT_TOKENS))
def test_sizes_of_gemma_4_equal_transformers(height: int, width: int, tokens: int) -> None:
    config = {"architectures": [GEMMA4], "vision_config": {}}
    settings = image_settings(config, {"max_soft_tokens": tokens}, "here")
    assert settings is not None
    try:
        expected = get_aspect_ratio_preserving_size(height, width, 16, tokens * 9, 3)
    except ValueError:
        with pytest.raises(ValueError, match="has no token"):
            settings.size(height, width)
        return
    found = settings.size(height, width)
    assert found == expected
    assert settings.takes(*settings.grid(*found))
    assert not settings.takes(1, tokens + 1)
    low = settings.of_low_detail.size(height, width)
    assert low[0] * low[1] <= 70 * 48**2


def test_settings_of_gemma_3() -> None:
    config = {
        "architectures": [GEMMA3],
        "vision_config": {"image_size": 896, "patch_size": 14},
        "mm_tokens_per_image": 256,
        "image_token_index": 262144,
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
    }
    found = image_settings(config, {"size": {"height": 896, "width": 896}}, "here")
    assert found is not None
    assert found.size(20, 3000) == (896, 896)
    assert found.grid(896, 896) == (16, 16)
    assert found.of_low_detail == found
    assert (found.most_tokens, found.grid_within(1 << 30)) == (256, (16, 16))
    assert found.around == Around(255999, 255999, 256000, "\n\n")
    assert not found.takes(8, 32)
    for processor, message in (
        ({"do_pan_and_scan": True}, "here: do_pan_and_scan is not supported"),
        ({"size": {"height": 448, "width": 896}}, "here: size"),
        ({"resample": 9}, "here: resample must be a filter"),
    ):
        with pytest.raises(ValueError, match=message):
            image_settings(config, processor, "here")
    with pytest.raises(ValueError, match="here: mm_tokens_per_image 200 is not supported"):
        image_settings({**config, "mm_tokens_per_image": 200}, {}, "here")


def test_settings_of_a_processor_stand_in_one_of_two_files() -> None:
    files: dict[str, dict[str, Any]] = {"processor_config.json": {"image_processor": {"max_soft_tokens": 70}}}
    assert processor_settings(lambda name: files.get(name, {})) == {"max_soft_tokens": 70}
    files["preprocessor_config.json"] = {"max_soft_tokens": 140}
    assert processor_settings(lambda name: files.get(name, {})) == {"max_soft_tokens": 140}


def test_a_name_covers_the_file_and_all_settings() -> None:
    other = ImageSettings(5, 16, 2, 2, 1 << 16, 1 << 24, (0.5,) * 3, (0.5, 0.5, 0.4))
    assert len({SETTINGS.name(b"one"), SETTINGS.name(b"two"), other.name(b"one")}) == 3


def test_settings_of_a_checkpoint() -> None:
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {}, "image_token_id": 9}
    found = image_settings(config, {"size": {"longest_edge": 4096, "shortest_edge": 1024}}, "here")
    assert found == ImageSettings(9, 16, 2, 2, 1024, 4096, tuple(MEAN), tuple(STD))
    assert image_settings({**config, "architectures": ["LlamaForCausalLM"]}, {}, "here") is None
    with pytest.raises(ValueError, match="here: patch_size must be a positive integer, not 0"):
        image_settings(config, {"patch_size": 0}, "here")
    with pytest.raises(ValueError, match="here: image_std must be 3 numbers above 0"):
        image_settings(config, {"image_std": [0, 1, 1]}, "here")
