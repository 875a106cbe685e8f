"""Quantized checkpoints are read as their dequantized weights, or refused: in several formats, with settings
of single modules, with changed settings, and as the real tools write them.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.kernels import FLOATS, FP8
from baton.engine.loader import torch_ao
from docs.lab import formats
from tests.engine.checkpoints import assert_refused, edit_json, load
from tests.engine.conftest import request_of, save_tiny, tokens_of
from tests.engine.test_int4 import SIZES, gptq, pack_quantized, words

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a matrix, and the values that they stand for."""
Way = Callable[[Tensor], Stored]


def as_bytes(weight: Tensor) -> Stored:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = (weight / scale).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


def as_words(bits: int, size: int = 32) -> Callable[[Tensor], Stored]:
    def of(weight: Tensor) -> Stored:
        middle, groups = 1 << (bits - 1), weight.unflatten(1, (-1, size))
        scale = groups.abs().amax(dim=2, keepdim=True) / (middle - 1)
        codes = (groups / scale).round() + middle
        packed = pack(codes.flatten(1), bits)
        shape = torch.tensor(weight.shape)
        stored = {"weight_packed": packed, "weight_scale": scale[:, :, 0], "weight_shape": shape}
        return stored, ((codes - middle) * scale).flatten(1)

    return of


def pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 4:
        return words(codes)
    return codes.to(torch.uint8).contiguous().view(torch.int32)


def as_gptq(bits: int) -> Callable[[Tensor], Stored]:
    def of(weight: Tensor) -> Stored:
        middle, groups = 1 << (bits - 1), weight.unflatten(1, (-1, 32))
        scale = groups.abs().amax(dim=2, keepdim=True) / (middle - 1)
        codes = (groups / scale).round() + middle
        zeros = torch.full(scale.shape[:2], float(middle))
        if bits == 4:
            stored = gptq(codes.flatten(1), zeros, scale[:, :, 0])
        else:
            stored = {
                "qweight": pack(codes.flatten(1), bits).T,
                "qzeros": pack(zeros.T - 1, bits),
                "scales": scale[:, :, 0].T,
            }
        return stored, ((codes - middle) * scale).flatten(1)

    return of


def as_auto_round(weight: Tensor) -> Stored:
    stored, values = as_gptq(4)(weight)
    return {
        name: tensor for name, tensor in stored.items() if name in ("qweight", "qzeros", "scales")
    }, values


def as_nvfp4(weight: Tensor) -> Stored:
    groups, whole = weight.unflatten(1, (-1, 16)), 448 * 6 / weight.abs().max()
    scale = (groups.abs().amax(dim=2) / 6 * whole).to(FP8)
    each = (scale.float() / whole)[:, :, None]
    codes = (groups[..., None] / each[..., None] - FLOATS).abs().argmin(dim=-1)
    pairs = codes.flatten(1).to(torch.uint8)
    packed = pairs[:, ::2] | (pairs[:, 1::2] << 4)
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": whole.reshape(1)}
    return stored, (FLOATS[codes] * each).flatten(1)


def as_torchao_int4(weight: Tensor) -> Stored:
    groups = weight.unflatten(1, (-1, 32))
    least, greatest = groups.aminmax(dim=2, keepdim=True)
    scale = (greatest - least) / 15
    zero = least + 8 * scale
    codes = ((groups - zero) / scale).round().clamp(-8, 7)
    pairs = codes.flatten(1).to(torch.int8)
    stored = {
        "_weight_qdata": (pairs[:, ::2] & 15) | (pairs[:, 1::2] << 4),
        "_weight_scale": scale[:, :, 0].T,
        "_weight_zero_point": zero[:, :, 0].T,
    }
    return stored, (codes * scale + zero).flatten(1)


def named(way: Way, **names: str) -> Way:
    """The same tensors under other names."""

    def of(weight: Tensor) -> Stored:
        stored, values = way(weight)
        return {names.get(name, name): tensor for name, tensor in stored.items()}, values

    return of


def as_modelopt_nvfp4(weight: Tensor) -> Stored:
    stored, values = as_nvfp4(weight)
    whole = {"weight_scale_2": 1 / stored.pop("weight_global_scale").view(())}
    return {"weight": stored.pop("weight_packed"), **stored, **whole}, values


def torchao(kind: str, **settings: Any) -> dict[str, Any]:
    written = {"_type": kind, "_version": 2, "_data": settings}
    return {"quant_method": "torchao", "quant_type": {"default": written}}


def as_fp8(weight: Tensor) -> Stored:
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    codes = (weight / scale).to(FP8)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def as_fp8_static(weight: Tensor) -> Stored:
    stored, _ = as_fp8(weight)
    scale = stored["weight_scale"][:, 0].half()
    tensors = {**stored, "weight_scale": scale, "input_scale": torch.ones(1, dtype=torch.bfloat16)}
    return tensors, stored["weight"].float() * scale[:, None].float()


def as_fp8_blocks(weight: Tensor) -> Stored:
    """One scale for all blocks of 128 × 128."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scale = (weight.abs().max() / 448).bfloat16().expand(rows, columns)
    codes = (weight / scale[0, 0].float()).to(FP8)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * scale[0, 0].float()


def as_mxfp8(weight: Tensor) -> Stored:
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(dim=2) / 448).log2().ceil()
    each = (2.0**exponents)[:, :, None]
    codes = (groups / each).to(FP8)
    stored = {"weight": codes.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}
    return stored, (codes.float() * each).flatten(1)


def group(name: str, *targets: str, **weights: Any) -> dict[str, Any]:
    return {"targets": [*targets], "weights": weights, "format": name}


def compressed(form: str, *groups: dict[str, Any]) -> dict[str, Any]:
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": named,
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
AUTO_FP8 = {"quant_method": "auto-round", "bits": 8, "data_type": "fp", "sym": True, "fmt": "e4m3"}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
DYNAMIC = {r"-:.*layers\.0\.mlp.*": {}, r"+:.*(v|down)_proj": {"bits": 8}}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Way | None]]] = {
    "gptq": (GPTQ, {"": as_gptq(4)}),
    "gptq-8": ({**GPTQ, "bits": 8}, {"": as_gptq(8)}),
    "dynamic": (
        {**GPTQ, "dynamic": DYNAMIC},
        {"layers.0.mlp": None, "v_proj": as_gptq(8), "down_proj": as_gptq(8), "": as_gptq(4)},
    ),
    "auto-round": (
        {
            **GPTQ,
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {"model.layers.1.mlp.up_proj": {"bits": 16}},
        },
        {"layers.1.mlp.up_proj": None, "": as_auto_round},
    ),
    "bytes": (compressed("int-quantized", group("int-quantized", "Linear", **INT8)), {"": as_bytes}),
    "words-8": (pack_quantized(num_bits=8), {"": as_words(8)}),
    "nvfp4": (
        compressed("nvfp4-pack-quantized", group("nvfp4-pack-quantized", "Linear", **NV)),
        {"": as_nvfp4},
    ),
    "mxfp8": (compressed("mxfp8-quantized", group("mxfp8-quantized", "Linear", **MX8)), {"": as_mxfp8}),
    "auto-round-nvfp4": (
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:llm_compressor",
            "data_type": "nv_fp",
            "bits": 4,
            "group_size": 16,
        },
        {"": as_nvfp4},
    ),
    "auto-round-fp8": (
        {**AUTO_FP8, "packing_format": "auto_round:fp8_static", "group_size": -1},
        {"": as_fp8_static},
    ),
    "auto-round-fp8-blocks": (
        {**AUTO_FP8, "packing_format": "auto_round:fp8", "weight_block_size": [128, 128]},
        {"": as_fp8_blocks},
    ),
    "torchao-int4": (torchao("Int4WeightOnlyConfig", group_size=32), {"": as_torchao_int4}),
    "torchao-fp8": (
        torchao("Float8WeightOnlyConfig"),
        {"": named(as_fp8, weight="_weight_qdata", weight_scale="_weight_scale")},
    ),
    "modelopt-fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, {"": as_fp8}),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"": as_modelopt_nvfp4}),
    "mixed": (
        compressed(
            "mixed-precision",
            group("float-quantized", "Linear", **{**INT8, "type": "float"}),
            group("pack-quantized", r"re:.*(q|k)_proj$", **INT4),
            group("int-quantized", "model.layers.0.mlp.gate_proj", **INT8),
        ),
        {"q_proj": as_words(4), "k_proj": as_words(4), "layers.0.mlp.gate_proj": as_bytes, "": as_fp8},
    ),
}
"""Settings, and how the matrices whose names have a part are stored; the first part counts. None: plain."""


def save(directory: Path, kind: str, family: str = "Llama") -> Path:
    """A tiny checkpoint. Returns a directory with the values that its weights stand for."""
    settings, ways = KINDS[kind]
    save_tiny(directory, family, **SIZES)
    exact = shutil.copytree(directory, directory / "exact")
    tensors, values = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        way = next(way for part, way in ways.items() if part in name)
        if way is None:
            continue
        stored, values[name] = way(tensors.pop(name))
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
    save_file({**load_file(exact / "model.safetensors"), **values}, exact / "model.safetensors")
    save_file(tensors, directory / "model.safetensors")
    edit_json(directory / "config.json", quantization_config=settings)
    return exact


def tokens(directory: Path, **config: Any) -> list[list[int]]:
    requests = [request_of(i, range(3, 40 + i), max_tokens=20, ignore_eos=True) for i in range(2)]
    return tokens_of(load(directory, num_blocks=32, **config), requests)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "kind", ["mixed", "dynamic", "nvfp4", *sorted({*KINDS} - {"mixed", "dynamic", "nvfp4"})]
)
def test_tokens_are_those_of_the_dequantized_weights(kind: str, tmp_path: Path) -> None:
    """By a class of Baton, and by the modules of transformers."""
    exact = save(tmp_path, kind)
    expected = tokens(exact)
    assert tokens(tmp_path) == expected
    assert tokens(tmp_path, model_impl="transformers", skip_model_check=True) == expected


def test_modules_of_transformers_take_no_quantized_experts(tmp_path: Path) -> None:
    save(tmp_path, "bytes", "Qwen3Moe")
    message = "quantized experts of Qwen3MoeForCausalLM are not supported, such as model.layers.0"
    assert_refused(tmp_path, message, model_impl="transformers")


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
        ("modelopt-fp8", {"quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ' is not supported"),
        ("auto-round-nvfp4", {"data_type": "fp"}, "data_type 'fp4' is not supported"),
        ("bytes", {"transform_config": {"config_groups": 1}}, "transform_config .* is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_field(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path, kind)
    edit_json(tmp_path / "config.json", quantization_config={**KINDS[kind][0], **changes})
    assert_refused(tmp_path, message)


def test_rotations_of_weights_are_in_the_weights(tmp_path: Path) -> None:
    exact = save(tmp_path, "bytes")
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
    exact = save(tmp_path, kind)
    expected, refused = tokens(exact), 0
    changed = list(mutations(KINDS[kind][0]))
    for settings in changed:
        edit_json(tmp_path / "config.json", quantization_config=settings)
        if (read := found(tmp_path)) is None:
            refused += 1
        else:
            assert read == expected, settings
    print(f"{kind}: {len(changed)} changes, {refused} refused")
    assert len(changed) > 70
    assert refused


@pytest.mark.long
@pytest.mark.parametrize("tool", formats.PACKAGES)
def test_the_page_says_what_becomes_of_the_checkpoints_of_tools(tool: str) -> None:
    """How far rounded activations are depends on the machine."""
    page = {line.partition("; activations")[0].rstrip(" |") for line in formats.PATH.read_text().splitlines()}
    for row in formats.measure(tool):
        assert str(row).partition("; activations")[0].rstrip(" |") in page
