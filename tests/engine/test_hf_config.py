"""Configurations of checkpoints: what fits is loaded, and the rest is refused by name."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine import EngineConfig
from baton.engine.loader import check_model, choose_format
from baton.engine.loader.hf import HFCheckpoint
from baton.engine.loader.hf_config import model_config_from_hf
from baton.engine.model_config import LocalRope, RopeScaling, Span
from baton.router.text.model_files import context_length
from tests.engine.checkpoints import edited_copy, is_refused, load
from tests.engine.conftest import save_tiny


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


@pytest.mark.parametrize("kind", ["Llama", "Llama4Text", "GptOss", "Gemma3Text", "Phi3"])
def test_any_value_in_a_configuration_is_accepted_or_refused_by_name(kind: str, tmp_path: Path) -> None:
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
def experts_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
def llama4_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        ("down_proj", lambda experts: experts.flatten(1), r"\[8, 1536\]"),
        ("down_proj", lambda experts: torch.empty(1 << 40, 0, 64), r"\[1099511627776, 0, 64\]"),
        ("gate_up_proj", lambda experts: experts.repeat(1, 1, 2)[:, :, :49].contiguous(), r"\[8, 64, 49\]"),
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
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {name} is {shape}$"):
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


def test_published_configurations_of_gemma3_leave_out_what_transformers_knows(tmp_path: Path) -> None:
    """As that of Gemma 3 4B. Routers, which have no engine, read the same context."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    published = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    model = model_config_from_hf(published, {}, "short")
    whole = transformers_gemma3_config(text)
    assert model == model_config_from_hf({**whole, "architectures": published["architectures"]}, {}, "whole")
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.vocab_size) == (8, 4, 256, 262208)
    assert model.spans == (Span(1024),) * 5 + (None, Span(1024))
    assert model.local_rope == LocalRope((0, 1, 2, 3, 4, 6), 1e4)
    assert (model.rope_theta, model.rope_scaling) == (1e6, RopeScaling("linear", 8.0))
    assert model.tie_embeddings
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert model.max_model_len == context_length(str(tmp_path), None) == 131072


def transformers_gemma3_config(text: dict[str, Any]) -> dict[str, Any]:
    import transformers

    return {**transformers.Gemma3TextConfig(**text).to_dict(), "eos_token_id": None, "dtype": None}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("Gemma3Text", {"hidden_activation": "relu"}, r"hidden_activation 'relu' is not supported"),
        ("Gemma3Text", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping is not supported"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, r"use_bidirectional_attention is not"),
        (
            "Gemma3Text",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear"}}},
            r"rope scaling {'rope_type': 'linear'} of layers with a window is not supported",
        ),
        (
            "Phi3",
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0] * 8}},
            r"config\.json: long_factor must be a list of 8 numbers above 0, not \[1\.0\]",
        ),
        ("Phi3", {"intermediate_size": 97}, r"gate_up_proj\.weight is \[192, 64\]"),
        ("Phi3", {"num_key_value_heads": 1}, r"qkv_proj\.weight is \[128, 64\]"),
        ("Glm4", {"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
        (
            "Glm4",
            {"quantization_config": {"quant_method": "fp8"}},
            r"quantized checkpoints of Glm4ForCausalLM",
        ),
    ],
)
def test_what_a_family_does_not_support_is_refused(
    kind: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "whole", kind)
    with pytest.raises(ValueError, match=message):
        check_model(EngineConfig(str(edited_copy(tmp_path / "whole", tmp_path, **change))))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Mistral", {"sliding_window": 24}),
        ("Gemma3Text", {"query_pre_attn_scalar": 25}),
        ("Gemma3Text", {"sliding_window": 24}),
        ("Gemma3Text", {"layer_types": ["full_attention"] * 4}),
        ("Glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ],
    ids=repr,
)
def test_the_fingerprint_covers_the_attention_of_a_family(
    kind: str, change: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path / "whole", kind)
    copy = edited_copy(tmp_path / "whole", tmp_path, **change)
    assert load(copy).model_fingerprint != load(tmp_path / "whole").model_fingerprint


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
    assert moe.experts.gate_up.shape == (8, 2 * 24, 64)
    assert moe.experts.down.shape == (8, 64, 24)
    assert len({float(weight.sum()) for weight in (*moe.experts.gate_up, *moe.experts.down)}) == 16
