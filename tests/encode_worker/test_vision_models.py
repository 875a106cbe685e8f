"""What is replaced of the towers of transformers: they compute the same, and the host waits for no layer."""

from typing import Any

import pytest
import torch

from baton.content.images import ImageSettings
from baton.encode_worker.vision_models import package_of, vision_model
from tests.device import DEVICE

TOWER = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 4, "num_position_embeddings": 16, "initializer_range": 0.4,
}  # fmt: skip
"""Of Qwen."""
KINDS = {"qwen3_vl": {**TOWER, "deepstack_visual_indexes": [0, 1]}, "qwen3_5": TOWER}


SETTINGS = ImageSettings(7, 4, 2, 2, 64, 4096, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_a_tower_computes_what_transformers_computes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # a GPU convolves in TF32 by default
    torch.manual_seed(0)
    family = vision_model(kind)
    module: Any = family.build(package_of(family), KINDS[kind]).to(DEVICE).eval()
    plain: Any = type(module)(module.config).to(DEVICE).eval()
    plain.load_state_dict(module.state_dict())
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        for height, width in [(16, 40), (24, 8), (16, 40)]:
            pixels = torch.rand(height, width, 3, device=DEVICE)
            found = family.features(module, pixels, SETTINGS)
            grid = torch.tensor([[1, height // 4, width // 4]], device=DEVICE)
            rows = pixels.permute(2, 0, 1).reshape(3, height // 8, 2, 4, width // 8, 2, 4)
            frames = rows.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].repeat_interleave(2, dim=5)
            output = plain(frames.reshape(-1, 96), grid_thw=grid)
            expected = [output.pooler_output, *getattr(output, "deepstack_features", ())]
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_reads_nothing_that_the_device_computes(kind: str) -> None:
    """Else it would wait for it, in each layer. On this device there is nothing to be read."""
    family = vision_model(kind)
    with torch.device("meta"):
        module = family.build(package_of(family), KINDS[kind])
        pixels = torch.empty(16, 40, 3)
    with torch.inference_mode():
        found = family.features(module, pixels, SETTINGS)
    assert all(each.shape == (10, 64) for each in found)
