"""Configurations of checkpoints: what fits is loaded, and the rest is refused by name."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from baton.engine import EngineConfig
from baton.engine.loader import check_model, choose_format
from baton.engine.loader.hf import HFCheckpoint
from baton.engine.loader.hf_config import model_config_from_hf, read_config
from baton.engine.model_config import OtherAttention, RopeScaling, Span
from baton.router.text.model_files import context_length
from tests.engine.checkpoints import assert_refused, config_of, edited_copy, edited_tensors, is_refused, load
from tests.engine.conftest import TinyOf, save_tiny

NEW = {"rope_type": "default", "rope_theta": 50.0}
LINEAR = {"rope_type": "linear", "factor": 8.0}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Llama", {"num_hidden_layers": 4}, r"tensor model\.layers\.3\.self_attn\.q_proj\.weight is missing"),
    ("Llama", {"num_hidden_layers": 2},
     r"9 tensors are unknown to LlamaForCausalLM, such as model\.layers\.2\."),
    ("Llama", {"vocab_size": 198},
     r"tensor model\.embed_tokens\.weight is \[199, 64\], .* should be \[198, 64\]"),
    ("Llama", {"tie_word_embeddings": True},
     r"tensor lm_head\.weight is another one than model\.embed_tokens\.weight, though"),
    ("Llama", {"intermediate_size": None},
     r"config\.json: intermediate_size must be a positive integer, not None"),
    ("Llama", {"num_key_value_heads": 3}, r"4 heads of 16 on 3 KV heads is not supported"),
    ("Llama", {"quantization_config": {"quant_method": "bitnet"}},
     r"quantization_config: the format 'bitnet' is not supported \("),
    ("Llama", {"quantization_config": "int4"}, r"config\.json: quantization_config 'int4' is not supported"),
    ("Llama", {"mlp_bias": True}, r"mlp_bias is not supported"),
    ("Llama", {"architectures": None}, r"architecture \(none named\) is not supported"),
    ("Qwen3Moe", {"num_local_experts": 0},
     r"config\.json: num_local_experts must be a positive integer, not 0"),
    ("Qwen3Moe", {"moe_intermediate_size": None},
     r"moe_intermediate_size must be a positive integer, not None"),
    ("Qwen3Moe", {"num_experts_per_tok": 9}, r"config\.json: num_experts_per_tok 9 of 8 experts"),
    ("Qwen3Moe", {"mlp_only_layers": [1.5]},
     r"config\.json: mlp_only_layers must be a list of integers, not \[1\.5\]"),
    ("Qwen3Moe", {"mlp_only_layers": [1]}, r"layers\.1\.mlp\.gate_proj\.weight is missing"),
    ("Qwen3Moe", {"decoder_sparse_step": 2}, r"layers\.0\.mlp\.gate_proj\.weight is missing"),
    ("Qwen3Moe", {"num_local_experts": 7}, r"mlp\.gate\.weight is \[8, 64\], .* should be \[7, 64\]"),
    ("Qwen3Moe", {"moe_intermediate_size": 25},
     r"experts\.0\.gate_proj\.weight is \[24, 64\], .* be \[25, 64\]"),
    ("Llama4Text", {"num_local_experts": 7}, r"router\.weight is \[8, 64\], .* should be \[7, 64\]"),
    ("Llama4Text", {"intermediate_size": 25},
     r"experts\.0\.gate_proj\.weight is \[24, 64\], .* be \[25, 64\]"),
    ("Llama4Text", {"num_experts_per_tok": 9}, r"config\.json: num_experts_per_tok 9 of 8 experts"),
    ("Llama4Text", {"moe_layers": [0, 1, 2]}, r"layers\.3\.feed_forward\.gate_proj\.weight is missing"),
    ("Llama4Text", {"moe_layers": "all"}, r"config\.json: moe_layers must be a list of integers, not 'all'"),
    ("Llama4Text", {"quantization_config": {"quant_method": "fp8"}}, r"quantized checkpoints of Llama4"),
    ("Llama4Text", {"no_rope_layers": [1, 1, 0]}, r"config\.json: no_rope_layers has 3 of 4 layers"),
    ("Llama4Text", {"floor_scale": 0}, r"config\.json: floor_scale must be a number above 0, not 0"),
    ("Llama4Text", {"attn_scale": "x"}, r"config\.json: attn_scale must be a number above 0, not 'x'"),
    ("Gemma3Text", {"hidden_activation": "relu"}, r"hidden_activation 'relu' is not supported"),
    ("Gemma3Text", {"final_logit_softcapping": 30.0}, r"final_logit_softcapping is not supported"),
    ("Gemma3Text", {"use_bidirectional_attention": True}, r"use_bidirectional_attention is not"),
    ("Gemma3Text", {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "linear"}}},
     r"rope scaling {'rope_type': 'linear'} of layers with a window is not supported"),
    ("Phi3", {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0] * 8}},
     r"config\.json: long_factor must be a list of 8 numbers above 0, not \[1\.0\]"),
    ("Phi3", {"intermediate_size": 97}, r"gate_up_proj\.weight is \[192, 64\]"),
    ("Phi3", {"num_key_value_heads": 1}, r"qkv_proj\.weight is \[128, 64\]"),
    ("Glm4", {"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
    ("Glm4", {"quantization_config": {"quant_method": "fp8"}}, r"quantized checkpoints of Glm4ForCausalLM"),
    ("Bamba", {"attn_layer_indices": []}, "needs layers with states and layers with attention"),
    ("Bamba", {"mamba_n_groups": 3}, "8 Mamba heads of 16 in 3 groups do not fit"),
    ("Bamba", {"time_step_limit": ["low", 1]}, "time_step_limit must be two numbers, not 'low'"),
    ("Bamba", {"partial_rotary_factor": 1.5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
     "partial_rotary_factor must be above 0 and at most 1"),
    ("Bamba", {"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints of Bamba"),
    ("GraniteMoeHybrid", {"layer_types": ["mamba"]}, "must name the type of each of the 3 layers"),
    ("GraniteMoeHybrid", {"layer_types": ["mamba", "rnn", "mamba"]}, "layer type 'rnn' is not supported"),
    ("Qwen3Next", {"linear_num_key_heads": 3}, "4 value heads on 3 key heads is not supported"),
    ("Qwen3Next", {"linear_key_head_dim": 24}, r"linear_attn\.\w+\.weight is \["),
    ("Qwen3_5Text", {"linear_num_key_heads": 3}, "4 value heads on 3 key heads is not supported"),
    ("Qwen3_5Text", {"attn_output_gate": False}, "attn_output_gate False of Qwen3_5ForCausalLM is not"),
    ("Qwen3_5Text", {"quantization_config": {"quant_method": "gptq"}}, "quantized checkpoints of Qwen3_5For"),
    ("KimiLinear", {"mla_use_nope": False}, "mla_use_nope False of KimiLinearForCausalLM is not supported"),
    ("Lfm2", {"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints of Lfm2ForCausalLM"),
    ("NemotronH", {"moe_latent_size": 16}, r"experts\.0\.up_proj\.weight is \[24, 64\], .* be \[24, 16\]"),
    ("NemotronH", {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' of NemotronHForCausalLM is not"),
    ("NemotronH", {"layers_block_type": ["mamba", "moe", "mlp"]}, "a layer 'mlp' without a mixer before it"),
    ("NemotronH", {"layers_block_type": ["mamba", "rnn"]}, "layer type 'rnn' is not supported"),
    ("NemotronH", {"layers_block_type": None}, "layers_block_type or hybrid_override_pattern must name"),
    ("NemotronH", {"n_groups": 3}, "8 Mamba heads in 3 groups is not supported"),
    ("NemotronH", {"layers_block_type": None, "hybrid_override_pattern": "ME*-M"},
     r"tensor model\.layers\.1\.self_attn\.q_proj\.weight is missing"),
    ("Gemma4Text", {"enable_moe_block": True}, "enable_moe_block True of Gemma4ForCausalLM is not supported"),
    ("Gemma4Text", {"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 leaves no KV for some of 6 layers"),
    ("Gemma4Text", {"per_layer_config": {"0": {}}}, "per_layer_config must give all layers"),
    ("Gemma4Text", {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input 100 is less"),
    ("Gemma4Text", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type 'yarn' of"),
    ("MiMoV2Flash", {"swa_head_dim": 32}, "swa_head_dim 32 of MiMoV2FlashForCausalLM is not supported"),
    ("MiMoV2Flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias True of MiMo"),
    ("MiMoV2Flash", {"v_head_dim": 32}, "4 heads of 24 with values of 32 on 4 is no shape"),
    ("MiniMaxM2", {"scoring_func": "softmax"}, "scoring_func 'softmax' of MiniMaxM2ForCausalLM is not"),
    ("MiniMaxM2", {"attn_type_list": [0, 1, 1]}, r"attn_type_list \[0, 1, 1\] of MiniMaxM2"),
    ("MiniMaxM2", {"rotary_dim": 40, "rope_parameters": None}, "partial_rotary_factor must be above 0 and"),
    ("Lfm2", {"conv_L_cache": 4}, r"conv\.conv\.weight is \[64, 1, 3\], .* be \[64, 1, 4\]"),
    ("KimiLinear", {"linear_num_heads": 3}, r"self_attn\.\w+\.weight is \["),
    ("GraniteMoeHybrid", {"num_local_experts": 9}, r"mlp\.gate\.weight is \[8, 64\], by the model"),
    ("DeepseekV3", {"attention_bias": True}, "attention_bias True of DeepseekV3ForCausalLM is not supported"),
    ("DeepseekV3", {"topk_method": "greedy"}, "topk_method 'greedy' of DeepseekV3ForCausalLM is not"),
    ("DeepseekV3", {"rope_interleave": False}, "rope_interleave False of DeepseekV3ForCausalLM is not"),
    ("DeepseekV3", {"sliding_window": 24}, "sliding_window 24 of DeepseekV3ForCausalLM is not"),
    ("DeepseekV3", {"topk_group": 1}, "num_experts_per_tok 3 of 8 experts, in 1 of 4 groups, is not"),
    ("DeepseekV3", {"n_group": 8}, "num_experts_per_tok 3 of 8 experts, in 2 of 8 groups, is not"),
    ("DeepseekV3", {"v_head_dim": 33}, r"query heads of 16 \+ 16 dimensions with values of 33 are not"),
    ("DeepseekV3", {"kv_lora_rank": 34}, r"kv_a_proj_with_mqa\.weight is \[48, 64\], .* be \[50, 64\]"),
    ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob True of DeepseekV2ForCausalLM is not"),
    ("DeepseekV32", {"index_head_dim": 48}, "index of 48 dimensions, 16 .*, with q_lora_rank 24 is not"),
    ("DeepseekV32", {"q_lora_rank": None}, "an index .* with q_lora_rank None is not supported"),
    ("DeepseekV32", {"index_n_heads": 8}, r"indexer\.\w+\.weight is \["),
    ("GlmMoeDsa", {"indexer_types": ["shared", "full", "full"]}, "layers have an index, the first one among"),
    ("GlmMoeDsa", {"indexer_types": None, "index_topk_pattern": "FSX"}, "must say which .* not 'FSX'"),
    ("GlmMoeDsa", {"layer_types": ["full_attention"] * 2}, "layer_types must name the type of each of the 3"),
    ("Glm4MoeLite", {"mlp_layer_types": ["dense"]}, "must say which of the 3 layers are dense"),
    ("GptOss", {"layer_types": None}, "layer_types must name the type of each of the 3 layers"),
    ("Qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
     "layer type 'linear_attention' is not supp"),
    ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types must name the type of each of the 3 layers"),
    ("Llama", {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4, "factor": 2.0}},
     r"config\.json: rope scaling 'ntk' .* supported \(default, dynamic, linear, llama3, longrope, yarn"),
    ("Llama", {"rope_parameters": {"rope_theta": 50.0}, "rope_scaling": {"type": "linear", "factor": 8.0}},
     r"rope_scaling contradicts rope_parameters: name rope_theta in rope_scaling, too, or move its settings"),
    ("Gemma3Text", {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50.0}},
     r"rope_parameters has no full_attention: move its settings into that"),
    ("Gemma3Text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
     r"rope_scaling contradicts rope_parameters: move its settings into those of full_attention there"),
    ("Gemma4Text", {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
     r"rope_scaling {'rope_type': 'linear', 'factor': 8\.0} of Gemma4ForCausalLM is not supported"),
    ("MiMoV2Flash", {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
     r"rope_scaling {.*} of MiMoV2FlashForCausalLM is not supported"),
    ("Llama", {"architectures": ["NewForCausalLM"], "model_type": "new"},
     r"architecture NewForCausalLM is not supported \(LlamaForCausalLM.*vLLM"),
]  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize(("kind", "change", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    tiny_of: TinyOf, tmp_path: Path, kind: str, change: dict[str, Any], message: str
) -> None:
    assert_refused(edited_copy(tiny_of(kind), tmp_path, **change), message)


@pytest.mark.parametrize(
    "kind",
    [
        "Llama",
        "Llama4Text",
        "GptOss",
        "Gemma3Text",
        "Phi3",
        "DeepseekV3",
        "GlmMoeDsa",
        "KimiLinear",
        "Lfm2",
        "Lfm2Moe",
        "NemotronH",
        "Gemma4Text",
        "MiMoV2Flash",
        "MiniMaxM2",
        "Step3p7",
    ],
)
def test_any_value_in_a_configuration_is_accepted_or_refused_by_name(kind: str, tiny_of: TinyOf) -> None:
    config = config_of(tiny_of(kind))
    config |= config.pop("text_config", {})
    config |= {"rope_scaling": None, "sliding_window": None, "partial_rotary_factor": None}
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.0, "beta_fast": 32,
            "original_max_position_embeddings": 32}  # fmt: skip
    read, refused = 0, 0
    values = ("x", "", -1, 0, 0.5, 1.0, 1.5, True, [], [None], [[]] * 3, {}, {"rope_type": "linear"}, None,
              float("inf"), 1 << 40)  # fmt: skip
    for value in values:
        changes = [{key: value} for key in config]
        changes += [{"rope_parameters": {**kind, key: value}} for kind in (rope, yarn) for key in kind]
        for change in changes:
            read += 1
            refused += is_refused(
                partial(model_config_from_hf, {**config, **change}, {}, "a/config.json"), "a/config.json"
            )
    assert 100 < refused < read - 100


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": NEW, "rope_scaling": LINEAR, "rope_theta": 70.0},
        {"rope_parameters": NEW, "rope_scaling": {**LINEAR, "rope_theta": 70.0}},
        {"rope_parameters": NEW, "rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 70.0},
        {"rope_parameters": NEW, "rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 4.0,
                                                  "rope_theta": 50.0}},
        {"rope_parameters": LINEAR, "rope_scaling": {}, "rope_theta": 70.0},
        {"rope_parameters": LINEAR, "rope_scaling": None, "rope_theta": 70.0},
        {"rope_parameters": {}, "rope_scaling": LINEAR, "rope_theta": 70.0},
        {"rope_parameters": NEW, "rope_theta": 70.0},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
         "original_max_position_embeddings": 64},
    ],
)  # fmt: skip
def test_old_and_new_keys_of_rotation_count_as_in_transformers(
    settings: dict[str, Any], tiny_path: Path, tmp_path: Path
) -> None:
    """transformers 5.23 puts them into one `rope_parameters`, from which the same model is read."""
    both = edited_copy(tiny_path, tmp_path / "both", **{"rope_theta": None, **settings})
    alone = {"rope_theta": None, "rope_scaling": None, "original_max_position_embeddings": None}
    alone["rope_parameters"] = AutoConfig.from_pretrained(both).rope_parameters
    one = edited_copy(tiny_path, tmp_path / "one", **alone)
    assert read_config(both) == read_config(one)
    assert (
        context_length(str(both), None) == context_length(str(one), None) == read_config(both).max_model_len
    )


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


@pytest.mark.parametrize(
    ("name", "change", "shape"),
    [
        ("down_proj", lambda experts: experts.flatten(1), r"\[8, 1536\]"),
        ("down_proj", lambda experts: torch.empty(1 << 40, 0, 64), r"\[1099511627776, 0, 64\]"),
        ("gate_up_proj", lambda experts: experts.repeat(1, 1, 2)[:, :, :49], r"\[8, 64, 49\]"),
    ],
)
def test_experts_of_llama4_must_be_in_one_tensor_of_three_dimensions(
    tiny_of: TinyOf, tmp_path: Path, name: str, change: Any, shape: str
) -> None:
    copy = shutil.copytree(tiny_of("Llama4Text"), tmp_path / "copy")
    name = f"model.layers.1.feed_forward.experts.{name}"
    with edited_tensors(copy) as tensors:
        tensors[name] = change(tensors[name])
    assert_refused(copy, rf"model\.safetensors: tensor {name} is {shape}$")


@pytest.mark.parametrize(
    "architecture", ["Qwen2VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"]
)
def test_settings_of_the_text_must_be_a_mapping(architecture: str, tmp_path: Path) -> None:
    """By modules of transformers, and by a class of Baton."""
    config = {"architectures": [architecture], "vocab_size": 9, "vision_config": {}, "text_config": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", **config}))
    with pytest.raises(ValueError, match=r"config\.json: text_config must be a mapping of settings, not 3$"):
        read_config(tmp_path)


def test_published_checkpoints_of_step_have_other_words(tiny_of: TinyOf) -> None:
    """And layers behind the others, which predict further tokens."""
    config = config_of(tiny_of("Step3p7"))
    text, expected = config["text_config"], model_config_from_hf(config, {}, "a")
    words = (
        "mlp_layer_types", "rope_parameters", "num_key_value_heads", "n_routed_experts", "share_expert_dim",
        "num_experts_per_tok", "num_sliding_attention_heads", "per_layer_config",
    )  # fmt: skip
    published = {name: value for name, value in text.items() if name not in words} | {
        "layer_types": [*text["layer_types"], "sliding_attention"],
        "swiglu_limits": [*text["swiglu_limits"], 0.0],
        "moe_layers_enum": "1,2,3",
        "num_nextn_predict_layers": 1,
        "rope_theta": [5000.0, 100.0, 100.0, 5000.0, 100.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
        "num_attention_groups": 2,
        "moe_num_experts": 8,
        "moe_top_k": 3,
        "share_expert_dims": 32,
        "attention_other_setting": {"num_attention_heads": 8},
    }
    assert model_config_from_hf({**config, "text_config": published}, {}, "a") == expected
    local = expected.of_layer(1)
    assert (local.num_heads, local.rotary_dim, expected.rotary_dim) == (8, 16, 8)
    assert expected.experts is not None
    assert expected.experts.limits == ((0.0, 0.0), (0.5, 0.0), (0.0, 0.7))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limits": [0, 0, 1]}, "swiglu_limits must bound layers with experts alone, not"),
        ({"swiglu_limits_shared": [1, 0, 0, 0]}, "swiglu_limits_shared must bound layers with experts alone"),
        ({"num_sliding_attention_heads": 7}, "num_sliding_attention_heads 7 do not share KV heads"),
        ({"query_pre_attn_scalar": 8}, "query_pre_attn_scalar 8 of Step3p7ForConditionalGeneration"),
    ],
)
def test_what_step_cannot_have(tiny_of: TinyOf, change: dict[str, Any], message: str) -> None:
    config = config_of(tiny_of("Step3p7"))
    with pytest.raises(ValueError, match=message):
        model_config_from_hf({**config, "text_config": {**config["text_config"], **change}}, {}, "a")


def test_published_checkpoints_of_mimo_have_other_words(tiny_of: TinyOf) -> None:
    config = config_of(tiny_of("MiMoV2Flash"))
    expected = model_config_from_hf(config, {}, "a")
    words = ("layer_types", "mlp_layer_types", "rope_parameters", "sliding_window")
    published = {name: value for name, value in config.items() if name not in words}
    published |= {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "rope_theta": 5000.0,
        "swa_rope_theta": 100.0,
        "partial_rotary_factor": 0.334,
        "sliding_window_size": 19,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "add_swa_attention_sink_bias": True,
        "topk_method": "noaux_tc",
    }
    assert model_config_from_hf(published, {}, "a") == expected
    assert expected.other_attention == OtherAttention((1, 2), 100.0, num_kv_heads=4)
    defaults = {**config, "layer_types": None, "mlp_layer_types": None, "num_hidden_layers": 7}
    shape = model_config_from_hf(defaults, {}, "a")
    assert shape.other_attention is not None
    assert shape.other_attention.layers == (1, 2, 3, 4, 6)
    assert shape.experts is not None
    assert shape.experts.layers == (1, 2, 3, 4, 5, 6)


def test_published_configurations_of_llama4_leave_out_what_follows(tiny_of: TinyOf) -> None:
    """They have no `layer_types`, and those of Maverick have an empty `no_rope_layers`."""
    config = config_of(tiny_of("Llama4Text"))
    short = {key: value for key, value in config.items() if key not in ("layer_types", "moe_layers")}
    model = model_config_from_hf({**short, "no_rope_layers": []}, {}, "short")
    assert model == model_config_from_hf(config, {}, "whole")
    assert model.spans == (Span(32, chunked=True),) * 3 + (None,)
    assert model.nope is not None
    assert model.nope.layers == (3,)


@pytest.mark.parametrize("kind", ["DeepseekV32", "GlmMoeDsa"])
def test_attention_by_an_index_has_two_names_or_none(kind: str, tiny_of: TinyOf) -> None:
    """Transformers has renamed it, and older checkpoints do not name it."""
    config = config_of(tiny_of(kind))
    names: list[list[str] | None] = [["indexed_attention"] * 3, ["deepseek_sparse_attention"] * 3, None]
    models = [model_config_from_hf({**config, "layer_types": types}, {}, "a") for types in names]
    assert models[0] == models[1] == models[2]
    with pytest.raises(ValueError, match="layer_types must name the type of each of the 3"):
        model_config_from_hf({**config, "layer_types": []}, {}, "a")


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
    assert model.other_attention == OtherAttention((0, 1, 2, 3, 4, 6), 1e4)
    assert (model.rope_theta, model.rope_scaling) == (1e6, RopeScaling("linear", 8.0))
    assert model.tie_embeddings
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert model.max_model_len == context_length(str(tmp_path), None) == 131072


def transformers_gemma3_config(text: dict[str, Any]) -> dict[str, Any]:
    import transformers

    return {**transformers.Gemma3TextConfig(**text).to_dict(), "eos_token_id": None, "dtype": None}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Mistral", {"sliding_window": 24}),
        ("Qwen3Moe", {"norm_topk_prob": True}),
        ("Llama4Text", {"attention_chunk_size": 24}),
        ("Llama4Text", {"floor_scale": 17}),
        ("Llama4Text", {"use_qk_norm": False}),
        ("Llama4Text", {"attn_scale": 0.2}),
        ("Gemma3Text", {"query_pre_attn_scalar": 25}),
        ("DeepseekV3", {"routed_scaling_factor": 2.0}),
        ("DeepseekV3", {"topk_group": 3}),
        ("DeepseekV32", {"index_topk": 13}),
        ("DeepseekV32", {"indexer_rope_interleave": True}),
        ("Gemma3Text", {"sliding_window": 24}),
        ("Gemma3Text", {"layer_types": ["full_attention"] * 4}),
        ("Glm4", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    ],
    ids=repr,
)
def test_the_fingerprint_covers_what_a_configuration_says(
    kind: str, change: dict[str, Any], tiny_of: TinyOf, tmp_path: Path
) -> None:
    copy = edited_copy(tiny_of(kind), tmp_path, **change)
    assert load(copy).model_fingerprint != load(tiny_of(kind)).model_fingerprint


@pytest.mark.parametrize(
    ("kind", "absent", "empty"),
    [
        ("Llama", ["quantization_config"], {"quantization_config": {}}),
        ("Llama", [], {"per_layer_config": {}}),
        ("Llama", ["hidden_act"], {"hidden_act": None}),
        ("Llama", [], {"rope_parameters": {"rope_type": None, "rope_theta": 10000.0, "factor": None}}),
        ("Qwen3Moe", ["num_local_experts"], {"num_local_experts": None, "num_experts": 8}),
        ("Glm4", ["rope_parameters"], {"rope_parameters": {"partial_rotary_factor": None}}),
        ("DeepseekV3", [], {"sliding_window": 0, "attention_chunk_size": 0, "mlp_layer_types": []}),
        ("DeepseekV3", [], {"num_nextn_predict_layers": 0}),
        ("DeepseekV2", ["q_lora_rank"], {"q_lora_rank": 0}),
        ("DeepseekV32", [], {"indexer_types": [], "index_topk_pattern": None}),
        ("GlmMoeDsa", ["indexer_types"], {"indexer_types": [], "index_topk_pattern": ""}),
        ("KimiLinear", [], {"num_local_experts": None, "linear_attn_config": {}}),
        ("NemotronH", ["moe_latent_size"], {"moe_latent_size": 0, "mlp_hidden_act": None}),
        ("MiniMaxM2", [], {"attn_type_list": []}),
        ("MiMoV2Flash", ["rope_parameters"], {"rope_parameters": {}}),
        ("Gemma3Text", ["rope_parameters"], {"rope_parameters": {}}),
        ("Gemma4Text", ["rope_parameters"], {"rope_parameters": {}}),
    ],
    ids=repr,
)
def test_an_empty_key_is_an_absent_one(
    kind: str, absent: list[str], empty: dict[str, Any], tiny_of: TinyOf
) -> None:
    config = config_of(tiny_of(kind))
    without = {key: value for key, value in config.items() if key not in absent and key not in empty}
    if "num_experts" in empty:
        without["num_experts"] = empty["num_experts"]
    expected = replace(model_config_from_hf(without, {}, "absent"), architecture="")
    assert replace(model_config_from_hf({**config, **empty}, {}, "empty"), architecture="") == expected


def test_the_first_layers_of_lfm2_may_have_experts(tiny_of: TinyOf) -> None:
    experts = model_config_from_hf(config_of(tiny_of("Lfm2Moe")) | {"num_dense_layers": 0}, {}, "a").experts
    assert experts is not None
    assert experts.layers[0] == 0


@pytest.mark.parametrize("wide", [24, 32], ids=["no layer differs", "layers with full attention differ"])
def test_transformers_writes_the_layers_of_gemma4_that_differ(wide: int, tmp_path: Path) -> None:
    """By numbers that are equally long, and none if no layer differs. Other keys do not count then."""
    types = ["sliding_attention", "full_attention"] * 6
    shape: dict[str, Any] = {"num_hidden_layers": 12, "layer_types": types, "num_kv_shared_layers": 0}
    save_tiny(tmp_path, "Gemma4Text", **shape, head_dim=24, global_head_dim=wide)
    written = config_of(tmp_path)
    full = {} if wide == 24 else {f"{layer:02}": {"head_dim": wide} for layer in range(1, 12, 2)}
    assert written["per_layer_config"] == full
    check_model(EngineConfig(str(tmp_path)))
    others = {"global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
    read = model_config_from_hf({**written, **others}, {}, "a").other_attention
    assert read is not None
    assert (read.layers, read.head_dim, read.num_kv_heads) == (tuple(range(1, 12, 2)), wide, 2)


def test_layers_that_differ_are_refused_where_no_model_class_reads_them(tiny_of: TinyOf) -> None:
    override = {"per_layer_config": {"1": {"num_attention_heads": 2}}}
    with pytest.raises(ValueError, match="per_layer_config is not supported"):
        model_config_from_hf(config_of(tiny_of("Llama")) | override, {}, "a")
    for shape in ({"sliding_window": 8}, {"head_dim": 32, "intermediate_size": 8}):
        override = {"per_layer_config": {str(layer): shape for layer in (1, 4, 5)}}
        with pytest.raises(ValueError, match="per_layer_config must give all layers"):
            model_config_from_hf(config_of(tiny_of("Gemma4Text")) | override, {}, "a")


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Llama4Text"])
def test_dummy_experts_differ(kind: str, tiny_of: TinyOf) -> None:
    moe = load(tiny_of(kind), load_format="dummy").runner.model.layers[0].mlp
    assert moe.experts.gate_up.shape == (8, 2 * 24, 64)
    assert moe.experts.down.shape == (8, 64, 24)
    assert len({float(weight.sum()) for weight in (*moe.experts.gate_up, *moe.experts.down)}) == 16


def test_the_least_initial_time_step_is_no_bound(tiny_of: TinyOf) -> None:
    config = config_of(tiny_of("NemotronH"))
    bounds = [{"time_step_min": 0.5, "time_step_limit": [0.0, limit]} for limit in (math.inf, 2.0)]
    states = [model_config_from_hf({**config, **each}, {}, "a").state for each in bounds]
    assert [state and state.dt_limits for state in states] == [(0.0, math.inf), (0.0, 2.0)]
