"""Tiny checkpoints as tools quantize them, beside plain ones with the values that their weights stand for."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.kernels import FLOATS, FP8
from tests.engine.checkpoints import edit_json
from tests.engine.conftest import save_tiny

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a matrix, and the values that they stand for."""
Way = Callable[[Tensor], Stored]
Write = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]
"""Tensors from the codes [rows, columns], and the zeros and scales [rows, groups]."""
SIZE = 32
"""Columns of a group."""
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ: place i of a word has output AWQ_PLACES[i]."""


def words(integers: Tensor, bits: int = 4, places: tuple[int, ...] = ()) -> Tensor:
    """[rows, n · 32 / bits] → [rows, n] int32, the integer at places[i] in the bits from `bits` · i on."""
    parts = integers.to(torch.int64).unflatten(1, (-1, 32 // bits))
    places = places or tuple(range(32 // bits))
    packed = torch.stack([parts[:, :, place] << bits * i for i, place in enumerate(places)]).sum(dim=0)
    return packed.where(packed < 1 << 31, packed - (1 << 32)).to(torch.int32)


def gptq(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int = 4) -> dict[str, Tensor]:
    """The stored zeros are less by 1; for a zero of 0 a word borrows, as in GPTQModel 7 and auto-round 0.16.
    AutoGPTQ writes biases for all matrices."""
    return {
        "bias": torch.zeros(len(codes)),
        "qweight": words(codes, bits).T,
        "qzeros": words(zeros.T - 1, bits),
        "scales": scales.T,
        "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // SIZE,
    }


def auto_round(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    stored = gptq(codes, zeros, scales)
    return {name: stored[name] for name in ("qweight", "qzeros", "scales")}


def stored_order(columns: int) -> Tensor:
    return torch.randperm(columns, generator=torch.Generator().manual_seed(0))


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {
        "qweight": words(codes.T, places=AWQ_PLACES),
        "qzeros": words(zeros.T, places=AWQ_PLACES),
        "scales": scales.T,
    }


def in_rows(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    stored = in_rows_symmetric(codes, zeros, scales)
    return stored | {"weight_zero_point": words(zeros.T).T}


def in_rows_symmetric(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int = 4) -> dict[str, Tensor]:
    shape = torch.tensor(codes.shape)
    return {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": shape}


def integers(write: Write, bits: int = 4, *, symmetric: bool = False) -> Way:
    """In groups of SIZE columns."""

    def of(weight: Tensor) -> Stored:
        groups, middle = weight.unflatten(1, (-1, SIZE)), 1 << bits - 1
        if symmetric:
            scales = (groups.abs().amax(dim=2) / (middle - 1)).half()
            zeros = torch.full_like(scales, middle).float()
        else:
            groups[1::3, 0] = groups[1::3, 0].abs()  # a group whose zero is 0
            least, most = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2)
            scales = ((most - least) / (2 * middle - 3)).half()
            zeros = (-least / scales.float()).round()
        each, zero = scales.float()[:, :, None], zeros[:, :, None]
        codes = (groups / each + zero).round().clamp(0, 2 * middle - 1)
        return write(codes.flatten(1), zeros, scales), ((codes - zero) * each).flatten(1)

    return of


def desc_act(weight: Tensor) -> Stored:
    """The columns of a group are apart. Matrices with the same input have the same order of columns."""
    order = stored_order(weight.shape[1])

    def write(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
        stored = gptq(codes, zeros, scales)
        return stored | {"qweight": words(codes[:, order]).T, "g_idx": stored["g_idx"][order]}

    stored, values = integers(write)(weight)
    return stored, values[:, order]


def as_bytes(weight: Tensor) -> Stored:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    codes = (weight / scale).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scale}, codes * scale


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


def as_modelopt_awq(weight: Tensor) -> Stored:
    """Groups of 64 columns; two rows in a byte; columns are scaled before."""
    before = torch.linspace(0.5, 2, weight.shape[1])
    groups = (weight / before).unflatten(1, (-1, 64))
    scales = groups.abs().amax(-1, keepdim=True) / 7
    codes = (groups / scales).round().clamp(-8, 7)
    values = (codes * scales).flatten(1) * before
    bits = (codes.flatten(1).int() & 15).unflatten(0, (-1, 2))
    packed = (bits[:, 0] | bits[:, 1] << 4).to(torch.uint8)
    return {"weight": packed, "weight_scale": scales[..., 0], "pre_quant_scale": before}, values


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


def pack_quantized(**weights: Any) -> dict[str, Any]:
    kept = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": SIZE, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": kept, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
AUTO_FP8 = {"quant_method": "auto-round", "bits": 8, "data_type": "fp", "sym": True, "fmt": "e4m3"}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MX8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
DYNAMIC = {r"-:.*layers\.0\.mlp.*": {}, r"+:.*(v|down)_proj": {"bits": 8}}
GPTQ_4, GPTQ_8 = (integers(partial(gptq, bits=bits), bits, symmetric=True) for bits in (4, 8))
ROWS_4, ROWS_8 = (integers(partial(in_rows_symmetric, bits=bits), bits, symmetric=True) for bits in (4, 8))
KINDS: dict[str, tuple[dict[str, Any], dict[str, Way | None]]] = {
    "gptq": ({**GPTQ, "sym": False, "desc_act": False}, {"": integers(gptq)}),
    "gptq-symmetric": (GPTQ, {"": GPTQ_4}),
    "desc_act": ({**GPTQ, "sym": False, "desc_act": True}, {"": desc_act}),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": SIZE, "version": "gemm"}, {"": integers(awq)}),
    "in-rows": (pack_quantized(symmetric=False), {"": integers(in_rows)}),
    "in-rows-symmetric": (
        pack_quantized(symmetric=True),
        {"": ROWS_4},
    ),
    "gptq-8": ({**GPTQ, "bits": 8}, {"": GPTQ_8}),
    "dynamic": (
        {**GPTQ, "dynamic": DYNAMIC},
        {"layers.0.mlp": None, "v_proj": GPTQ_8, "down_proj": GPTQ_8, "": GPTQ_4},
    ),
    "auto-round": (
        {
            **GPTQ,
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "extra_config": {"model.layers.1.mlp.up_proj": {"bits": 16}},
        },
        {"layers.1.mlp.up_proj": None, "": integers(auto_round, symmetric=True)},
    ),
    "bytes": (compressed("int-quantized", group("int-quantized", "Linear", **INT8)), {"": as_bytes}),
    "words-8": (pack_quantized(num_bits=8), {"": ROWS_8}),
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
    "modelopt-awq": ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, {"": as_modelopt_awq}),
    "modelopt-nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"": as_modelopt_nvfp4}),
    "mixed": (
        compressed(
            "mixed-precision",
            group("float-quantized", "Linear", **{**INT8, "type": "float"}),
            group("pack-quantized", r"re:.*(q|k)_proj$", **INT4),
            group("int-quantized", "model.layers.0.mlp.gate_proj", **INT8),
        ),
        {"q_proj": ROWS_4, "k_proj": ROWS_4, "layers.0.mlp.gate_proj": as_bytes, "": as_fp8},
    ),
}
"""Settings, and how the matrices whose names have a part are stored; the first part counts. None: plain."""


def save_quantized(
    directory: Path, kind: str, family: str = "Llama", *, head: bool = False, **changes: Any
) -> Path:
    """A tiny checkpoint. Returns a directory with the values that its weights stand for. `head`: the output
    projection is quantized, too."""
    settings, ways = KINDS[kind]
    save_tiny(directory, family, **{**SIZES, **changes})
    exact = shutil.copytree(directory, directory / "exact")
    tensors, values = load_file(directory / "model.safetensors"), {}
    suffixes = ("_proj.weight", "lm_head.weight") if head else "_proj.weight"
    for name in [name for name in tensors if name.endswith(suffixes)]:
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
