"""Shapes of benches are models that other engines can read.

Here, since tests of this package have imported transformers.
"""

from pathlib import Path

import pytest

from baton.bench.lab.shapes import SHAPES, write_shape


@pytest.mark.parametrize("name", SHAPES)
def test_other_engines_can_read_a_shape(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(write_shape(name, tmp_path))
    shape = SHAPES[name].get("text_config", SHAPES[name])
    assert config.architectures == SHAPES[name]["architectures"]
    assert config.get_text_config().num_hidden_layers == shape["num_hidden_layers"]
