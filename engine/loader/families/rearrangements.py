"""The checkpoints of families that store some tensors in another form than most."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from baton.engine.loader.rearranged import (
    FP8_FORMS,
    Files,
    Piece,
    Rearranged,
    in_heads,
    projections,
    rows_in_turns,
)

LINEAR = re.compile(r"(.*)\.(block_sparse_moe|shared_mlp)\.(in|out)put_linear\.weight")


class Phi3Checkpoint(Rearranged):
    """Phi-3: one tensor has the rows of query, key and value, and one those of gate and up."""

    def _rows(self, kind: str) -> Mapping[str, Tensor]:
        config = self.config
        match kind:
            case "gate_up_proj":
                gate, up = torch.arange(2 * config.intermediate_size).chunk(2)
                return {"gate_proj": gate, "up_proj": up}
            case "qkv_proj":
                queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
                q, k, v = torch.arange(queries + 2 * keys).split((queries, keys, keys))
                return {"q_proj": in_heads(q, self._order), "k_proj": in_heads(k, self._order), "v_proj": v}
        return super()._rows(kind)


class Glm4Checkpoint(Phi3Checkpoint):
    """GLM-4, dense: as Phi-3, but with tensors for query, key and value."""

    interleaved = True


class Llama4Checkpoint(Rearranged):
    """Llama 4: `gate_up_proj` [experts, hidden_size, 2 · inner] and `down_proj` [experts, inner, hidden_size]
    have all experts of a layer."""

    interleaved = True

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        yield from self._fused_experts(name, stored, transposed=True) or super()._split(name, stored)


class HybridCheckpoint(Rearranged):
    """Bamba and GraniteMoeHybrid: `input_linear` [2 · inner, hidden_size] has gate and up of an MLP. A layer
    has one for all its experts, too, with a dimension of experts before the others."""

    renamed: ClassVar[Mapping[str, str]] = {
        "model.final_layernorm.": "model.norm.",
        ".pre_ff_layernorm.": ".post_attention_layernorm.",
        ".feed_forward.": ".mlp.",
        ".block_sparse_moe.router.layer.": ".mlp.gate.",
    }

    def _split(self, name: str, stored: str) -> Iterator[tuple[str, Piece]]:
        fused = LINEAR.fullmatch(name)
        if fused is None:
            yield from super()._split(name, stored)
            return
        layer, kind, shape = fused[1], fused[2], self._files.shape(stored)
        names = [f"{part}_proj.weight" for part in projections(fused[3])]
        if kind == "block_sparse_moe":
            names = [f"{layer}.mlp.experts.{{}}.{name}" for name in names]
            yield from self._by_expert(stored, shape, names, self._read_expert)
            return
        mlp = f"{layer}.mlp.shared_expert" if self.config.experts else f"{layer}.mlp"
        rows = torch.arange(shape[0] if shape else 0).chunk(len(names))
        if len(rows) < len(names):
            raise self._unfit(stored)
        yield from self._by_rows(stored, {f"{mlp}.{n}": own for n, own in zip(names, rows, strict=True)})


class Qwen3NextCheckpoint(Rearranged):
    """Qwen3-Next: each group of value heads has its queries, keys, values and gates in a row, and each query
    head has its gate. The channels of the convolution are queries, keys and values: here they come in the
    order of `gated_delta`. The layer that predicts a further token (`mtp`) has attention."""

    quantized: ClassVar[Collection[str]] = FP8_FORMS
    further: ClassVar[Mapping[str, str]] = {
        "mtp.layers.0.": "",
        "mtp.fc.": "eh_proj.",
        "mtp.pre_fc_norm_embedding.": "enorm.",
        "mtp.pre_fc_norm_hidden.": "hnorm.",
        "mtp.norm.": "shared_head.norm.",
    }
    """How the names of the tensors of that layer begin, and how in other families."""
    adds_one = True

    def __init__(self, files: Files, *, further: bool = False) -> None:
        """`further`: the tensors are those of the layer that predicts a further token. Otherwise they are all
        others."""
        self._further = further
        super().__init__(files)

    def next_token_layer(self) -> "Qwen3NextCheckpoint | None":
        found = type(self)(self._files, further=True)
        return found if found.names() else None

    def _name(self, stored: str) -> str | None:
        if stored.startswith("mtp.") != self._further:
            return None
        if not self._further:
            return super()._name(stored)
        layer = f"model.layers.{self.config.num_layers}."
        begins = (name for name in self.further.items() if stored.startswith(name[0]))
        return next((f"{layer}{ours}{stored.removeprefix(theirs)}" for theirs, ours in begins), None)

    def _rows(self, kind: str) -> Mapping[str, Tensor]:
        config, state = self.config, self.config.state
        assert state is not None, "the loader sets it for this architecture"
        shared, keys = state.num_heads // state.groups, state.groups * state.state_size
        match kind:
            case "in_proj_qkvz":
                sizes = [state.state_size] * 2 + [shared * state.head_dim] * 2
                names = ("in_proj_" + part for part in "qkvz")
                return dict(zip(names, rows_in_turns(state.groups, sizes), strict=True))
            case "in_proj_ba":
                return dict(
                    zip(("in_proj_b", "in_proj_a"), rows_in_turns(state.groups, [shared] * 2), strict=True)
                )
            case "conv1d":
                queries, of_keys, values = torch.arange(state.channels).split((keys, keys, state.inner_size))
                return {kind: torch.cat((values, of_keys, queries))}
            case "q_proj":
                queries, gates = rows_in_turns(config.num_heads, [config.head_dim] * 2)
                return {kind: in_heads(queries, self._order), "gate_proj": gates}
            case "q_norm" | "k_norm":
                return {kind: self._order}
        return super()._rows(kind)
