"""Weights of 4 and 8 bits in groups: their layouts, their products, and the tokens of their engines."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from baton.engine import EngineConfig, build_engine
from baton.engine.kernels import Kernels
from baton.engine.layers import grouped_linear, in_place
from baton.engine.layers.current_step import CurrentStep, computing
from baton.engine.layers.grouped_linear import (
    MOST_DECODES,
    TILE,
    ByRows,
    PackedLinear,
    bytes_per_parameter,
    dtype_of_prompts,
    for_prompts,
    packs,
)
from baton.engine.layers.linear import PlainLinear
from baton.engine.layers.ranks import Ranks, Shard, unsharded
from baton.engine.layers.weights import Groups, PlainFormat, Stack, Weights
from baton.engine.loader import choose_format, gguf_groups, model_fingerprint, open_checkpoint
from baton.engine.loader.by_module import ByModule
from baton.engine.loader.compressed import compressed
from baton.engine.loader.gguf_groups import UNPACK
from baton.engine.loader.int_formats import StoredGroups, stored_groups
from tests.engine.conftest import request_of, run
from tests.engine.test_disaggregation import Pair
from tests.engine.test_gguf import write
from tests.stand_in import stand_in

PACKS = packs(4, torch.bfloat16, torch.device("cpu"))
needs_packing = pytest.mark.skipif(not PACKS, reason="this CPU has no AVX-512")


def random_groups(rows: int, columns: int, size: int, bits: int = 4) -> Groups:
    generator = torch.Generator().manual_seed(rows + columns + size + bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
    shape = (rows, columns // size)
    scales = torch.rand(shape, generator=generator).add_(0.5).div_((1 << bits) * columns**0.5)
    return Groups(codes, scales, torch.randn(shape, generator=generator) * scales, bits)


@pytest.mark.parametrize("kind", UNPACK)
def test_groups_of_gguf_types_have_the_values_of_the_gguf_package(kind: str) -> None:
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (6, 3, size), dtype=np.uint8)
    for at in (0, 2) if kind in ("Q4_1", "Q4_K") else (0,):  # scales that are finite
        raw[..., at : at + 2] = rng.normal(size=(6, 3, 1)).astype(np.float16).view(np.uint8)
    expected = dequantize(raw.reshape(6, -1), gguf.GGMLQuantizationType[kind])
    found = UNPACK[kind](torch.from_numpy(raw)).values()
    assert found.shape == (6, 3 * values)
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=1e-5, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_packed_products_are_those_of_the_values(size: int, bits: int) -> None:
    groups, bias = random_groups(48, 256, size, bits), torch.randn(48).bfloat16()
    x = torch.randn(5, 256).bfloat16()
    found = PackedLinear(groups, bias)(x).float()
    expected = x.float() @ groups.values().T + bias.float()
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@needs_packing
@pytest.mark.parametrize("bits", [4, 8])
def test_memory_sizing_counts_codes_scales_and_the_copy_for_prompts(bits: int) -> None:
    linear = PackedLinear(random_groups(64, 256, 32, bits), None)
    packed = sum(tensor.nbytes for half in linear.halves for tensor in half)
    planned = bytes_per_parameter(bits, 32, torch.bfloat16, torch.device("cpu"))
    assert planned == packed / (64 * 256) + dtype_of_prompts().itemsize


@pytest.mark.parametrize(
    ("bits", "size", "floats", "kept"),
    [
        (8, None, False, 1),  # a group of all columns
        (8, 128, False, 1 + 8 / 128),
        (8, 16, False, 2),
        (4, 32, False, 1 / 2 + 4 / 32),
        (4, 16, False, 2),
        (4, 16, True, 1 / 2 + 4 / 16),  # NVFP4
        (4, 32, True, 1 / 2 + 4 / 32),
    ],
)
def test_what_gpus_keep_packed(
    bits: int, size: int | None, floats: bool, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As memory sizing assumes, which leaves out what a row has."""
    monkeypatch.setattr(grouped_linear, "from_hopper_on", lambda device: True)
    monkeypatch.setattr("baton.engine.kernels.launch.multiprocessors", lambda device: 132)
    monkeypatch.setattr("baton.engine.layers.linear._product", lambda *_, **__: None)
    device, dtype = torch.device("cuda"), torch.bfloat16
    weights = stand_in(Weights, device=device, dtype=dtype, kernels=Kernels(), bias=lambda stack: None)
    groups = random_groups(64, 512, size or 512, bits)._replace(floats=floats)
    product = grouped_linear.grouped_linear(groups, None, weights)
    found = sum(tensor.nbytes for tensor in in_place.tensors(product)) / (64 * 512)
    assert bytes_per_parameter(bits, size, dtype, device, floats=floats) == kept
    assert kept <= found <= kept + 8 / 512
    made = stored_groups("t", bits, size, "m", lambda *_: groups, device, kind="fp" if floats else "int")
    assert made.bytes_per_parameter(dtype) == kept
    assert made.bytes_per_parameter(dtype, experts=True) == (2 if bits == 8 else kept)
    on_cpu = replace(made, device=torch.device("cpu"))
    assert on_cpu.bytes_per_parameter(dtype, experts=True) == 2
    plain = made.with_int8_dequantized()
    assert (plain is made) == (bits == 4)
    if bits == 8:
        assert plain.name == f"{made.name}, 8 bits dequantized at load"
        assert plain.identity == made.identity, "workers that keep them packed have the same KV"
        assert plain.bytes_per_parameter(dtype) == 2
        assert isinstance(plain, StoredGroups)
        stack = Stack(["x"], [unsharded(64)], unsharded(512))
        assert isinstance(plain.product(groups, weights, stack), PlainLinear)


def test_of_several_formats_those_of_8_bits_are_dequantized() -> None:
    """And those of a GGUF file: products of one type."""
    of_all = {"type": "int", "strategy": "group", "group_size": 32}
    four, eight = ({"num_bits": bits, **of_all} for bits in (4, 8))
    groups = {"a": {"weights": four}, "b": {"weights": eight, "targets": ["re:.*down_proj"]}}
    settings = {"format": "pack-quantized", "config_groups": groups, "ignore": ["lm_head"]}
    stored = compressed(settings, "m", torch.device("cuda"))
    plain = stored.with_int8_dequantized()
    assert isinstance(plain, ByModule)
    of_four, of_eight = plain.formats
    assert of_four is stored.formats[0]
    assert plain.name == f"{stored.name}, 8 bits dequantized at load"
    assert plain.chosen("q_proj") is of_four
    assert plain.chosen("down_proj") is of_eight
    assert plain.chosen("lm_head") is None
    assert isinstance(of_eight, StoredGroups)
    groups_of_8, cpu = random_groups(16, 64, 32, 8), torch.device("cpu")
    weights = stand_in(Weights, device=cpu, dtype=torch.float32, kernels=Kernels(), bias=lambda stack: None)
    product = of_eight.product(groups_of_8, weights, Stack(["x"], [unsharded(16)], unsharded(64)))
    torch.testing.assert_close(product(torch.eye(64)).T, groups_of_8.values())
    assert plain.bytes_per_parameter(torch.bfloat16) == 2
    settings = {"products": {("Q4_K",): 3, ("Q8_0",): 1}, "of_experts": {}}
    of_file = gguf_groups.gguf(settings, "m", torch.device("cuda"))
    assert of_file.with_int8_dequantized().name == "gguf (Q4_K, Q8_0), 8 bits dequantized at load"


@needs_packing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_does_not_depend_on_the_other_rows_of_its_step(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the number of decodes up to `MOST_DECODES`, nor on the prompts of the step and their chunks."""
    groups = random_groups(96, 256, 32)
    monkeypatch.setattr(grouped_linear, "dtype_of_prompts", lambda: dtype)
    linear = ByRows(PackedLinear(groups, None), for_prompts(groups.values(), None))
    x = torch.randn(3 * TILE, 256, generator=torch.Generator().manual_seed(0)).bfloat16()

    def of_step(x: torch.Tensor, decodes: int) -> torch.Tensor:
        with computing(CurrentStep(decodes)):
            return linear(x)

    decoded = torch.cat([of_step(row[None], 1) for row in x[:MOST_DECODES]])
    prompts = of_step(x, 0)
    torch.testing.assert_close(prompts, (x.float() @ groups.values().T).bfloat16(), rtol=0.02, atol=0.02)
    for decodes, count in ((0, 1), (0, 200), (1, 0), (1, 5), (MOST_DECODES, 0), (MOST_DECODES, TILE + 3)):
        y = of_step(torch.cat((x[:decodes], x[7 : 7 + count])), decodes)
        assert y[:decodes].equal(decoded[:decodes])
        assert y[decodes:].equal(prompts[7 : 7 + count])
    assert of_step(x[: 2 * MOST_DECODES + 3], 2 * MOST_DECODES).shape == (2 * MOST_DECODES + 3, 96)


def test_which_gguf_files_stay_packed(embedded_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default on this CPU and on GPUs from Hopper on, but never with float32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # plans for a Hopper GPU elsewhere
    path = str(embedded_model_path)
    model = open_checkpoint(EngineConfig(path), torch.device("cpu")).config

    def chosen(device: str, products: Any = None, **settings: Any) -> str:
        changed = {} if products is None else {"products": products}
        of_file = {**(model.quantization or {}), **changed}
        shape = replace(model, quantization=of_file)
        return choose_format(EngineConfig(path, **settings), shape, torch.device(device)).name

    packed = "gguf (Q4_1)"
    assert chosen("cpu") == (packed if PACKS else "plain")
    assert chosen("cpu", dtype="float32") == chosen("cpu", quantization="none") == "plain"
    assert chosen("cuda", dtype="float32") == chosen("cuda", quantization="none") == "plain"
    assert chosen("cuda") == chosen("cuda", dtype="float16") == packed
    assert chosen("cuda", {("Q4_K",): 1, ("Q6_K",): 9}) == "gguf (Q4_K, Q6_K)"
    assert chosen("cuda", {("Q4_K", "Q6_K"): 9, ("Q6_K",): 9}) == "plain", "no product has 4 or 8 bits alone"
    assert chosen("cpu", {("Q8_0",): 9}) == ("gguf (Q8_0)" if PACKS else "plain")
    assert chosen("cpu", quantization="fp8").startswith("fp8")
    assert chosen("cpu", load_format="dummy") == chosen("cuda", load_format="dummy") == "plain"
    with pytest.raises(ValueError, match=r"--quantization gguf: .* in 16 bits; use --dtype auto"):
        chosen("cpu", quantization="gguf", dtype="float32")
    monkeypatch.setattr("baton.engine.layers.grouped_linear.from_hopper_on", lambda device: False)
    assert chosen("cuda") == "plain"
    assert chosen("cuda", quantization="gguf") == packed


def test_memory_sizing_counts_the_products_of_each_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused product of different types is plain as a whole."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    qkv = {"attn_q": (256, "Q4_K"), "attn_k": (128, "Q4_K"), "attn_v": (128, "Q6_K")}
    rows = {**qkv, "attn_output": (256, "Q4_K"), "ffn_gate": (512, "Q4_K"), "ffn_up": (512, "Q4_K")}
    file = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    file.add_block_count(1)
    file.add_context_length(64)
    file.add_embedding_length(256)
    file.add_feed_forward_length(256)
    file.add_head_count(4)
    file.add_head_count_kv(2)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tensor("token_embd.weight", np.zeros((8, 256), np.float16))
    file.add_tensor("blk.0.attn_norm.weight", np.zeros(256, np.float32))
    for name, (count, kind) in rows.items():
        stored = gguf.GGMLQuantizationType[kind]
        raw = np.zeros((count, gguf.GGML_QUANT_SIZES[stored][1]), np.uint8)
        file.add_tensor(f"blk.0.{name}.weight", raw, raw_dtype=stored)
    write(file)
    config, cpu = EngineConfig(str(tmp_path / "model.gguf")), torch.device("cpu")
    checkpoint = open_checkpoint(config, cpu)
    found = choose_format(config, checkpoint.config, torch.device("cuda")).bytes_per_parameter(torch.bfloat16)
    plain, packed = 256 + 128 + 128, 256 + 512 + 512
    assert found == pytest.approx((2 * plain + (1 / 2 + 4 / 32) * packed) / (plain + packed))
    of_format = choose_format(replace(config, quantization="gguf"), checkpoint.config, cpu)
    weights = Weights(checkpoint, torch.bfloat16, cpu, lambda *_: None, of_format, Ranks())
    parts = [unsharded(256), unsharded(128), unsharded(128)]
    fused = weights.linear([f"model.layers.0.self_attn.{x}_proj" for x in "qkv"], parts, unsharded(256))
    assert isinstance(fused, PlainLinear), "as planned"
    if PACKS:
        output = weights.linear(["model.layers.0.self_attn.o_proj"], parts[:1], unsharded(256))
        assert isinstance(output, ByRows)


@needs_packing
def test_the_embedded_model_is_served_packed_by_default(shallow_model_path: Path) -> None:
    def of(**settings: Any) -> str:
        return model_fingerprint(EngineConfig(str(shallow_model_path), **settings), length)

    packed = build_engine(EngineConfig(str(shallow_model_path), num_blocks=4))
    length = packed.model_config.max_model_len
    assert packed.cache_spec[0].arrays[0].dtype == "bfloat16"
    assert packed.model_fingerprint == of(quantization="gguf", dtype="bfloat16")
    assert packed.model_fingerprint != of(quantization="none", dtype="bfloat16") == of(dtype="float32")


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.layers.0.self_attn.q_proj"])
def test_the_fingerprint_of_a_packed_matrix_is_that_of_its_parts(name: str, shallow_model_path: Path) -> None:
    """And that of the plain matrix: ranks may cut groups, and a GPU has other products for the logits."""
    cpu, name = torch.device("cpu"), f"{name}.weight"
    checkpoint = open_checkpoint(EngineConfig(str(shallow_model_path)), cpu)
    rows, columns = map(unsharded, checkpoint.shape(name) or ())

    def digest(read: Callable[[Weights], Any]) -> str:
        weights = Weights(checkpoint, torch.bfloat16, cpu, lambda *_: None, PlainFormat(), Ranks())
        assert read(weights) is not None
        return weights._taken[name]

    packed = digest(lambda weights: weights.groups(name, (rows, columns)))
    assert packed == digest(lambda weights: weights.groups(name, (Shard(64, 128, rows.size), columns)))
    assert packed == digest(lambda weights: weights.stack([name], [(rows, columns)]))


@pytest.mark.all
@needs_packing
def test_a_disaggregated_run_gives_the_tokens_of_a_single_engine(shallow_model_path: Path) -> None:
    """Alone and in a batch, in whole prompts and in chunks: a token's bits do not depend on its step."""

    def engine(**settings: Any) -> Any:
        return build_engine(EngineConfig(str(shallow_model_path), num_blocks=256, num_threads=1, **settings))

    lengths = [3, 40, 129, 17, 64]
    requests = [
        request_of(i, range(100 + 31 * i, 100 + 31 * i + n), max_tokens=12, ignore_eos=True)
        for i, n in enumerate(lengths)
    ]
    single = engine(block_size=32)
    batch = {request_id: result.tokens for request_id, result in run(single, requests).items()}
    for request in requests[1:4:2]:
        assert run(single, [request])[request.id].tokens == batch[request.id]
    pair = Pair(engine(max_num_seqs=4, max_num_batched_tokens=48), single)
    assert pair.run(requests) == batch
