"""From token ids to hidden states, and from hidden states to logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.kernels import LinearMethod
from baton.engine.layers.ranks import unsharded
from baton.engine.layers.weights import Stack, Weights
from baton.engine.model_config import ModelConfig


class Embedding:
    """The input embedding. A rank has the rows of some tokens (`VocabParallelEmbedding` in nano-vllm).

    `summed`: the residual stream begins with the sum over ranks."""

    def __init__(self, config: ModelConfig, weights: Weights, *, summed: bool) -> None:
        self.ranks = weights.ranks if summed else None
        self.tokens = weights.ranks.shard(config.vocab_size)
        shape = (self.tokens, unsharded(config.hidden_size))
        self.weight = weights.stack(["model.embed_tokens.weight"], [shape])

    def __call__(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """[tokens] → the residual stream [tokens, hidden_size], and what the first norm adds to it.

        With several ranks the stream begins with zeros, and the norm adds the ranks' embeddings."""
        if self.tokens.is_unsharded:
            return F.embedding(token_ids, self.weight), None
        elsewhere = (token_ids < self.tokens.start) | (token_ids >= self.tokens.stop)
        rows = (token_ids - self.tokens.start).masked_fill_(elsewhere, 0)
        term = F.embedding(rows, self.weight).masked_fill_(elsewhere[:, None], 0)
        if self.ranks is not None:
            return self.ranks.all_reduce(term), None
        return torch.zeros_like(term), term


class OutputProjection:
    """The logits of all tokens. A rank computes those of the tokens that its embedding has."""

    def __init__(self, config: ModelConfig, weights: Weights, embedding: Embedding) -> None:
        if config.tie_embeddings:
            tied = Stack(["model.embed_tokens"], [embedding.tokens], unsharded(config.hidden_size))
            self.product: LinearMethod = weights.format.tied(weights, tied, embedding.weight)
        else:
            self.product = weights.linear(["lm_head"], [embedding.tokens], unsharded(config.hidden_size))
        self.gather = weights.ranks.gather
        self.vocab_size = config.vocab_size

    def __call__(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size], on rank 0."""
        return self.gather(self.product(hidden), self.vocab_size)
