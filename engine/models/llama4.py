"""Llama 4, the text model.

Most layers rotate queries and keys, and attend within chunks of the context. The others have no positions
(NoPE, Kazemnejad 2023) and attend to the whole context; their queries grow with their position. Some layers
or all have a mixture of experts beside an MLP that computes every token.
"""

from typing import Any

import torch
from torch import Tensor

from baton.engine.kernels import HeadNorm
from baton.engine.layers.weights import Weights
from baton.engine.model_config import ModelConfig
from baton.engine.models.llama import Attend, Llama


class Llama4(Llama):
    mlp_name = "feed_forward"
    router_name = "router"

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        nope = config.nope
        assert nope is not None, "the loader sets it for this architecture"
        self.nope_layers = nope.layers
        attention = self.layers[0].mixer
        self.num_heads = attention.q_heads.length
        if nope.head_norm:
            heads = self.num_heads + attention.kv_heads.length
            scale = torch.ones(heads, config.head_dim, dtype=weights.dtype, device=weights.device)
            for i, layer in enumerate(self.layers):
                if i not in nope.layers:
                    # The model normalizes after it rotates, which does not change the norm of a head.
                    layer.mixer.head_norm = HeadNorm(scale, config.rms_norm_eps)
        ends = torch.arange(1.0, config.max_model_len + 1, device=weights.device)
        self.scales = (ends / nope.floor_scale).floor().log1p() * nope.attention_scale + 1
        """[positions] float32: of the queries of layers without positions (Nakanishi 2025)."""

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        unrotated = self.rotary.at(torch.zeros_like(positions))
        scales = self.scales.index_select(0, positions)[:, None, None]

        def attend_in(layer: int, qkv: Tensor, rotary: Tensor, *others: Any) -> Tensor:
            if layer not in self.nope_layers:
                return attend(layer, qkv, rotary, *others)
            qkv[:, : self.num_heads] *= scales
            return attend(layer, qkv, unrotated, *others)

        return super().__call__(token_ids, positions, attend_in)
