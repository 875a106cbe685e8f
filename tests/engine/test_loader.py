"""Checkpoints: all formats give the same model, and broken files are refused with a helpful message."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, build_engine
from engine.kernels import parts
from engine.layers.ranks import Part, whole
from engine.loader import check_model, choose_format
from engine.loader.dummy import DummyCheckpoint
from engine.loader.gguf_file import GGUFCheckpoint, GGUFFile
from engine.loader.hf import HFCheckpoint
from engine.loader.hf_config import model_config_from_hf
from engine.model_config import Span


def load(path: Path, **config: Any) -> Engine:
    settings: dict[str, Any] = {"model": str(path), "dtype": "float32", "num_blocks": 8, **config}
    return build_engine(EngineConfig(**settings))


@pytest.fixture
def sharded(tmp_path: Path, save_tiny: Callable[..., Any]) -> Path:
    save_tiny(tmp_path / "whole", "Llama").save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    return tmp_path / "sharded"


def test_the_fingerprint_does_not_depend_on_the_file_format(
    tiny_path: Path, sharded: Path, tmp_path: Path
) -> None:
    fingerprint = load(tiny_path).model_fingerprint
    assert load(sharded).model_fingerprint == fingerprint
    assert load(tiny_path, dtype="bfloat16", num_blocks=4).model_fingerprint == fingerprint
    other = shutil.copytree(tiny_path, tmp_path / "other")
    edit_json(other / "config.json", rms_norm_eps=1e-3)
    assert load(other).model_fingerprint != fingerprint
    flip_last_tensor(other / "model.safetensors")
    edit_json(other / "config.json", rms_norm_eps=1e-6)
    assert load(other).model_fingerprint != fingerprint


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edited_copy(path: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with these changes in its configuration."""
    copy = shutil.copytree(path, tmp_path / "copy")
    edit_json(copy / "config.json", **changes)
    return copy


def flip_last_tensor(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-200:] = bytes(200)
    path.write_bytes(data)


def test_eos_ids_come_from_the_generation_config(tiny_path: Path, tmp_path: Path) -> None:
    assert load(tiny_path).model_config.eos_ids == (2,)
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    edit_json(copy / "generation_config.json", eos_token_id=[7, 9])
    assert load(copy).model_config.eos_ids == (7, 9)


def test_dtype_auto_is_that_of_the_checkpoint(tiny_path: Path, tmp_path: Path) -> None:
    copy = edited_copy(tiny_path, tmp_path, dtype="bfloat16")
    engine = load(copy, dtype="auto")
    assert engine._runner.model.embedding.weight.dtype is torch.bfloat16
    assert {parts(cache)[0].dtype for cache in engine.kv_cache} == {torch.bfloat16}
    assert load(copy, dtype="float32").cache_spec[0].dtype is torch.float32


def test_dummy_weights_need_the_configuration_only(
    tiny_path: Path, tmp_path: Path, run: Any, request_of: Any
) -> None:
    shutil.copy(tiny_path / "config.json", tmp_path)
    one, same, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    assert one.model_fingerprint == same.model_fingerprint != other.model_fingerprint
    request = request_of(1, [3, 4, 5], max_tokens=8)
    assert run(one, [request])[request.id].tokens == run(same, [request])[request.id].tokens
    with pytest.raises(ValueError, match=r"no \*\.safetensors in there"):
        load(tmp_path)


def test_progress_and_ticks_while_loading(tiny_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    ticks: list[None] = []
    build_engine(
        EngineConfig(model=str(tiny_path), num_blocks=8),
        tick=lambda: ticks.append(None),
        progress=lambda stage, fraction: stages.append((stage, fraction)),
    )
    assert {stage for stage, _ in stages} == {"loading weights"}
    assert stages == sorted(stages)
    assert stages[-1][1] == 1.0
    assert len(ticks) >= len(stages) > 10


# Broken directories


def test_missing_shard(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ValueError, match=f"{victim.name}: missing, though .*index.json names it"):
        load(sharded)


def test_truncated_shard(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{victim.name}: corrupt or cut short"):
        load(sharded)


def test_tensor_not_in_the_shard_that_the_index_names(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first = next(iter(weight_map))
    edit_json(index, weight_map={**weight_map, "model.layers.0.extra": weight_map[first]})
    with pytest.raises(ValueError, match=f"{weight_map[first]}: tensor model.layers.0.extra is missing"):
        load(sharded)


def without(directory: Path, name: str) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})


def with_another(directory: Path, name: str) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), name: torch.zeros(2)}, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda d: (d / "model.safetensors").unlink(), r"no \*\.safetensors in there"),
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
            r"model\.safetensors: corrupt or cut short",
        ),
        (
            lambda d: without(d, "model.layers.2.mlp.up_proj.weight"),
            r"layers\.2\.mlp\.up_proj\.weight is missing",
        ),
        (lambda d: without(d, "model.norm.weight"), r"tensor model\.norm\.weight is missing"),
        (lambda d: with_another(d, "model.extra"), r"1 tensors are unknown to .*, such as model\.extra"),
        (
            lambda d: edit_json(d / "config.json", architectures=["NewForCausalLM"]),
            "NewForCausalLM is not supported",
        ),
        (
            lambda d: edit_json(d / "config.json", intermediate_size=97),
            "by the model's configuration it should be",
        ),
    ],
)
def test_a_model_is_checked_without_reading_a_weight(
    harm: Callable[[Path], Any],
    message: str,
    tiny_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check raises the same error as loading."""
    shutil.copytree(tiny_path, tmp_path, dirs_exist_ok=True)
    harm(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
    monkeypatch.setattr(HFCheckpoint, "read", None)
    with pytest.raises(ValueError, match=message):
        check_model(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe", "Llama4", "GptOss"])
def test_a_whole_model_passes_its_check(
    kind: str, tmp_path: Path, save_tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, kind)
    monkeypatch.setattr(HFCheckpoint, "read", None)
    check_model(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "has no weight_map"),
        ([], "has no weight_map"),
        (
            {"model.norm.weight": "../x.safetensors"},
            r"tensor model\.norm\.weight must be in a file of this directory",
        ),
        (
            {"model.norm.weight": 7},
            r"tensor model\.norm\.weight must be in a file of this directory, not in 7",
        ),
    ],
)
def test_broken_index(sharded: Path, weight_map: Any, message: str) -> None:
    edit_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises(ValueError, match=rf"model\.safetensors\.index\.json: {message}"):
        load(sharded)


def test_the_same_tensor_in_two_files(tiny_path: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    shutil.copy(copy / "model.safetensors", copy / "model-2.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: tensor \S+ is in model-2\.safetensors too"):
        load(copy)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (torch.nan, "float32", r"has values that are not finite numbers in torch\.float32: it is corrupt"),
        (-torch.inf, "bfloat16", r"has values that are not finite numbers in torch\.bfloat16"),
        (1e6, "float16", r"has values that are not finite .* it is corrupt, or needs another --dtype"),
        (1e6, "float32", None),
        (torch.float8_e4m3fn, "float32", r"is of torch\.float8_e4m3fn, which is not supported"),
        (torch.int8, "float32", r"is of torch\.int8, which is not supported"),
    ],
)
def test_weights_that_are_not_finite_or_of_an_unsupported_type_are_refused(
    tiny_path: Path, tmp_path: Path, value: Any, dtype: str, message: str | None
) -> None:
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"  # in the middle of a fused weight
    if isinstance(value, torch.dtype):
        tensors[name] = tensors[name].to(value)
    else:
        tensors[name][5, 7] = value
    save_file(tensors, copy / "model.safetensors")
    if message is None:
        load(copy, dtype=dtype)
        return
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {name} {message}"):
        load(copy, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 4}, r"tensor model\.layers\.3\.self_attn\.q_proj\.weight is missing"),
        ({"num_hidden_layers": 2}, r"9 tensors are unknown to LlamaForCausalLM, such as model\.layers\.2\."),
        ({"vocab_size": 198}, r"tensor model\.embed_tokens\.weight is \[199, 64\], .* should be \[198, 64\]"),
        (
            {"intermediate_size": None},
            r"config\.json: intermediate_size must be a positive integer, not None",
        ),
        ({"num_key_value_heads": 3}, r"4 heads of 16 on 3 KV heads is not supported"),
        (
            {"quantization_config": {"quant_method": "bitnet"}},
            r"quantization_config: the format 'bitnet' is not supported \(",
        ),
        ({"quantization_config": "int4"}, r"config\.json: quantization_config 'int4' is not supported"),
        ({"mlp_bias": True}, r"mlp_bias is not supported"),
        ({"architectures": None}, r"architecture \(none named\) is not supported"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    tiny_path: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    copy = edited_copy(tiny_path, tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        load(copy)


@pytest.mark.parametrize("kind", ["Llama", "Llama4Text", "GptOss"])
def test_any_value_in_a_configuration_is_accepted_or_refused_by_name(
    kind: str, tmp_path: Path, save_tiny: Callable[..., Any]
) -> None:
    save_tiny(tmp_path, kind)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"rope_scaling": None, "sliding_window": None, "partial_rotary_factor": None}
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.0, "beta_fast": 32,
            "original_max_position_embeddings": 32}  # fmt: skip
    read, refused = 0, 0
    for value in (
        "x",
        "",
        -1,
        0,
        0.5,
        1.0,
        1.5,
        True,
        [],
        [None],
        [[]] * 3,
        {},
        {"rope_type": "linear"},
        None,
        float("inf"),
        1 << 40,
    ):
        changes = [{key: value} for key in config]
        changes += [{"rope_parameters": {**kind, key: value}} for kind in (rope, yarn) for key in kind]
        for change in changes:
            read += 1
            refused += is_refused(
                partial(model_config_from_hf, {**config, **change}, {}, "a/config.json"), "a/config.json"
            )
    assert 100 < refused < read - 100


def test_any_value_in_a_quantization_config_is_accepted_or_refused_by_name(tiny_path: Path) -> None:
    model, refused = HFCheckpoint(tiny_path).config, 0
    of_float = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    of_int = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": None}
    configs: list[dict[str, Any]] = [
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq"},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    ]
    for name, kept in (("float-quantized", of_float), ("pack-quantized", of_int)):
        group = {"weights": kept, "input_activations": None}
        compressed = {"quant_method": "compressed-tensors", "format": name}
        configs.append({**compressed, "config_groups": {"g": group}})
        for key in kept:
            configs.append({**compressed, "config_groups": {"g": {"weights": {**kept, key: [[]]}}}})
        configs += [{**compressed, "config_groups": {"g": value}} for value in (None, [], {}, {"weights": 1})]
    for settings in configs:
        for key in settings:
            for value in ("x", 1.5, [], [None], {}, {"a": 1}, None, settings[key]):
                changed = replace(model, quantization={**settings, key: value})
                read = partial(choose_format, EngineConfig("m"), changed, torch.device("cpu"))
                refused += is_refused(read, "m")
    assert refused > 100


@pytest.fixture(scope="module")
def experts_path(tmp_path_factory: pytest.TempPathFactory, save_tiny: Callable[..., Any]) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    save_tiny(directory, "Qwen3Moe")
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": 0}, r"config\.json: num_local_experts must be a positive integer, not 0"),
        ({"moe_intermediate_size": None}, r"moe_intermediate_size must be a positive integer, not None"),
        ({"num_experts_per_tok": 9}, r"config\.json: num_experts_per_tok 9 of 8 experts"),
        (
            {"mlp_only_layers": [1.5]},
            r"config\.json: mlp_only_layers must be a list of integers, not \[1\.5\]",
        ),
        ({"mlp_only_layers": [1]}, r"layers\.1\.mlp\.gate_proj\.weight is missing"),
        ({"decoder_sparse_step": 2}, r"layers\.0\.mlp\.gate_proj\.weight is missing"),
        ({"num_local_experts": 7}, r"mlp\.gate\.weight is \[8, 64\], .* should be \[7, 64\]"),
        ({"moe_intermediate_size": 25}, r"experts\.0\.gate_proj\.weight is \[24, 64\], .* be \[25, 64\]"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    experts_path: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    copy = edited_copy(experts_path, tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        check_model(EngineConfig(str(copy)))


@pytest.fixture(scope="module")
def llama4_path(tmp_path_factory: pytest.TempPathFactory, save_tiny: Callable[..., Any]) -> Path:
    directory = tmp_path_factory.mktemp("llama4")
    save_tiny(directory, "Llama4Text", attention_chunk_size=20)
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_local_experts": 7}, r"router\.weight is \[8, 64\], .* should be \[7, 64\]"),
        ({"intermediate_size": 25}, r"experts\.0\.gate_proj\.weight is \[24, 64\], .* be \[25, 64\]"),
        ({"num_experts_per_tok": 9}, r"config\.json: num_experts_per_tok 9 of 8 experts"),
        ({"moe_layers": [0, 1, 2]}, r"layers\.3\.feed_forward\.gate_proj\.weight is missing"),
        ({"moe_layers": "all"}, r"config\.json: moe_layers must be a list of integers, not 'all'"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized checkpoints of Llama4"),
        ({"no_rope_layers": [1, 1, 0]}, r"config\.json: no_rope_layers has 3 of 4 layers"),
        ({"floor_scale": 0}, r"config\.json: floor_scale must be a number above 0, not 0"),
        ({"attn_scale": "x"}, r"config\.json: attn_scale must be a number above 0, not 'x'"),
    ],
)
def test_a_llama4_that_does_not_fit_is_refused(
    llama4_path: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    copy = edited_copy(llama4_path, tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        check_model(EngineConfig(str(copy)))


@pytest.mark.parametrize(
    ("name", "change", "shape"),
    [
        ("down_proj", lambda experts: experts.flatten(1), r"\(8, 1536\)"),
        ("down_proj", lambda experts: torch.empty(1 << 40, 0, 64), r"\(1099511627776, 0, 64\)"),
        ("gate_up_proj", lambda experts: experts.repeat(1, 1, 2)[:, :, :49].contiguous(), r"\(8, 64, 49\)"),
    ],
)
def test_experts_of_llama4_must_be_in_one_tensor_of_three_dimensions(
    llama4_path: Path, tmp_path: Path, name: str, change: Any, shape: str
) -> None:
    copy = shutil.copytree(llama4_path, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    name = f"model.layers.1.feed_forward.experts.{name}"
    tensors[name] = change(tensors[name])
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {name} is {shape}, not of exp"):
        check_model(EngineConfig(str(copy)))


def test_published_configurations_of_llama4_leave_out_what_follows(llama4_path: Path) -> None:
    """They have no `layer_types`, and those of Maverick have an empty `no_rope_layers`."""
    config = json.loads((llama4_path / "config.json").read_text())
    short = {key: value for key, value in config.items() if key not in ("layer_types", "moe_layers")}
    model = model_config_from_hf({**short, "no_rope_layers": []}, {}, "short")
    assert model == model_config_from_hf(config, {}, "whole")
    assert model.spans == (Span(20, chunked=True),) * 3 + (None,)
    assert model.nope is not None
    assert model.nope.layers == (3,)


@pytest.mark.parametrize(
    "change",
    [{"attention_chunk_size": 24}, {"floor_scale": 17}, {"use_qk_norm": False}, {"attn_scale": 0.2}],
    ids=lambda change: next(iter(change)),
)
def test_the_fingerprint_covers_the_attention_of_llama4(
    llama4_path: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    copy = edited_copy(llama4_path, tmp_path, **change)
    assert load(copy).model_fingerprint != load(llama4_path).model_fingerprint


def test_configurations_of_transformers_4_name_experts_differently(experts_path: Path) -> None:
    config = json.loads((experts_path / "config.json").read_text())
    older = {key: value for key, value in config.items() if key != "num_local_experts"} | {"num_experts": 8}
    assert model_config_from_hf(older, {}, "older") == model_config_from_hf(config, {}, "newer")


def test_the_fingerprint_covers_how_experts_are_weighted(experts_path: Path, tmp_path: Path) -> None:
    copy = edited_copy(experts_path, tmp_path, norm_topk_prob=True)
    assert load(copy).model_fingerprint != load(experts_path).model_fingerprint


@pytest.mark.parametrize("path", ["experts_path", "llama4_path"])
def test_dummy_experts_differ(path: str, request: pytest.FixtureRequest) -> None:
    moe = load(request.getfixturevalue(path), load_format="dummy")._runner.model.layers[0].mlp
    assert moe.gate_up.shape == (8, 2 * 24, 64)
    assert moe.down.shape == (8, 64, 24)
    assert len({float(weight.sum()) for weight in (*moe.gate_up, *moe.down)}) == 16


def is_refused(read: Callable[[], Any], source: str) -> bool:
    """Whether this raises a `ValueError` that names `source`. Any other exception fails the test."""
    try:
        read()
    except ValueError as error:
        if not str(error).startswith(f"{source}: "):
            raise
        return True
    return False


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json in there"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"--model /no/such: no such file or directory"):
        load(Path("/no/such"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load(tmp_path)


# GGUF


def write_gguf(
    path: Path, reference: Any, architecture: str, *, rope_freqs: torch.Tensor | None = None
) -> None:
    """Writes a GGUF file like llama.cpp's converter."""
    config = reference.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_token_list([b"a", b"longer token", b""])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    kind = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}[architecture]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in reference.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        permuted = next((n for key, n in heads.items() if key in name and architecture == "llama"), None)
        if permuted:
            tensor = tensor.unflatten(0, (permuted, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        data = tensor.numpy()
        if name.endswith("up_proj.weight"):
            data = data.astype("float16")
        writer.add_tensor(str(names.get_name(name, (".weight",))), data)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_gguf_file_gives_the_same_model(
    architecture: str, tmp_path: Path, save_tiny: Callable[..., Any], run: Any, request_of: Any
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    kind, changes = ("Llama", {"rope_parameters": rope}) if architecture == "llama" else ("Qwen3", {})
    reference = save_tiny(tmp_path, kind, head_dim=16, **changes)
    freqs = None
    if architecture == "llama":
        rotary = reference.model.rotary_emb
        freqs = 500.0 ** (-torch.arange(0, 16, 2) / 16) / rotary.inv_freq
    write_gguf(tmp_path / "model.gguf", reference, architecture, rope_freqs=freqs)
    hf, from_gguf = load(tmp_path), load(tmp_path / "model.gguf")
    assert from_gguf.model_config.eos_ids == (2, 5)
    check_model(EngineConfig(model=str(tmp_path / "model.gguf")))
    requests = [request_of(i, range(3, 40 + i), max_tokens=20, ignore_eos=True) for i in range(2)]
    first, second = run(hf, requests), run(from_gguf, requests)
    assert [r.tokens for r in first.values()] == [r.tokens for r in second.values()]


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory, save_tiny: Callable[..., Any]) -> bytes:
    directory = tmp_path_factory.mktemp("gguf")
    write_gguf(directory / "model.gguf", save_tiny(directory, "Llama"), "llama")
    return (directory / "model.gguf").read_bytes()


def test_a_part_of_a_tensor_is_a_slice_of_the_whole(
    tiny_path: Path, tiny_gguf: bytes, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").write_bytes(tiny_gguf)
    config = HFCheckpoint(tiny_path).config
    dummy = DummyCheckpoint(config, "dummy", 0, torch.device("cpu"))
    for checkpoint in (HFCheckpoint(tiny_path), GGUFCheckpoint(tmp_path / "model.gguf"), dummy):
        for name, shape in (
            ("model.layers.1.self_attn.q_proj.weight", (64, 64)),  # a GGUF file has it in another order
            ("model.layers.1.mlp.up_proj.weight", (96, 64)),
            ("model.layers.1.mlp.down_proj.weight", (64, 96)),
            ("model.norm.weight", (64,)),
        ):
            parts = [Part(5 + 3 * i, 40 - 3 * i, size) for i, size in enumerate(shape)]
            everything = checkpoint.read(name, [whole(size) for size in shape])
            assert checkpoint.read(name, parts).equal(everything[tuple(part.indices for part in parts)])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])  # the gguf package quantizes to these
def test_a_part_of_a_quantized_tensor_needs_only_its_blocks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    data = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    writer.add_tensor("m", gguf.quants.quantize(data, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "model.gguf")
    everything = file.read("m", [whole(8), whole(256)])
    assert np.abs(everything - data).max() < 0.5
    sizes: list[int] = []

    def counted(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
        sizes.append(raw.size)
        return dequantize(raw, kind)

    monkeypatch.setattr("engine.loader.gguf_file.dequantize", counted)
    part = file.read("m", [Part(2, 5, 8), Part(70, 130, 256)])
    np.testing.assert_array_equal(part, everything[2:5, 70:130])
    block = gguf.GGML_QUANT_SIZES[quantized][1]
    assert sizes == [3 * 3 * block], "three rows of the blocks that hold columns 64 to 159"


def test_broken_gguf(tiny_gguf: bytes, tmp_path: Path) -> None:
    whole = tiny_gguf
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    header = GGUFCheckpoint(path)._file._data_start
    path.write_bytes(whole[:-1000])
    for read in (load, lambda path: check_model(EngineConfig(model=str(path)))):
        with pytest.raises(ValueError, match=r"model\.gguf: cut short, tensor \S+ is incomplete"):
            read(path)
    for cut in (3, 10, 30, header // 2, header - 64):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"model\.gguf: corrupt or cut short at byte"):
            load(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.gguf: empty"):
        load(path)
    path.write_bytes(b"PK\3\4" + whole[4:100])
    with pytest.raises(ValueError, match="not a GGUF file"):
        load(path)
    position = whole.index(b"general.architecture") + len("general.architecture") + 4
    path.write_bytes(whole[:position] + struct.pack("<Q", 1 << 60) + whole[position + 8 :])
    with pytest.raises(ValueError, match="corrupt or cut short at byte"):
        load(path)
    path.write_bytes(whole.replace(b"token_embd.weight", b"token_embx.weight", 1))
    with pytest.raises(ValueError, match=r"tensor token_embd\.weight is missing"):
        load(path)
    path.write_bytes(whole.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", 1))
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.self_attn\.q_proj\.weight is missing"):
        load(path)


def test_a_gguf_tensor_of_an_unsupported_type_is_named(tiny_gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    name = b"blk.1.ffn_up.weight"  # [96, 64], F16
    at = tiny_gguf.index(name) + len(name) + 4  # behind the number of dimensions, which is 2
    shape, kind, offset = slice(at, at + 16), slice(at + 16, at + 20), slice(at + 20, at + 28)

    def refused(where: slice, new: bytes, message: str) -> None:
        path.write_bytes(tiny_gguf[: where.start] + new + tiny_gguf[where.stop :])
        with pytest.raises(ValueError, match=rf"model\.gguf: .*tensor \S+ {message}"):
            load(path)

    types = gguf.GGMLQuantizationType
    refused(kind, struct.pack("<I", 99), "is of type 99, which is not supported")
    refused(kind, struct.pack("<I", types.I8), "is of type I8, which is not supported")
    refused(slice(at, at + 20), struct.pack("<QQI", 63, 96, types.Q4_1), r"of type Q4_1 is \[96, 63\]")
    refused(shape, struct.pack("<QQ", 64, 0), r"of type F16 is \[0, 64\]")
    refused(shape, struct.pack("<QQ", 64, 1 << 62), "is incomplete")
    refused(shape, struct.pack("<QQ", 64, 95), r"is \[95, 64\], by the model's .* should be \[96, 64\]")
    refused(offset, struct.pack("<Q", 7), "is at 7, which is not aligned")
    refused(offset, struct.pack("<Q", 1 << 63), "is incomplete")


def test_a_damaged_gguf_header_is_accepted_or_refused_by_name(tiny_gguf: bytes, tmp_path: Path) -> None:
    """Every fourth byte of it, in two ways: never another exception, never memory for what is not there."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf)
    header = GGUFCheckpoint(path)._file._data_start
    refused = 0
    for at in range(0, header, 4):
        for damage in (0xFF, tiny_gguf[at] ^ 0x10):
            path.write_bytes(tiny_gguf[:at] + bytes([damage]) + tiny_gguf[at + 1 :])
            refused += is_refused(partial(GGUFCheckpoint, path), str(path))
    assert refused > header // 4


# The user's configuration


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dtype", "fp8", "--dtype 'fp8': choose one of auto, float32, bfloat16, float16"),
        ("device", "tpu", "--device 'tpu': choose cpu, cuda or cuda:N"),
        ("device", "cuda:", "--device 'cuda:': choose"),
        ("load_format", "pt", "--load-format 'pt': choose one of auto, dummy"),
        ("block_size", 0, "--block-size 0: must be at least 1"),
        ("num_blocks", -1, "--num-blocks -1: must be at least 1"),
        ("max_num_seqs", 4096, "--max-num-batched-tokens 2048: a step decodes .* at least --max-num-seqs"),
        ("gpu_memory_utilization", 1.2, "--gpu-memory-utilization 1.2: must be above 0"),
        ("model", "", "--model '': give a directory"),
        ("disk_cache_size", -1, "--disk-cache-size -1: must not be negative"),
        ("disk_cache_size", 1, "--disk-cache-size: needs --disk-cache-dir"),
    ],
)
def test_configuration_errors_name_flag_and_remedy(field: str, value: Any, message: str) -> None:
    settings: dict[str, Any] = {"model": "m", "enable_prefix_caching": True, field: value}
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)
