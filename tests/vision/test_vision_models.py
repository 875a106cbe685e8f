"""What is replaced of the towers of transformers: they compute the same, and the host waits for no layer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from baton.vision.vision_models import package_of, vision_model
from tests.device import DEVICE
from tests.vision.towers import EACH_SIZE, SETTINGS, SIZES, TOWERS


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma4"])
def test_a_tower_computes_what_transformers_computes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # a GPU convolves in TF32 by default
    torch.manual_seed(0)
    family, device = vision_model(kind), torch.device(DEVICE)
    module: Any = family.build(package_of(family), TOWERS[kind]).to(device).eval()
    with torch.no_grad():
        for values in (*module.parameters(), *module.buffers()):
            if values.isfinite().all() and values.is_floating_point():
                values.uniform_(0.1, 0.5)
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        for height, width in EACH_SIZE:
            pixels = torch.rand(height, width, 3, device=device)
            of_size = family.of_size(module, SETTINGS, device, height, width)
            found = family.features(module, pixels, SETTINGS, of_size)
            expected = _gemma4(module, pixels) if kind == "gemma4" else _qwen(module, pixels)
            assert len(found) == len(expected)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def _qwen(module: Any, pixels: Tensor) -> list[Tensor]:
    height, width, _ = pixels.shape
    plain = type(module)(module.config).to(DEVICE).eval()
    plain.load_state_dict(module.state_dict())
    plain.rotary_pos_emb.inv_freq.copy_(module.rotary_pos_emb.inv_freq)
    grid = torch.tensor([[1, height // 4, width // 4]], device=DEVICE)
    rows = pixels.permute(2, 0, 1).reshape(3, height // 8, 2, 4, width // 8, 2, 4)
    frames = rows.permute(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].repeat_interleave(2, dim=5)
    output = plain(frames.reshape(-1, 96), grid_thw=grid)
    return [output.pooler_output, *getattr(output, "deepstack_features", ())]


def _gemma4(module: Any, pixels: Tensor) -> list[Tensor]:
    """With a patch of padding, as the processor of transformers makes some."""
    height, width, _ = pixels.shape
    patches = pixels.reshape(height // 4, 4, width // 4, 4, 3).permute(0, 2, 1, 3, 4).reshape(1, -1, 48)
    places = [(column, row) for row in range(height // 4) for column in range(width // 4)]
    output = module.vision_tower(
        pixel_values=torch.cat([patches, patches[:, :4]], dim=1),
        pixel_position_ids=torch.tensor([[*places, *[(-1, -1)] * 4]], device=DEVICE),
    )
    return [module.embed_vision(output.last_hidden_state)]


@pytest.mark.parametrize("kind", TOWERS)
def test_the_host_reads_nothing_that_the_device_computes(kind: str) -> None:
    """Else it would wait for it, in each layer. On this device there is nothing to be read."""
    family = vision_model(kind)
    height, width = SIZES.get(kind, EACH_SIZE)[0]
    with torch.device("meta"):
        module = family.build(package_of(family), TOWERS[kind])
        pixels = torch.empty(height, width, 3)
    with torch.inference_mode():
        of_size = family.of_size(module, SETTINGS, torch.device("meta"), height, width)
        found = family.features(module, pixels, SETTINGS, of_size)
    assert all(each.shape == (height * width // 64, 64) for each in found)
