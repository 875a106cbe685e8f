"""Quantizes a tiny checkpoint with the real tools: `python quantizers.py DIRECTORY KIND`.

DIRECTORY has a plain checkpoint. Its matrices become those of KIND, and DIRECTORY/exact has the values that
the tool itself reads from them. Runs with the tools of `PACKAGES` on the path.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PACKAGES = ("compressed-tensors==0.20.1", "torchao==0.18.0", "bitsandbytes==0.50.2", "loguru==0.7.3")

Tensors = dict[str, Tensor]
Quantized = tuple[Tensors, Tensor]
"""The tensors of a matrix by their suffixes, and the values that the tool reads from them."""


def _scale(weight: Tensor, size: int, most: float) -> Tensor:
    """[rows, groups]: that of symmetric codes up to `most`."""
    return weight.unflatten(1, (-1, size)).abs().amax(dim=2) / most


def compressed(name: str, **kept: Any) -> tuple[dict[str, Any], Callable[[str, Tensor], Quantized]]:
    """A format of compressed-tensors: a group of settings, and how it quantizes."""
    from compressed_tensors.compressors import BaseCompressor  # pyrefly: ignore[missing-import]
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8  # pyrefly: ignore[missing-import]
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # pyrefly: ignore[missing-import]

    args = QuantizationArgs(**kept)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=name)
    compressor = BaseCompressor.load_from_registry(name)

    def of(module: str, weight: Tensor) -> Quantized:
        size = args.group_size or weight.shape[1]
        state: Tensors = {"weight": weight}
        floats = args.type == "float"
        most = 448.0 if floats and args.num_bits == 8 else 6.0 if floats else 2.0 ** (args.num_bits - 1) - 1
        scale = _scale(weight, size, most)
        if name == "nvfp4-pack-quantized":
            state["weight_global_scale"] = (448.0 * 6.0 / weight.abs().max()).reshape(1)
            scale = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        elif name.startswith("mx"):
            scale = 2.0 ** scale.log2().ceil()
        elif args.strategy == "tensor":
            scale = scale.amax().reshape(1)
        if not args.symmetric:
            groups = weight.unflatten(1, (-1, size))
            least, greatest = groups.amin(dim=2), groups.amax(dim=2)
            scale = (greatest - least) / (2**args.num_bits - 1)
            zeros = -(2 ** (args.num_bits - 1)) - (least / scale).round()
            state["weight_zero_point"] = zeros.clamp(-128, 127).to(torch.int8)
        state["weight_scale"] = scale
        stored = compressor.compress(dict(state), scheme)
        read = compressor.decompress(dict(stored), scheme)["weight"]
        if name == "nvfp4-pack-quantized":  # which it reads in 16 bits
            codes = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape).float()
            scales = stored["weight_scale"].float() / stored["weight_global_scale"]
            read = (codes.unflatten(1, (-1, size)) * scales[:, :, None]).flatten(1)
        return {k: v.detach() for k, v in stored.items()}, read.detach().float()

    return scheme.model_dump(mode="json"), of


INT8 = {"num_bits": 8, "type": "int"}
COMPRESSED: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "w4a16": [
        ("Linear", "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})
    ],
    "w8a16": [("Linear", "pack-quantized", {**INT8, "strategy": "group", "group_size": 32})],
    "w8a16-channel": [("Linear", "pack-quantized", {**INT8, "strategy": "channel"})],
    "w8a16-asymmetric": [
        ("Linear", "pack-quantized", {**INT8, "strategy": "group", "group_size": 64, "symmetric": False})
    ],
    "w8a8": [("Linear", "int-quantized", {**INT8, "strategy": "channel"})],
    "w8a8-tensor": [("Linear", "int-quantized", {**INT8, "strategy": "tensor"})],
    "nvfp4": [
        (
            "Linear",
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        )
    ],
    "mxfp4": [
        (
            "Linear",
            "mxfp4-pack-quantized",
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "scale_dtype": torch.uint8,
            },
        )
    ],
    "mxfp8": [
        (
            "Linear",
            "mxfp8-quantized",
            {
                "num_bits": 8,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "scale_dtype": torch.uint8,
            },
        )
    ],
    "mixed": [
        (
            "re:.*(q|k)_proj",
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        ),
        ("re:.*(v|down)_proj", "pack-quantized", {**INT8, "strategy": "channel"}),
        ("Linear", "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ],
}
"""Of each kind the groups of settings: targets, format, and how weights are kept."""


def with_compressed_tensors(kind: str) -> tuple[dict[str, Any], Callable[[str, Tensor], Quantized]]:
    groups, ways = {}, []
    for i, (target, name, kept) in enumerate(COMPRESSED[kind]):
        settings, of = compressed(name, **kept)
        groups[f"group_{i}"] = settings | {"targets": [target]}
        ways.append((target, of))
    names = {name for _, name, _ in COMPRESSED[kind]}
    whole = {
        "quant_method": "compressed-tensors",
        "format": names.pop() if len(names) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }

    def quantized(module: str, weight: Tensor) -> Quantized:
        for target, of in ways:
            if target == "Linear" or re.match(target.removeprefix("re:"), module):
                return of(module, weight)
        raise AssertionError(module)

    return whole, quantized


def with_bitsandbytes(kind: str) -> tuple[dict[str, Any], Callable[[str, Tensor], Quantized]]:
    from bitsandbytes import functional  # pyrefly: ignore[missing-import]

    if kind == "bnb-int8":

        def of_bytes(module: str, weight: Tensor) -> Quantized:
            codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
            read = codes.float() * scales.float()[:, None] / 127
            return {
                "weight": codes,
                "SCB": scales.float(),
                "weight_format": torch.tensor(0, dtype=torch.uint8),
            }, read

        return {"quant_method": "bitsandbytes", "load_in_8bit": True}, of_bytes

    def of(module: str, weight: Tensor) -> Quantized:
        packed, state = functional.quantize_4bit(
            weight,
            quant_type="fp4" if kind == "bnb-fp4" else "nf4",
            compress_statistics=kind == "bnb-nf4-nested",
        )
        stored = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        return {"weight": packed, **stored}, functional.dequantize_4bit(packed, state).float()

    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return settings | ({"bnb_4bit_quant_type": "fp4"} if kind == "bnb-fp4" else {}), of


def with_torchao(kind: str) -> tuple[dict[str, Any], Callable[[str, Tensor], Quantized]]:
    from torchao.core.config import config_to_dict  # pyrefly: ignore[missing-import]
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict  # pyrefly: ignore[missing-import]
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # pyrefly: ignore[missing-import]

    config = Int8WeightOnlyConfig()

    def of(module: str, weight: Tensor) -> Quantized:
        linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight = torch.nn.Parameter(weight)
        quantize_(linear, config)
        stored, _ = flatten_tensor_state_dict({"x.weight": linear.weight})
        return {
            name.removeprefix("x."): tensor for name, tensor in stored.items()
        }, linear.weight.dequantize().float()

    settings = {"default": config_to_dict(config)}
    return {"quant_method": "torchao", "quant_type": settings}, of


TOOLS: dict[str, Callable[[str], tuple[dict[str, Any], Callable[[str, Tensor], Quantized]]]] = {
    **dict.fromkeys(COMPRESSED, with_compressed_tensors),
    **dict.fromkeys(("bnb-nf4", "bnb-nf4-nested", "bnb-fp4", "bnb-int8"), with_bitsandbytes),
    **dict.fromkeys(("torchao-int8",), with_torchao),
}


def main(directory: Path, kind: str) -> None:
    settings, quantized = TOOLS[kind](kind)
    tensors, values = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        stored, values[name] = quantized(module, tensors.pop(name).float())
        tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
    exact = directory / "exact"
    exact.mkdir()
    plain = {**load_file(directory / "model.safetensors"), **values}
    save_file(plain, exact / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (exact / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    config["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
