"""Draft heads in plain torch and transformers, over whole sequences: they define what the engine guesses."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.checkpoints import config_of, edited_tensors
from tests.engine.draft_checkpoints import LAYER, QWEN_LAYER


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


class _Reference:
    def __init__(self, model: Any, directory: Path) -> None:
        self.model = model
        with edited_tensors(directory) as tensors:
            self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self.config = config_of(directory)
        self.eps = self.config["rms_norm_eps"]

    def taken(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        raise NotImplementedError

    def layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def token(self, hidden: Tensor) -> int:
        raise NotImplementedError

    @torch.inference_mode()
    def read(self, ids: list[int]) -> None:
        """Later guesses follow beginnings of these tokens: hidden states of these are those of all tokens."""
        states = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        self.states = self.taken(tuple(state[0] for state in states))

    @torch.inference_mode()
    def guesses(self, ids: list[int], count: int) -> list[int]:
        """What follows these tokens. All but the newest one have hidden states of the model."""
        hidden, tokens = self.states[: len(ids) - 1], ids[1:]
        for _ in range(count):
            last = self.layer(self.model.model.embed_tokens(torch.tensor(tokens)), hidden)[-1:]
            tokens, hidden = [*tokens, self.token(last[0])], torch.cat((hidden, last))
        return tokens[len(ids) - 1 :]

    def rotary(self, count: int) -> tuple[Tensor, Tensor]:
        return self.model.model.rotary_emb(torch.zeros(1, 1, 1), torch.arange(count)[None])


class EagleReference(_Reference):
    def taken(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        taps = self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return torch.cat([hidden_states[i] for i in taps], dim=-1) @ self.tensors["fc.weight"].T

    def layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        def weight(name: str) -> Tensor:
            return self.tensors[f"midlayer.{name}.weight"]

        normed = _norm(hidden, weight("hidden_norm"), self.eps)
        residual = normed if self.config["norm_before_residual"] else hidden
        x = torch.cat((_norm(embedded, weight("input_layernorm"), self.eps), normed), dim=-1)
        head_dim = self.config["head_dim"]
        q, k, v = (
            (x @ weight(f"self_attn.{kind}_proj").T).unflatten(-1, (-1, head_dim)).transpose(0, 1)[None]
            for kind in "qkv"
        )
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(len(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
        residual = residual + mixed.transpose(0, 1).flatten(1) @ weight("self_attn.o_proj").T
        x = _norm(residual, weight("post_attention_layernorm"), self.eps)
        inner = F.silu(x @ weight("mlp.gate_proj").T) * (x @ weight("mlp.up_proj").T)
        return residual + inner @ weight("mlp.down_proj").T

    def rotary(self, count: int) -> tuple[Tensor, Tensor]:
        """That of the head, which may be unlike the model's."""
        size = self.config["head_dim"]
        angles = torch.arange(float(count))[:, None] * 1e4 ** -(torch.arange(0, size, 2) / size)
        both = torch.cat((angles, angles), dim=1)[None]
        return both.cos(), both.sin()

    def token(self, hidden: Tensor) -> int:
        logits = self.tensors["lm_head.weight"] @ _norm(hidden, self.tensors["norm.weight"], self.eps)
        best = int(logits.argmax())
        return best + int(self.tensors["d2t"][best])


def _as_transformers(tensors: dict[str, Tensor], names: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """transformers has the experts of a layer in one tensor each."""
    found = {name: x for name, x in tensors.items() if name in names}

    def of(expert: int, kind: str) -> Tensor:
        return tensors[f"mlp.experts.{expert}.{kind}_proj.weight"]

    if experts:
        gate_up = [torch.cat((of(i, "gate"), of(i, "up"))) for i in range(experts)]
        found["mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        found["mlp.experts.down_proj"] = torch.stack([of(i, "down") for i in range(experts)])
    return found


class QwenReference(_Reference):
    """The layer behind Qwen3.5, which is as those with attention."""

    def __init__(self, model: Any, directory: Path) -> None:
        super().__init__(model, directory)
        last = model.model.layers[1]
        self.block = type(last)(model.config, 1).eval()
        own = {name.removeprefix(QWEN_LAYER): x for name, x in self.tensors.items()}
        self.block.load_state_dict(
            _as_transformers(own, last.state_dict(), self.config.get("num_experts", 0))
        )

    def normed(self, x: Tensor, name: str) -> Tensor:
        return _norm(x, self.tensors[f"mtp.{name}.weight"] + 1, self.eps)

    def taken(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        return hidden_states[-1]

    def layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        parts = self.normed(embedded, "pre_fc_norm_embedding"), self.normed(hidden, "pre_fc_norm_hidden")
        x = torch.cat(parts, dim=-1) @ self.tensors["mtp.fc.weight"].T
        mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
        out = self.block(x[None], position_embeddings=self.rotary(len(x)), attention_mask=mask)
        return self.normed((out if isinstance(out, Tensor) else out[0])[0], "norm")

    def token(self, hidden: Tensor) -> int:
        return int((self.model.lm_head.weight @ hidden).argmax())


class NextTokenReference(_Reference):
    def __init__(self, model: Any, directory: Path) -> None:
        super().__init__(model, directory)
        self.tensors = {
            name.removeprefix(LAYER): x for name, x in self.tensors.items() if name.startswith(LAYER)
        }
        last = model.model.layers[-1]
        self.block = type(last)(model.config, 2).eval()
        self.block.load_state_dict(
            _as_transformers(self.tensors, last.state_dict(), self.config["n_routed_experts"])
        )

    def taken(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        return hidden_states[-1]

    def layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        embedded = torch.cat((torch.zeros_like(embedded[:1]), embedded[1:]))
        parts = (embedded, self.tensors["enorm.weight"]), (hidden, self.tensors["hnorm.weight"])
        x = torch.cat([_norm(*part, self.eps) for part in parts], dim=-1) @ self.tensors["eh_proj.weight"].T
        count = len(x)
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        out = self.block(
            x[None], attention_mask=mask, position_ids=torch.arange(count)[None],
            position_embeddings=self.rotary(count),
        )  # fmt: skip
        return (out if isinstance(out, Tensor) else out[0])[0]

    def token(self, hidden: Tensor) -> int:
        normed = _norm(hidden, self.tensors["shared_head.norm.weight"], self.eps)
        return int((self.model.lm_head.weight @ normed).argmax())
