"""Chooses the format of a model's matrices: from the checkpoint, `--quantization` and the device."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from baton.engine.api.config import EngineConfig
from baton.engine.layers.weights import PlainFormat
from baton.engine.loader import fp8_formats, gguf_groups, int_formats, stored_values
from baton.engine.loader.auto_round import auto_round
from baton.engine.loader.compressed import compressed, modelopt
from baton.engine.loader.gpt_oss import mxfp4
from baton.engine.loader.int4_on_load import int4_on_load
from baton.engine.loader.torch_ao import torchao
from baton.engine.model_config import ModelConfig

FromSettings = Callable[[Mapping[str, Any], str, torch.device], PlainFormat]

STORED: dict[str, FromSettings] = {
    "auto-round": auto_round,
    "awq": int_formats.awq,
    "bitsandbytes": stored_values.bitsandbytes,
    "compressed-tensors": compressed,
    "fp8": fp8_formats.fp8,
    "gguf": gguf_groups.gguf,
    "gptq": int_formats.gptq,
    "modelopt": modelopt,
    "mxfp4": mxfp4,
    "torchao": torchao,
}
"""Formats of quantized checkpoints, by the `quant_method` of their `quantization_config`. A function gets
this configuration, the checkpoint's source and the device. It raises `ValueError` naming the source for
settings that are not supported, and for a device that cannot use the format."""

READ_PLAIN = ("gguf", "mxfp4")
"""Those that can be read as plain matrices."""

ON_LOAD: dict[str, Callable[[torch.device], PlainFormat]] = {
    "fp8": fp8_formats.fp8_on_load,
    "int4": int4_on_load,
}
"""Formats to which plain matrices are quantized when they are loaded, by `--quantization`."""


def choose_format(engine: EngineConfig, model: ModelConfig, device: torch.device) -> PlainFormat:
    """The format for this checkpoint on this device. Raises `ValueError` naming a format or flag that is not
    supported, with the list of those that are."""
    _check_exact(engine, device)
    flag, settings = engine.quantization, model.quantization
    method = None if settings is None else str(settings.get("quant_method", "(none named)"))
    if settings is not None and method in READ_PLAIN:
        dtype = torch.bfloat16 if engine.dtype == "auto" else getattr(torch, engine.dtype)
        by_default = method != "gguf" or gguf_groups.serves_packed(settings, dtype, device)
        # A CPU would dequantize each product at load.
        by_default = by_default and (device.type == "cuda" or not engine.batch_invariant)
        if flag == "none" or (flag == "auto" and not by_default):
            return PlainFormat()
        if flag == "gguf" and engine.dtype == "float32":
            raise ValueError(
                "--quantization gguf: products of packed weights are in 16 bits; use --dtype auto"
            )
        if flag in ON_LOAD or engine.load_format == "dummy":
            settings = None
    if flag not in ("auto", "none") and flag not in STORED and flag not in ON_LOAD:
        names = sorted({"auto", "none", *STORED, *ON_LOAD})
        raise ValueError(f"--quantization {flag!r}: choose one of {', '.join(names)}")
    if settings is None:
        if flag in ("auto", "none"):
            return PlainFormat()
        if flag not in ON_LOAD:
            raise ValueError(f"--quantization {flag}: {engine.model} has plain weights; leave the flag out")
        return ON_LOAD[flag](device)
    if method not in STORED:
        raise ValueError(
            f"{engine.model}: quantization_config: the format {method!r} is not supported "
            f"({', '.join(STORED)} are); choose another export of the model, or try --engine vllm"
        )
    if flag not in ("auto", method):
        raise ValueError(f"--quantization {flag}: the weights of {engine.model} are in the format {method}")
    if engine.load_format == "dummy":
        raise ValueError(f"--load-format dummy: {engine.model} has weights in the format {method}; use auto")
    return STORED[method](settings, engine.model, device)


def _check_exact(engine: EngineConfig, device: torch.device) -> None:
    """Raises `ValueError` if equal bits have not been shown on a GPU."""
    if engine.batch_invariant and device.type == "cuda" and engine.tensor_parallel_size > 2:
        raise ValueError(
            "--batch-invariant: more than two ranks on GPUs are not supported; leave the flag out, or choose "
            "--tensor-parallel-size 2 or 1"
        )
