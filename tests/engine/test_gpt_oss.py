"""gpt-oss: checkpoints with MXFP4 experts. Its tokens are compared with transformers in `test_models`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine import Engine, EngineConfig
from baton.engine.execution.cache_limits import CacheLimits
from baton.engine.execution.numerics import numerics_of
from baton.engine.kernels.quantized.reference import four_bits
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import PlainFormat
from baton.engine.loader import choose_format, open_checkpoint
from baton.engine.loader.gpt_oss import GptOssCheckpoint, Mxfp4
from baton.engine.loader.hf import HFCheckpoint
from baton.engine.models.cache_spec import AttentionCache
from tests.device import DEVICE
from tests.engine.checkpoints import edit_json, edited_tensors, load
from tests.engine.conftest import request_of, run, save_tiny, tokens_of

EXPERTS = "model.layers.1.mlp.experts"


def quantize(directory: Path, to: Path) -> None:
    """Replaces the experts in the checkpoint by random MXFP4 values, and writes these to another one."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # late, since it takes a second

    generator = torch.Generator().manual_seed(0)
    plain, packed = load_file(directory / "model.safetensors"), {}
    for name, tensor in plain.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            shape = (experts, rows, columns // 32, 16)
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=generator)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        else:
            packed[name] = tensor
    to.mkdir()
    shutil.copy(directory / "config.json", to)
    edit_json(to / "config.json", quantization_config={"quant_method": "mxfp4"})
    save_file(plain, directory / "model.safetensors")
    save_file(packed, to / "model.safetensors")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same weights, plain and with MXFP4 experts."""
    directory = tmp_path_factory.mktemp("gpt_oss")
    save_tiny(directory / "plain", "GptOss")
    quantize(directory / "plain", directory / "mxfp4")
    return directory / "plain", directory / "mxfp4"


def test_mxfp4_weights_give_the_tokens_and_the_fingerprint_of_plain_ones(
    checkpoints: tuple[Path, Path],
) -> None:
    def outputs(path: Path) -> Any:
        engine = load(path, num_blocks=32, device=DEVICE)
        request = request_of(0, range(3, 40), max_tokens=8, ignore_eos=True)
        return engine.model_fingerprint, tokens_of(engine, [request])

    plain, mxfp4 = checkpoints
    assert outputs(mxfp4) == outputs(plain)


def test_whole_experts_in_mxfp4_on_each_rank_give_the_same_tokens(
    checkpoints: tuple[Path, Path], ranks: Callable[..., Engine]
) -> None:
    """A rank reads no row of the experts of the other one."""
    request = request_of(0, range(3, 40), max_tokens=8, ignore_eos=True)

    def outputs(size: int) -> Any:
        engine = ranks(checkpoints[1], size, enable_expert_parallel=size > 1)
        return engine.model_fingerprint, tokens_of(engine, [request])

    assert outputs(2) == outputs(1)


def test_a_cached_prefix_gives_the_same_tokens(checkpoints: tuple[Path, Path]) -> None:
    """The cached part is longer than a window."""
    prefix, plain = [*range(3, 70)], checkpoints[0]

    def tokens(*prompts: list[int]) -> list[list[int]]:
        engine = load(plain, num_blocks=32, block_size=16, device=DEVICE, enable_prefix_caching=True)
        requests = [request_of(i, prompt, max_tokens=8, ignore_eos=True) for i, prompt in enumerate(prompts)]
        results = [run(engine, [request])[request.id].tokens for request in requests]
        assert (engine.stats().prefix_cache_hits > 0) == (len(prompts) > 1)
        return results

    beside, longer = [*prefix, 80, 81], [*prefix, *range(100, 130)]
    assert tokens(beside, longer)[1] == tokens(longer)[0]


@pytest.mark.parametrize("name", ["gate_proj.weight", "up_proj.weight", "down_proj.weight", "up_proj.bias"])
def test_parts_of_an_expert_are_those_of_the_whole(checkpoints: tuple[Path, Path], name: str) -> None:
    """Also where a part ends within a group of values with one scale."""
    plain, mxfp4 = (GptOssCheckpoint(HFCheckpoint(path)) for path in checkpoints)
    name = f"{EXPERTS}.2.{name}"
    shape = plain.shape(name)
    assert shape is not None
    assert mxfp4.shape(name) == shape
    expected = plain.read(name, [unsharded(size) for size in shape]).float()
    assert expected.shape == shape
    for cut in (0, 1, 40, 63):
        parts = [Shard(cut, shape[0], shape[0]), *(Shard(cut // 2, cut + 1, size) for size in shape[1:])]
        slices = tuple(part.indices for part in parts)
        for checkpoint in (plain, mxfp4):
            assert torch.equal(checkpoint.read(name, parts).float(), expected[slices])


@pytest.mark.parametrize("kind", ["gate", "down"])
def test_groups_of_an_expert_have_its_values(checkpoints: tuple[Path, Path], kind: str) -> None:
    """Also those of a part, unless it cuts a group."""
    plain, mxfp4 = (GptOssCheckpoint(HFCheckpoint(path)) for path in checkpoints)
    name = f"{EXPERTS}.2.{kind}_proj.weight"
    rows, columns = mxfp4.shape(name)
    parts = [Shard(3, rows, rows), Shard(32, columns, columns)]
    groups = mxfp4.groups(name, parts)
    assert groups is not None
    assert torch.equal(groups.values(), plain.read(name, parts).float())
    packed = four_bits(*groups[:3], torch.bfloat16, floats=groups.floats)
    assert torch.equal(packed.exact(), groups.values())
    assert mxfp4.groups(name, [parts[0], Shard(16, columns, columns)]) is None
    assert plain.groups(name, parts) is None


def test_in_the_exact_mode_a_gpu_keeps_experts_packed(checkpoints: tuple[Path, Path]) -> None:
    """Their products have other bits than those of plain matrices, though the values are the same."""
    config, cpu = EngineConfig(str(checkpoints[1]), batch_invariant=True), torch.device("cpu")
    model = open_checkpoint(config, cpu).config
    packed, plain = (choose_format(config, model, torch.device(name)) for name in ("cuda", "cpu"))
    assert isinstance(packed, Mxfp4)
    assert type(plain) is PlainFormat
    limits = CacheLimits(torch.bfloat16, 16, 64, [AttentionCache(2, 16, torch.bfloat16)])
    assert numerics_of(config, limits, packed, cpu) != numerics_of(config, limits, plain, cpu)


def test_dummy_weights_need_no_format(checkpoints: tuple[Path, Path]) -> None:
    _, mxfp4 = checkpoints
    load(mxfp4, load_format="dummy", device=DEVICE)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("down_proj_scales", lambda _: None, r"tensor .*\.1\.mlp\.experts\.down_proj_scales is missing"),
        ("down_proj_scales", lambda scales: scales[:, :1], r"scales is \[8, 1, 3\], which does not fit"),
        ("down_proj_blocks", lambda blocks: blocks[0], r"down_proj_blocks is \[64, 3, 16\]"),
        ("down_proj_blocks", lambda blocks: blocks.float(), r"down_proj_blocks is of torch\.float32"),
        ("down_proj_bias", lambda _: None, r"tensor .*experts\.0\.down_proj\.bias is missing"),
        ("gate_up_proj_bias", lambda biases: biases.repeat(1, 2)[:, :193], r"bias is \[8, 193\]"),
        ("gate_up_proj_bias", lambda _: torch.empty(1 << 40, 0), r"_proj_bias is \[1099511627776, 0\]"),
        ("gate_up_proj_bias", lambda biases: biases[:5], r"tensor .*experts\.5\.gate_proj\.bias is missing"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    checkpoints: tuple[Path, Path],
    tmp_path: Path,
    name: str,
    change: Callable[[Tensor], Tensor | None],
    message: str,
) -> None:
    _, mxfp4 = checkpoints
    shutil.copytree(mxfp4, tmp_path, dirs_exist_ok=True)
    with edited_tensors(tmp_path) as tensors:
        changed = change(tensors.pop(f"{EXPERTS}.{name}"))
        if changed is not None:
            tensors[f"{EXPERTS}.{name}"] = changed
    with pytest.raises(ValueError, match=message):
        load(tmp_path, device=DEVICE)
