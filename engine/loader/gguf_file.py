"""GGUF files: the tensors of llama.cpp's format, dequantized when read.

The `gguf` package does the arithmetic of the quantization types.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from baton.engine.gguf_header import GGUFHeader
from baton.engine.layers.ranks import Shard
from baton.engine.layers.weights import Checkpoint, Groups
from baton.engine.loader.gguf_groups import UNPACK
from baton.engine.loader.rearranged import in_heads, read_rows, rotated_first
from baton.engine.loader.settings import Settings
from baton.engine.model_config import ModelConfig, RopeScaling, known_ids

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

FUSED = {"attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "ffn_gate": "gate_up", "ffn_up": "gate_up"}
"""The product of a matrix that the model computes together with others."""

INTERLEAVED = re.compile(r"\.[qk]_proj\.")
"""Tensors in which llama.cpp interleaves the two halves of each head of a Llama."""

PIECE_BYTES = 128 << 10
"""Quantized bytes that are dequantized at once, so that intermediate results fit a cache."""
KINDS = {int(kind): kind for kind in GGMLQuantizationType}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says about a tensor."""

    shape: tuple[int, ...]  # outermost dimension first, as in torch
    kind: GGMLQuantizationType
    offset: int  # from the beginning of the data section

    @property
    def num_bytes(self) -> int:
        values, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // values * size


class GGUFFile:
    """A file with its tensors. Raises `ValueError` if the file is not complete."""

    def __init__(self, path: Path) -> None:
        header = GGUFHeader(path)
        self.path = path
        self.metadata = header.metadata
        self.tensors: dict[str, TensorInfo] = {}
        self._data = header.data
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{path}: corrupt, general.alignment is {alignment!r}")
        self._data_start = -(-header.end // alignment) * alignment
        for name, (shape, number, offset) in header.tensors.items():
            kind = KINDS.get(number)
            if kind is None:
                raise ValueError(f"{path}: tensor {name} is of type {number}, which is not supported")
            if not shape or 0 in shape or shape[-1] % GGML_QUANT_SIZES[kind][0]:
                raise ValueError(f"{path}: corrupt, tensor {name} of type {kind.name} is {list(shape)}")
            self.tensors[name] = info = TensorInfo(shape, kind, offset)
            if offset % alignment:
                raise ValueError(f"{path}: corrupt, tensor {name} is at {offset}, which is not aligned")
            if self._data_start + offset + info.num_bytes > len(self._data):
                raise ValueError(f"{path}: cut short, tensor {name} is incomplete; download it again")

    def blocks(self, name: str) -> np.ndarray:
        """[…, blocks in a row, bytes of a block] uint8: the tensor as it is stored."""
        info = self.tensors[name]
        return np.frombuffer(
            self._data, dtype=np.uint8, count=info.num_bytes, offset=self._data_start + info.offset
        ).reshape(*info.shape[:-1], -1, GGML_QUANT_SIZES[info.kind][1])

    def read(self, name: str, parts: Sequence[Shard]) -> np.ndarray:
        """Returns these parts of the dimensions of the tensor, as float32. Only the quantized blocks that
        hold them are dequantized."""
        info = self.tensors[name]
        values = GGML_QUANT_SIZES[info.kind][0]
        blocks = self.blocks(name)
        *rows, columns = parts
        first, last = columns.start // values, -(-columns.stop // values)
        raw = blocks[(*(part.indices for part in rows), slice(first, last))]
        try:
            values_read = _dequantize(np.ascontiguousarray(raw).reshape(-1), info.kind)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name} is of type {info.kind.name}, which is not supported"
            ) from error
        begin = columns.start - first * values
        return values_read.reshape(*raw.shape[:-2], -1)[..., begin : begin + columns.length]


class GGUFCheckpoint(Checkpoint):
    """A `Checkpoint` in one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        self._file = GGUFFile(path)
        self._name_of = {_hf_name(name): name for name in self._file.tensors}
        self.config = self._config()

    def names(self) -> Collection[str]:
        return self._name_of.keys()

    def file_of(self, name: str) -> str:
        return self.source

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._name_of[name]].shape

    def groups(self, name: str, parts: Sequence[Shard]) -> Groups | None:
        """These parts of a matrix as they are stored. None: its type has no groups of 4 or 8 bits, or the
        parts cut a block."""
        rows, columns = parts
        info = self._file.tensors[self._name_of[name]]
        values = GGML_QUANT_SIZES[info.kind][0]
        if info.kind.name not in UNPACK or columns.start % values or columns.length % values:
            return None
        stored = self._file.blocks(self._name_of[name])

        def read(parts: Sequence[Shard]) -> Tensor:
            return torch.from_numpy(stored[tuple(part.indices for part in parts)].copy())

        return UNPACK[info.kind.name](self._in_order(name, read, [rows, columns.in_groups(values)]))

    def read(self, name: str, parts: Sequence[Shard]) -> Tensor:
        def read(parts: Sequence[Shard]) -> Tensor:
            return torch.from_numpy(self._file.read(self._name_of[name], parts))

        return self._in_order(name, read, parts)

    def _in_order(
        self, name: str, read: Callable[[Sequence[Shard]], Tensor], parts: Sequence[Shard]
    ) -> Tensor:
        """These parts of a tensor, with its rows in our order. `read` reads parts of the stored one."""
        if self.config.architecture != "LlamaForCausalLM" or not INTERLEAVED.search(name):
            return read(parts)
        size, head_dim = parts[0].size, self.config.head_dim
        rows = in_heads(torch.arange(size), rotated_first(head_dim, head_dim, interleaved=True))
        return read_rows(read, rows, size, parts)

    def _config(self) -> ModelConfig:
        metadata = self._file.metadata
        kind = metadata.get("general.architecture", "(none named)")
        if kind not in ARCHITECTURES:
            raise ValueError(
                f"{self.source}: architecture {kind} is not supported ({', '.join(ARCHITECTURES)} are)"
            )
        if metadata.get("split.count", 1) > 1:
            raise ValueError(
                f"{self.source}: one of several parts; merge the parts with llama-gguf-split --merge"
            )

        prefix = f"metadata {kind}."
        settings = Settings({f"metadata {key}": value for key, value in metadata.items()}, self.source)

        def integer(key: str, default: int | None = None) -> int:
            return settings.integer(prefix + key, default)

        def number(key: str, default: float | None = None) -> float:
            return settings.number(prefix + key, default)

        if "token_embd.weight" not in self._file.tensors:
            raise ValueError(f"{self.source}: tensor token_embd.weight is missing, the file is incomplete")
        vocab_size = self._file.tensors["token_embd.weight"].shape[0]
        num_heads, hidden_size = integer("attention.head_count"), integer("embedding_length")
        eos = {metadata[key] for key in EOS_KEYS if isinstance(metadata.get(key), int)}
        config = ModelConfig(
            architecture=ARCHITECTURES[kind],
            num_layers=integer("block_count"),
            hidden_size=hidden_size,
            intermediate_size=integer("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=integer("attention.head_count_kv", num_heads),
            head_dim=integer("attention.key_length", hidden_size // num_heads),
            vocab_size=vocab_size,
            max_model_len=integer("context_length"),
            rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
            rope_theta=number("rope.freq_base", 10000.0),
            rope_scaling=self._rope_scaling(
                metadata.get(f"{kind}.rope.scaling.type", "none"), number("rope.scaling.factor", 1.0)
            ),
            tie_embeddings="output.weight" not in self._file.tensors,
            attention_bias="blk.0.attn_output.bias" in self._file.tensors,
            eos_ids=known_ids(sorted(eos), vocab_size, self.source),
            dtype=None,
            quantization={"quant_method": "gguf", "products": self._products()},
        )
        config.check(self.source)
        return config

    def _products(self) -> dict[tuple[str, ...], int]:
        """Parameters of the products of all layers, by the types of their matrices."""
        products: defaultdict[tuple[str, str], list[TensorInfo]] = defaultdict(list)
        for name, info in self._file.tensors.items():
            match name.split("."):
                case ["blk", layer, part, "weight"] if len(info.shape) == 2:
                    products[layer, FUSED.get(part, part)].append(info)
        parameters: defaultdict[tuple[str, ...], int] = defaultdict(int)
        for matrices in products.values():
            types = tuple(sorted({info.kind.name for info in matrices}))
            parameters[types] += sum(math.prod(info.shape) for info in matrices)
        return dict(parameters)

    def _rope_scaling(self, kind: str, factor: float) -> RopeScaling | None:
        if "rope_freqs.weight" in self._file.tensors:
            return RopeScaling("tensor")
        if kind == "none":
            return None
        if kind == "linear":
            return RopeScaling("linear", factor)
        raise ValueError(f"{self.source}: rope scaling {kind!r} is not supported (none, linear are)")


EOS_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def _hf_name(name: str) -> str:
    """blk.7.attn_q.weight → model.layers.7.self_attn.q_proj.weight. Keeps unknown names, for errors."""
    match name.split("."):
        case ["blk", layer, part, kind]:
            return f"model.layers.{layer}.{TENSOR_NAMES.get(part, part)}.{kind}"
        case [part, kind]:
            return f"{TENSOR_NAMES.get(part, part)}.{kind}"
    return name


def _dequantize(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Whole blocks of uint8 → float32."""
    if kind == GGMLQuantizationType.F32:
        return raw.view(np.float32).copy()
    values, size = GGML_QUANT_SIZES[kind]
    dequantized_values = np.empty(raw.size // size * values, dtype=np.float32)
    step = max(1, PIECE_BYTES // size)
    for at in range(0, raw.size // size, step):
        piece = raw[None, at * size : (at + step) * size]
        dequantized_values[at * values : (at + step) * values] = dequantize(piece, kind)[0]
    return dequantized_values
