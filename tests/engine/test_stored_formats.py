"""Quantized checkpoints are read as their dequantized weights, or refused: in several formats, with settings
of single modules, with changed settings, and as the real tools write them.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine import EngineConfig
from baton.engine.execution.cache_limits import weight_bytes
from baton.engine.layers import in_place
from baton.engine.layers.linear import packed_memory
from baton.engine.layers.ranks import Ranks
from baton.engine.loader import choose_format, load_model, open_checkpoint, planned_format, torch_ao
from docs.lab import formats
from tests.engine.checkpoints import assert_refused, edit_json, edited_tensors, load
from tests.engine.conftest import request_of, tokens_of
from tests.engine.quantized import KINDS, pack_quantized, save_quantized, torchao
from tests.engine.test_fp8 import compressed as compressed_float

CPU = torch.device("cpu")


def tokens(directory: Path, **config: Any) -> list[list[int]]:
    requests = [request_of(i, range(3, 40 + i), max_tokens=20, ignore_eos=True) for i in range(2)]
    return tokens_of(load(directory, num_blocks=32, **config), requests)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "kind", ["mixed", "dynamic", "nvfp4", *sorted({*KINDS} - {"mixed", "dynamic", "nvfp4"})]
)
def test_tokens_are_those_of_the_dequantized_weights(kind: str, tmp_path: Path) -> None:
    """By a class of Baton, and by the modules of transformers."""
    exact = save_quantized(tmp_path, kind)
    expected = tokens(exact)
    assert tokens(tmp_path) == expected
    assert tokens(tmp_path, model_impl="transformers", skip_model_check=True) == expected


@pytest.mark.parametrize("kind", ["bytes", "auto-round", "nvfp4", "modelopt-fp8"])
def test_modules_of_transformers_dequantize_experts(kind: str, tmp_path: Path) -> None:
    exact = save_quantized(tmp_path, kind, "Qwen3Moe", moe_intermediate_size=64)
    expected = tokens(exact)
    assert tokens(tmp_path, model_impl="transformers", skip_model_check=True) == expected


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes."""
    if tensor.layout is not torch.strided:
        return packed_memory(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@pytest.fixture(scope="module")
def experts_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints with experts, each written once: no test may change them."""
    sizes = {"hidden_size": 512, "intermediate_size": 256, "moe_intermediate_size": 256, "num_experts": 4}

    @cache
    def saved(kind: str) -> Path:
        directory = tmp_path_factory.mktemp(kind)
        save_quantized(directory, kind, "Qwen3Moe", **sizes, mlp_only_layers=[0] if kind == "mixed" else [])
        return directory

    return saved


@pytest.mark.cases(2)
@pytest.mark.parametrize("model_impl", ["transformers", "auto"])
@pytest.mark.parametrize("kind", ["words-8", "awq", *sorted({*KINDS} - {"awq", "words-8"})])
def test_memory_sizing_counts_what_is_kept(
    kind: str, model_impl: str, experts_of: Callable[[str], Path]
) -> None:
    """Experts of modules are dequantized, and so is what this CPU has no product for."""
    config, dtype = EngineConfig(str(experts_of(kind)), model_impl=model_impl), torch.bfloat16
    checkpoint = open_checkpoint(config, CPU)
    weight_format = planned_format(config, checkpoint, CPU)
    model, _, _ = load_model(checkpoint, 64, dtype, CPU, lambda *_: None, weight_format, Ranks())
    kept = dict(map(memory_of, in_place.tensors(model)))
    assert weight_bytes(checkpoint.config, weight_format, dtype) == pytest.approx(
        sum(kept.values()), rel=0.02
    )


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_planned_for_a_gpu_elsewhere(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the headers of its files alone, with the products of a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save_quantized(tmp_path, kind, hidden_size=256, intermediate_size=256)
    config = EngineConfig(str(tmp_path))
    checkpoint = open_checkpoint(config, CPU)
    stored = planned_format(config, checkpoint, torch.device("cuda"))
    plain = checkpoint.config.num_parameters * torch.bfloat16.itemsize
    assert weight_bytes(checkpoint.config, stored, torch.bfloat16) < plain or "dequantized" in stored.name


def test_memory_sizing_counts_experts_and_routers_of_modules_as_plain_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.layers.grouped_linear.from_hopper_on", lambda device: True)
    save_quantized(tmp_path, "awq", "Qwen3Moe", moe_intermediate_size=64)
    sizes = []
    for model_impl in ("auto", "transformers"):
        config = EngineConfig(str(tmp_path), model_impl=model_impl)
        model = open_checkpoint(config, CPU).config
        weight_format = choose_format(config, model, torch.device("cuda"))
        sizes.append(weight_format.matrix_bytes(model, torch.bfloat16) * model.matrix_parameters)
    experts = 2 * 8 * (3 * 128 * 64 + 128)  # layers, experts, their matrices and rows of the router
    assert sizes[1] - sizes[0] == pytest.approx((2 - 1 / 2 - 4 / 32) * experts)


def test_biases_of_experts_must_be_0(tmp_path: Path) -> None:
    """AutoGPTQ writes them, and no model with experts has them."""
    exact = save_quantized(tmp_path, "gptq", "Qwen3Moe", moe_intermediate_size=64)
    assert tokens(tmp_path) == tokens(exact)
    with edited_tensors(tmp_path) as tensors:
        (bias, *_) = [name for name in tensors if name.endswith("experts.1.up_proj.bias")]
        tensors[bias][3] = 1
    with pytest.raises(ValueError, match=r"experts\.1\.up_proj\.bias is not 0"):
        load(tmp_path)


def test_more_scales_than_columns_are_refused(tmp_path: Path) -> None:
    """The files of ModelOpt's AWQ do not say how many columns have a scale."""
    save_quantized(tmp_path, "modelopt-awq")
    with edited_tensors(tmp_path) as tensors:
        name = next(name for name in tensors if name.endswith("gate_proj.weight_scale"))
        tensors[name] = tensors[name].repeat(1, 1000)
    assert_refused(tmp_path, r"gate_proj\.weight_scale is \[")


def test_quantized_experts_that_no_module_has_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, "bytes", "Qwen3Moe")
    with edited_tensors(tmp_path) as tensors:
        for name in [name for name in tensors if ".mlp.experts." in name]:
            tensors[name.replace(".mlp.", ".other.")] = tensors.pop(name)
    message = "quantized experts of Qwen3MoeForCausalLM are not supported, such as model.layers.0.other"
    assert_refused(tmp_path, message, model_impl="transformers", skip_model_check=True)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("dynamic", {"dynamic": {}}, r"v_proj\.qweight is \[32, 64\], .* should be \[16, 64\]"),
        ("dynamic", {"dynamic": {"-:.*": {}}}, r"q_proj is plain by these settings, but has tensors of gptq"),
        ("dynamic", {"dynamic": {"(": {}}}, r"dynamic '\('"),
        ("dynamic", {"dynamic": {"x": {"bits": 3}}}, r"bits 3 is not supported \(2, 4, 8 is\)"),
        ("auto-round", {"packing_format": "auto_round:marlin"}, r"packing_format 'auto_round:marlin' is not"),
        ("auto-round", {"data_type": "mx_fp"}, r"data_type 'mx_fp' is not supported \(int is\)"),
        ("mixed", {"ignore": ["re:.*q_proj"]}, r"q_proj is plain by these settings, but has tensors of"),
        ("mixed", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (
            "bytes",
            {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input"}]}}}},
            r"transform_config rotates activations \(input\), .* --engine vllm",
        ),
        ("torchao-int4", torchao("Int4WeightOnlyConfig", group_size=-1), "group_size None is not supported"),
        ("torchao-fp8", torchao("Float8StaticConfig"), "_type 'Float8StaticConfig' is not supported"),
        ("modelopt-fp8", {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        ("auto-round-nvfp4", {"data_type": "fp"}, "data_type 'fp4' is not supported"),
        ("bytes", {"transform_config": {"config_groups": 1}}, "transform_config .* is not supported"),
        ("gptq", {"bits": 3}, r"bits 3 is not supported \(2, 4, 8 is\)"),
        ("gptq", {"group_size": 48}, r"groups of 48 are not supported \(16, 32, .*, -1 are\)"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported"),
        ("in-rows", pack_quantized(num_bits=3), "num_bits 3 is not supported"),
        ("in-rows", pack_quantized(num_bits=8), r"weight_packed is .* it should be"),
        ("in-rows", pack_quantized(strategy="block"), "strategy 'block' is not supported"),
        ("in-rows", pack_quantized(actorder="group"), "actorder 'group' is not supported"),
        ("in-rows", {"format": "marlin-24"}, "'marlin-24' of compressed-tensors"),
        ("in-rows", KINDS["gptq"][0], r"tensor model\.layers\.0\.self_attn\.q_proj\.weight is missing"),
        ("bytes", {"quant_method": "fp8", "weight_block_size": [64, 64]}, r"blocks of \[64, 64\]"),
        ("bytes", {"quant_method": "fp8", "fmt": "e5m2"}, r"fmt 'e5m2' is not supported \(e4m3 is\)"),
        ("bytes", compressed_float("group"), "strategy 'group' is not supported"),
        ("bytes", compressed_float("channel", num_bits=4), r"weights .*'num_bits': 4.* are not supported"),
        ("bytes", {"format": "dense"}, r"the format 'dense' of compr"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_quantized(tmp_path, kind)
    edit_json(tmp_path / "config.json", quantization_config={**KINDS[kind][0], **changes})
    assert_refused(tmp_path, message)


def test_rotations_of_weights_are_in_the_weights(tmp_path: Path) -> None:
    exact = save_quantized(tmp_path, "bytes")
    rotations = {
        "config_groups": {"R1": {"apply": [{"location": "weight_input"}, {"location": "weight_output"}]}}
    }
    settings = {**KINDS["bytes"][0], "transform_config": rotations}
    edit_json(tmp_path / "config.json", quantization_config=settings)
    assert tokens(tmp_path) == tokens(exact)


VALUES: dict[str, list[Any]] = {
    "bits": [2, 3, 8],
    "group_size": [-1, 16, 64, 128, 0, "32"],
    "sym": [False, None],
    "desc_act": [True],
    "checkpoint_format": ["gptq_v2", "marlin", ""],
    "packing_format": ["auto_round", "auto_round:auto_awq", "gptq"],
    "extra_config": [{}, {".*": {"bits": 8}}, {"model.layers.0.mlp.up_proj": {"group_size": 64}}],
    "dynamic": [{}, None, {"-:.*": {}}, {".*q_proj": {"bits": 8}}, {"+:.*": {"group_size": 64}}],
    "modules_to_not_convert": [["lm_head"], ["q_proj"]],
    "format": ["pack-quantized", "int-quantized", "float-quantized", "mixed-precision", "dense", None],
    "ignore": [[], None, ["re:.*down_proj"], ["model.layers.1.mlp.up_proj"], "lm_head"],
    "num_bits": [2, 4, 8],
    "type": ["int", "float"],
    "strategy": ["group", "channel", "tensor", "block", "tensor_group"],
    "symmetric": [False, True],
    "targets": [["Linear"], [], ["re:.*q_proj"], ["model.layers.0.mlp.up_proj"]],
    "actorder": ["group", "static"],
    "quant_method": ["gptq", "awq", "auto-round", "fp8", "compressed-tensors", "bitsandbytes", "torchao"],
    "data_type": ["int", "fp", "mx_fp", "nv_fp", "mx_int", None],
    "fmt": ["e5m2"],
    "weight_block_size": [None, [128, 128], [64, 64]],
    "quant_algo": ["FP8", "NVFP4", "W4A16_AWQ", None],
    "_type": [*torch_ao.BYTES, torch_ao.INT4, *torch_ao.FP8, "Float8StaticConfig"],
    "_version": [1, 3],
}
OF_ZEROS = "checkpoint_format", "quant_method"
"""They say what the zeros of GPTQ's are less by. No tensor of an asymmetric checkpoint tells."""
OF_WEIGHTS = "symmetric", "group_size", "actorder"
"""Settings of compressed-tensors that may be added beside `num_bits`."""


def mutations(settings: dict[str, Any], *, within: bool = False) -> Iterator[dict[str, Any]]:
    """Settings of which one is another, at any depth. `within` others, few are added."""
    added = (
        (OF_WEIGHTS if "num_bits" in settings else ()) if within else VALUES.keys() - {"num_bits", "targets"}
    )
    for key, values in VALUES.items():
        if key in settings or key in added:
            yield from ({**settings, key: value} for value in values)
    for key, inner in settings.items():
        if isinstance(inner, dict):
            yield from ({**settings, key: changed} for changed in mutations(inner, within=True))


def found(directory: Path) -> list[list[int]] | None:
    """None: the checkpoint is refused by name. Any other error fails the test."""
    try:
        return tokens(directory)
    except ValueError as error:
        if not str(error).startswith(str(directory)):
            raise
        return None


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_changed_settings_give_the_same_tokens_or_are_refused(kind: str, tmp_path: Path) -> None:
    """Some 80 of each kind."""
    exact = save_quantized(tmp_path, kind)
    expected, refused = tokens(exact), 0
    usual = KINDS[kind][0]
    fixed = OF_ZEROS if kind in ("gptq", "desc_act") else ()
    changed = [each for each in mutations(usual) if all(each.get(key) == usual.get(key) for key in fixed)]
    for settings in changed:
        edit_json(tmp_path / "config.json", quantization_config=settings)
        if (read := found(tmp_path)) is None:
            refused += 1
        else:
            assert read == expected, settings
    print(f"{kind}: {len(changed)} changes, {refused} refused")
    assert len(changed) > 60
    assert refused


@pytest.mark.long
@pytest.mark.timeout(3600)  # packages of a tool are installed, some built
@pytest.mark.parametrize("tool", formats.PACKAGES)
def test_the_page_says_what_becomes_of_the_checkpoints_of_tools(tool: str) -> None:
    """How far rounded activations are depends on the machine, and so does what ModelOpt can write."""

    def without_numbers(rows: list[formats.Row]) -> set[formats.Row]:
        return {row._replace(verdict=row.verdict.partition("; activations")[0]) for row in rows}

    rows = [row for row in formats.measure(tool) if not row.verdict.startswith("not written")]
    assert rows
    assert without_numbers(rows) - without_numbers(formats.recorded(formats.PATH.read_text(), tool)) == set()
