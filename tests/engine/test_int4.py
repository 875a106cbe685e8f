"""INT4 checkpoints (GPTQ, AWQ, compressed-tensors) and INT4 on load: values, ranks, what cannot be used."""

import shutil
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine import Engine, EngineConfig
from baton.engine.kernels import FP8
from baton.engine.layers.current_step import CurrentStep, computing
from baton.engine.layers.fp8_linear import Fp8Linear
from baton.engine.layers.grouped_linear import ByRows, packs
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.ranks import Ranks, Shard, unsharded
from baton.engine.layers.weights import Stack, Weights
from baton.engine.loader import choose_format, int4_on_load, open_checkpoint
from baton.engine.loader.by_module import ByModule
from baton.engine.loader.int4_on_load import rounded
from tests.engine.checkpoints import edit_json, edited_tensors, load
from tests.engine.conftest import request_of, save_tiny, tokens_of
from tests.engine.quantized import KINDS, SIZES, save_quantized, words

CPU = torch.device("cpu")


def configure(directory: Path, settings: dict[str, Any]) -> None:
    edit_json(directory / "config.json", quantization_config=settings)


def check_tokens(ours: Engine, exact: Engine) -> None:
    requests = [request_of(i, range(3, 9 + 11 * i), max_tokens=12, ignore_eos=True) for i in range(3)]
    assert tokens_of(ours, requests) == tokens_of(exact, requests)
    assert ours.model_fingerprint != exact.model_fingerprint


@pytest.mark.skipif(not packs(4, torch.bfloat16, CPU), reason="this CPU has no AVX-512")
@pytest.mark.parametrize("kind", ["gptq", "in-rows-symmetric"])
def test_packed_products_of_decodes_and_prompts(kind: str, tmp_path: Path) -> None:
    exact = save_quantized(tmp_path, kind)
    values = load_file(exact / "model.safetensors")
    weights = weights_of(tmp_path, torch.bfloat16)
    stem = "model.layers.1.mlp"
    linear = weights.linear([f"{stem}.gate_proj", f"{stem}.up_proj"], [unsharded(192)] * 2, unsharded(128))
    expected = torch.cat([values[f"{stem}.{name}_proj.weight"] for name in ("gate", "up")])
    x = torch.randn(20, 128).bfloat16()
    for decodes in (0, 3):
        with computing(CurrentStep(decodes)):
            torch.testing.assert_close(linear(x).float(), x.float() @ expected.T, rtol=0.03, atol=0.3)


@pytest.mark.skipif(not packs(4, torch.bfloat16, CPU), reason="this CPU has no AVX-512")
def test_a_packed_output_projection_gets_one_row_of_each_request(tmp_path: Path) -> None:
    """No row is of a prompt, whatever the decodes of the step, and also when prompts are scored."""
    save_quantized(tmp_path, "in-rows-symmetric", head=True, vocab_size=208, tie_word_embeddings=False)
    linear = weights_of(tmp_path, torch.bfloat16).linear(["lm_head"], [unsharded(208)], unsharded(128))
    assert isinstance(linear, ByRows)
    x = torch.randn(3, 128).bfloat16()
    assert linear(x).equal(linear.packed(x))


def weights_of(directory: Path, dtype: torch.dtype) -> Weights:
    config = EngineConfig(str(directory))
    checkpoint = open_checkpoint(config, CPU)
    weight_format = choose_format(config, checkpoint.config, CPU)
    return Weights(checkpoint, dtype, CPU, lambda *_: None, weight_format, Ranks())


@pytest.mark.parametrize("kind", ["gptq", "awq", "in-rows", "in-rows-symmetric"])
def test_a_rank_reads_its_part(kind: str, tmp_path: Path) -> None:
    """Rows anywhere, also within a word; columns between groups."""
    values = load_file(save_quantized(tmp_path, kind) / "model.safetensors")
    weights = weights_of(tmp_path, torch.float32)
    weight_format = weights.format
    assert isinstance(weight_format, ByModule)
    name = "model.layers.0.mlp.down_proj"
    for rows, columns in (((0, 128), (0, 192)), ((21, 102), (64, 160)), ((64, 128), (96, 192))):
        [stored] = weight_format.formats
        read = stored.values(weights, name, Shard(*rows, 128), Shard(*columns, 192))
        expected = values[f"{name}.weight"][slice(*rows), slice(*columns)]
        torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"columns \[48, 96\) of .*down_proj in .* and groups of 32 .*parallel-size"
    ):
        weights.linear([name], [unsharded(128)], Shard(48, 96, 192))


def test_a_rank_has_rows_but_no_part_of_the_columns_in_another_order(tmp_path: Path) -> None:
    values = load_file(save_quantized(tmp_path, "desc_act") / "model.safetensors")
    weights, name = weights_of(tmp_path, torch.float32), "model.layers.0.mlp.down_proj"
    weight_format = weights.format
    assert isinstance(weight_format, ByModule)
    [stored] = weight_format.formats
    read = stored.values(weights, name, Shard(21, 102, 128), unsharded(192))
    torch.testing.assert_close(read, values[f"{name}.weight"][21:102], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"g_idx: --tensor-parallel-size cuts groups"):
        weights.linear([name], [unsharded(128)], Shard(64, 160, 192))


def test_experts_of_which_only_some_can_be_packed_are_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU packs no columns in another order."""
    save_quantized(tmp_path, "awq", "Qwen3Moe", moe_intermediate_size=64)
    stacks = [
        Stack([f"model.layers.1.mlp.experts.{i}.up_proj"], [unsharded(64)], unsharded(SIZES["hidden_size"]))
        for i in range(8)
    ]

    def experts() -> Tensor:
        weights = weights_of(tmp_path, torch.float32)
        found = weights.format.experts(weights, stacks)
        assert isinstance(found, Tensor)
        return found

    plain, packs = experts(), cycle([True, False, False])
    monkeypatch.setattr("baton.engine.layers.grouped_linear._packs_on_gpu", lambda *_: next(packs))
    torch.testing.assert_close(experts(), plain)


def test_the_fingerprint_covers_all_bits_of_a_word_and_what_they_mean(tmp_path: Path) -> None:
    save_quantized(tmp_path, "gptq")
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.down_proj.qweight"
    tensors = load_file(path)
    prints = set()
    for change in range(3):
        tensors[name][0, 7] ^= change  # of the lowest of eight integers
        save_file(tensors, path)
        weights = weights_of(tmp_path, torch.float32)
        weights.stored(name, None, torch.int32)
        prints.add(weights._taken[name])
    assert len(prints) == 3
    identity = weights.format.identity
    configure(tmp_path, KINDS["gptq"][0] | {"checkpoint_format": "gptq_v2"})
    assert weights_of(tmp_path, torch.float32).format.identity != identity


def test_unequal_groups_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "gptq")
    with edited_tensors(tmp_path) as tensors:
        tensors["model.layers.1.mlp.down_proj.g_idx"][0] = 1
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.g_idx: .* a group has not 32 columns"):
        load(tmp_path)


def test_matrices_of_one_input_with_different_orders_are_dequantized(tmp_path: Path) -> None:
    exact = save_quantized(tmp_path, "desc_act")
    name = "model.layers.1.mlp.up_proj"
    with edited_tensors(exact) as values:
        values[f"{name}.weight"] = values[f"{name}.weight"].flip(1)
    with edited_tensors(tmp_path) as tensors:
        codes = tensors[f"{name}.qweight"]
        halves = torch.stack([(codes >> shift) & 15 for shift in range(0, 32, 4)], dim=1).flatten(0, 1)
        tensors[f"{name}.qweight"] = words(halves.flip(0).T).T
        tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"].flip(0)
    check_tokens(load(tmp_path, num_blocks=32), load(exact, num_blocks=32))


def test_quantizing_on_load(tmp_path: Path) -> None:
    """In groups of 128 columns, or of 64 where these do not divide them. The output projection is in FP8."""
    exact = tmp_path / "exact"
    save_tiny(tmp_path, "Qwen2", **SIZES, vocab_size=208)
    shutil.copytree(tmp_path, exact)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            groups = rounded(weight, 128 if weight.shape[1] == 128 else 64)
            step = groups.scales.abs().repeat_interleave(groups.size, dim=1)
            # The last code of 16 is as far as the largest number of the other sign may be.
            assert ((groups.values() - weight).abs() <= 1.0001 * step).all()
            assert ((groups.values() - weight).abs() <= 0.5001 * step).float().mean() > 0.95
            tensors[name] = groups.values()
    scales = tensors["lm_head.weight"].abs().amax(dim=1, keepdim=True) / 448
    tensors["lm_head.weight"] = (tensors["lm_head.weight"] / scales).to(FP8).float() * scales
    save_file(tensors, exact / "model.safetensors")
    on_cpu = partial(load, device="cpu", num_blocks=32)
    check_tokens(on_cpu(tmp_path, quantization="int4"), on_cpu(exact))


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({"vocab_size": 208}, Fp8Linear),
        ({"vocab_size": 200}, PlainLinear),  # FP8 needs multiples of 16
        ({"vocab_size": 208, "tie_word_embeddings": True}, PlainLinear),
    ],
    ids=["fp8", "unaligned", "tied"],
)
def test_the_output_projection_of_int4_on_load(
    shape: dict[str, Any], kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that multiplies FP8 numbers."""
    monkeypatch.setattr("baton.engine.loader.fp8_formats.from_hopper_on", lambda device: True)
    save_tiny(tmp_path, "Llama", **SIZES, **shape)
    engine = load(tmp_path, device="cpu", quantization="int4")
    assert type(engine.runner.model.head.product) is kind


def test_memory_sizing_counts_an_output_projection_in_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save_tiny(tmp_path, "Llama", **SIZES)
    config = EngineConfig(str(tmp_path), quantization="int4")
    model = open_checkpoint(config, CPU).config
    chosen = choose_format(config, model, torch.device("cuda"))
    table = model.vocab_size * model.hidden_size
    sizes = [chosen.bytes_per_parameter(torch.bfloat16, output=output) for output in (True, False)]
    assert sizes == [1 + 4 / 128, 1 / 2 + 4 / 128]
    matrices = model.num_parameters - 2 * table
    assert model.weight_bytes(2, *sizes) == round(2 * table + sizes[0] * table + sizes[1] * matrices)


def test_experts_are_rounded_to_int4_and_routers_are_not(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Qwen3Moe", moe_intermediate_size=96)
    plain, ours = (
        load(tmp_path, device="cpu", quantization=chosen).runner.model.layers[1].mlp
        for chosen in ("none", "int4")
    )
    x = torch.eye(plain.experts.down.shape[1])
    assert torch.equal(ours.router(x), plain.router(x))
    for name in ("gate_up", "down"):
        weights = getattr(plain.experts, name)
        size = next(size for size in int4_on_load.SIZES if weights.shape[2] % size == 0)
        expected = torch.stack([rounded(weight, size).values() for weight in weights])
        assert torch.equal(getattr(ours.experts, name), expected)
        assert not torch.equal(expected, weights)
