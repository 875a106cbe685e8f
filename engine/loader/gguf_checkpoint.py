"""Checkpoints in GGUF, llama.cpp's format: one file, or several parts of one.

The metadata are read as the settings that a `config.json` of the same model has, so all that
`engine.loader.hf_config` knows of a family holds here, too.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from baton.engine.gguf_header import parts_of
from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.layers.weights import Checkpoint, Groups
from baton.engine.loader.families.rearrangements import Glm4Checkpoint, Phi3Checkpoint
from baton.engine.loader.gguf_file import GGUFFile, TensorInfo
from baton.engine.loader.gguf_groups import UNPACK
from baton.engine.loader.gguf_metadata import Metadata
from baton.engine.loader.hf_config import model_config_from_hf
from baton.engine.loader.rearranged import Files, Piece, Rearranged, in_heads, read_rows, rotated_first
from baton.engine.model_config import ModelConfig, RopeScaling

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""Tensors of the first families, by their names in a file."""

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors with settings of LongRoPE."""

FUSED = {"attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "ffn_gate": "gate_up", "ffn_up": "gate_up"}
FUSED |= {"ffn_gate_exps": "gate_up_exps", "ffn_up_exps": "gate_up_exps"}
"""The product of a matrix that the model computes together with others."""

INTERLEAVED = re.compile(r"\.[qk]_proj\.")
EXPERTS = re.compile(r"(.*\.experts)\.(gate|up|down)_proj\.weight")
EOS_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


class ByExpert(Rearranged):
    """One tensor [experts, rows, columns] has a projection of all experts of a layer."""

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        of_experts = EXPERTS.fullmatch(name)
        if of_experts is None:
            yield from super()._split(name, stored)
            return
        names = [f"{of_experts[1]}.{{}}.{of_experts[2]}_proj.weight"]
        yield from self._by_expert(stored, self._files.shape(stored), names, self._read_expert)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a file of one `general.architecture` means."""

    architecture: str
    """As in `engine.loader.families.FAMILIES`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Tensors with other names than in `NAMES`."""
    settings: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda metadata: {}
    """Further settings, from the metadata without the prefix of the architecture."""
    reads: Sequence[str] = ()
    """Keys of the metadata that this architecture has beside those of all."""
    interleaved: bool = False
    """Whether llama.cpp interleaves the two halves of each query and key head."""
    bias: str = "attn_output"
    """The matrix that has a bias if `ModelConfig.attention_bias`."""
    form: type[Rearranged] | None = None
    """Shows the tensors in the form of most families. Such a file is dequantized at load."""


def _gemma3(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """llama.cpp scales queries in another way for the model of 62 layers, and a file does not say so."""
    heads, largest = metadata["attention.head_count"], metadata["block_count"] == 62
    size = metadata["embedding_length"] / heads if largest else metadata.get("attention.key_length", 256)
    pattern = metadata.get("attention.sliding_window_pattern", 6)
    types = ("full_attention", "sliding_attention")
    layers = [types[bool(local)] for local in pattern] if isinstance(pattern, tuple) else None
    return {"query_pre_attn_scalar": size, "layer_types": layers, "sliding_window_pattern": pattern}


AROUND = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Norms before and after attention and MLP."""

KINDS: Mapping[str, Kind] = {
    "llama": Kind(architecture="LlamaForCausalLM", interleaved=True),
    "qwen2": Kind(architecture="Qwen2ForCausalLM"),
    "qwen3": Kind(architecture="Qwen3ForCausalLM"),
    "qwen3moe": Kind(
        architecture="Qwen3MoeForCausalLM",
        form=ByExpert,
        settings=lambda _: {"norm_topk_prob": True},
        reads=["expert_count", "expert_used_count", "expert_feed_forward_length"],
    ),
    "gemma3": Kind(
        architecture="Gemma3ForCausalLM",
        names=AROUND,
        settings=_gemma3,
        reads=["attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"],
    ),
    "olmo2": Kind(architecture="Olmo2ForCausalLM", names=AROUND),
    "phi3": Kind(
        architecture="Phi3ForCausalLM",
        names={"ffn_up": "mlp.gate_up_proj"},
        form=Phi3Checkpoint,
        reads=["attention.sliding_window"],
    ),
    "glm4": Kind(
        architecture="Glm4ForCausalLM",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        bias="attn_q",
        form=Glm4Checkpoint,
    ),
}


def open_gguf(path: Path) -> Checkpoint:
    """The tensors in the form of most families."""
    files = GGUFCheckpoint(path)
    return files if files.kind.form is None else files.kind.form(files)


class GGUFCheckpoint(Files):
    """The tensors of a file, or of all its parts, under the names that Hugging Face gives them."""

    def __init__(self, path: Path) -> None:
        self.source = str(path)
        files = [GGUFFile(part) for part in parts_of(path)]
        self._metadata = files[0].metadata
        count = self._metadata.get("split.count", 1)
        if count != len(files) or self._metadata.get("split.no", 0):
            raise ValueError(
                f"{path}: part {self._metadata.get('split.no', 0) + 1} of {count}; name the first part as "
                f"llama-gguf-split does, NAME-00001-of-{count:05}.gguf, with the others beside it"
            )
        kind = self._metadata.get("general.architecture", "(none named)")
        if kind not in KINDS:
            raise ValueError(f"{path}: architecture {kind} is not supported ({', '.join(KINDS)} are)")
        self.kind = KINDS[kind]
        self._file_of: dict[str, GGUFFile] = {}
        for file in files:
            for name in file.tensors:
                if name in self._file_of:
                    raise ValueError(f"{file.path}: tensor {name} is in {self._file_of[name].path.name} too")
                self._file_of[name] = file
        self._name_of = {self._hf_name(name): name for name in self._file_of if name not in (LONG, SHORT)}
        self.config = self._config(kind)

    def names(self) -> Collection[str]:
        return self._name_of.keys()

    def file_of(self, name: str) -> str:
        file = self._file_of.get(self._name_of.get(name, ""))
        return self.source if file is None else str(file.path)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(self._name_of[name]).shape

    def _info(self, name: str) -> TensorInfo:
        return self._file_of[name].tensors[name]

    def groups(self, name: str, parts: Sequence[Shard]) -> Groups | None:
        """These parts of a matrix as they are stored. None: its type has no groups of 4 or 8 bits, or the
        parts cut a block."""
        rows, columns = parts
        in_file = self._name_of[name]
        info = self._info(in_file)
        values = GGML_QUANT_SIZES[info.kind][0]
        if info.kind.name not in UNPACK or columns.start % values or columns.length % values:
            return None
        stored = self._file_of[in_file].blocks(in_file)

        def read(parts: Sequence[Shard]) -> Tensor:
            return torch.from_numpy(stored[tuple(part.indices for part in parts)].copy())

        return UNPACK[info.kind.name](self._in_order(name, read, [rows, columns.in_groups(values)]))

    def read(self, name: str, parts: Sequence[Shard]) -> Tensor:
        def read(parts: Sequence[Shard]) -> Tensor:
            in_file = self._name_of[name]
            return torch.from_numpy(self._file_of[in_file].read(in_file, parts))

        return self._in_order(name, read, parts)

    def _in_order(
        self, name: str, read: Callable[[Sequence[Shard]], Tensor], parts: Sequence[Shard]
    ) -> Tensor:
        """These parts of a tensor, with its rows in our order. `read` reads parts of the stored one."""
        if not self.kind.interleaved or not INTERLEAVED.search(name):
            return read(parts)
        size, head_dim = parts[0].size, self.config.head_dim
        rows = in_heads(torch.arange(size), rotated_first(head_dim, head_dim, interleaved=True))
        return read_rows(read, rows, size, parts)

    def _hf_name(self, name: str) -> str:
        """blk.7.attn_q.weight → model.layers.7.self_attn.q_proj.weight. Keeps unknown names, for errors."""
        names = {**NAMES, **self.kind.names}
        match name.split("."):
            case ["blk", layer, part, kind]:
                return f"model.layers.{layer}.{names.get(part, part)}.{kind}"
            case [part, kind]:
                return f"{names.get(part, part)}.{kind}"
        return name

    def _config(self, kind: str) -> ModelConfig:
        metadata = Metadata(self._metadata, kind, self.source)
        metadata.check(self.kind.reads)
        if "token_embd.weight" not in self._file_of:
            raise ValueError(f"{self.source}: tensor token_embd.weight is missing, the file is incomplete")
        hidden_size, heads = map(metadata.integer, ("embedding_length", "attention.head_count"))
        head_dim = metadata.integer("attention.key_length", max(1, hidden_size // heads))
        eos = {self._metadata[key] for key in EOS_KEYS if isinstance(self._metadata.get(key), int)}
        factors = {}
        if LONG in self._file_of:
            factors = {"long_factor": self._values(LONG), "short_factor": self._values(SHORT)}
        further = {
            "architectures": [self.kind.architecture],
            "vocab_size": self._info("token_embd.weight").shape[0],
            "tie_word_embeddings": "output.weight" not in self._file_of,
            "attention_bias": f"blk.0.{self.kind.bias}.bias" in self._file_of,
            "rope_scaling": metadata.rope_scaling(factors),
            "partial_rotary_factor": metadata.integer("rope.dimension_count", head_dim) / head_dim,
        }
        settings = {**metadata.settings(), **further, **self.kind.settings(metadata.values)}
        config = model_config_from_hf(settings, {"eos_token_id": sorted(eos)}, self.source)
        if "rope_freqs.weight" in self._file_of:
            config = replace(config, rope_scaling=RopeScaling("tensor"))
        if self.kind.form is not None:
            return config
        products, of_experts = self._products(2), self._products(3)
        quantization = {"quant_method": "gguf", "products": products, "of_experts": of_experts}
        return replace(config, quantization=quantization)

    def _products(self, dimensions: int) -> dict[tuple[str, ...], int]:
        """Parameters of the products of all layers, by the types of their matrices. Those of routed experts
        have three dimensions."""
        products: defaultdict[tuple[str, str], list[TensorInfo]] = defaultdict(list)
        for name in self._file_of:
            info = self._info(name)
            match name.split("."):
                case ["blk", layer, part, "weight"] if len(info.shape) == dimensions:
                    products[layer, FUSED.get(part, part)].append(info)
        parameters: defaultdict[tuple[str, ...], int] = defaultdict(int)
        for matrices in products.values():
            types = tuple(sorted({info.kind.name for info in matrices}))
            parameters[types] += sum(math.prod(info.shape) for info in matrices)
        return dict(parameters)

    def _values(self, name: str) -> list[float]:
        """A tensor of one dimension."""
        if name not in self._file_of:
            raise ValueError(f"{self.source}: tensor {name} is missing, the file is incomplete")
        return self._file_of[name].read(name, [unsharded(self._info(name).shape[0])]).tolist()
