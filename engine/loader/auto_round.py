"""`quant_method` auto-round: integers as GPTQ's or AWQ's, and floats as those of compressed-tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from baton.engine.layers.weights import PlainFormat
from baton.engine.loader import compressed, fp8_formats
from baton.engine.loader.by_module import ByModule, by_module, require
from baton.engine.loader.int_formats import BITS, awq_format, compiled, of_columns

FLOATS: Mapping[str, Callable[[Mapping[str, Any], str, torch.device], PlainFormat]] = {
    "mx_fp4": compressed.mxfp4,
    "mx_fp8": compressed.mxfp8,
    "nv_fp4": compressed.nvfp4,
}
"""By `data_type` and bits."""
PACKINGS = {
    "auto_round": 0,
    "auto_round:gptqmodel": 0,
    "auto_round:auto_gptq": 1,
    "auto_round:auto_awq": None,
    "auto_round:llm_compressor": None,
    "auto_round:fp8": None,
    "auto_round:fp8_static": None,
}
"""By how much the zeros of integers in columns are less."""
FP8 = "auto_round:fp8", "auto_round:fp8_static"


def auto_round(settings: Mapping[str, Any], source: str, device: torch.device) -> ByModule:
    packing = settings.get("packing_format") or "auto_round:auto_gptq"
    require({"packing_format": packing}, source, packing_format=(*PACKINGS,))
    exceptions = settings.get("extra_config") or {}
    if not isinstance(exceptions, Mapping) or not all(isinstance(x, Mapping) for x in exceptions.values()):
        raise ValueError(f"{source}: quantization_config: extra_config {exceptions!r} is not supported")

    def made(settings: Mapping[str, Any]) -> PlainFormat | None:
        if type(settings.get("bits")) is int and settings["bits"] >= 16:
            return None
        return _format(packing, settings, source, device)

    usual = made(settings)
    special = {name: made({**settings, **changes}) for name, changes in exceptions.items()}
    patterns = [(compiled(name, source, "extra_config"), format) for name, format in special.items()]

    def chosen(name: str) -> PlainFormat | None:
        if name in special:
            return special[name]
        return next((made for pattern, made in patterns if pattern.search(name)), usual)

    formats = [each for each in (usual, *special.values()) if each is not None]
    if not formats:
        raise ValueError(f"{source}: quantization_config: bits {settings.get('bits')!r} quantize no matrix")
    return by_module(formats, chosen, source, extra_biases=True)


def _format(packing: str, settings: Mapping[str, Any], source: str, device: torch.device) -> PlainFormat:
    bits, kind = settings.get("bits"), settings.get("data_type")
    if packing == "auto_round:llm_compressor":
        require({"data_type": f"{kind}{bits}"}, source, data_type=(*FLOATS,))
        strategy = "tensor_group" if kind == "nv_fp" else "group"
        kept = {"num_bits": bits, "type": "float", "strategy": strategy, **settings}
        return FLOATS[f"{kind}{bits}"](kept, source, device)
    if kind == "fp" or packing in FP8:  # those of FP8 with plain activations name no packing
        require(settings, source, bits=(8,), data_type=("fp",))
        return fp8_formats.fp8(settings, source, device)
    require(settings, source, bits=BITS, data_type=("int", None))
    less = PACKINGS[packing]
    if less is None:
        return awq_format(settings, source, device)
    return of_columns(packing, settings, source, device, less, sym=settings.get("sym") is True)
