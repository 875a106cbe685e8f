"""Sizes of images are those of transformers' processors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from baton.content.images import MEAN, STD, ImageSettings, image_settings

SETTINGS = ImageSettings(5, 16, 2, 2, 1 << 16, 1 << 24, (0.5,) * 3, (0.5,) * 3)
sides = st.integers(1, 20_000)


@given(sides, sides)
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
