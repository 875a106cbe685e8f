"""How much a format of weights or KV changes what a model predicts, on a text."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine import Engine
from engine.kernels import AttentionMetadata

TEXT: list[int] = next(
    golden["prompt_ids"]
    for golden in json.loads((Path(__file__).parents[1] / "system" / "goldens.json").read_text())
    if len(golden["prompt_ids"]) == 639
)
"""Sentences in the tokens of the embedded model."""


class Quality(NamedTuple):
    perplexity: float
    equal: float
    """Share of the positions where the most probable token is that of the reference."""


@torch.inference_mode()
def logits(engine: Engine) -> Tensor:
    """[positions, vocabulary] float32 on the host: for each position of TEXT, in one chunk."""
    runner, tokens = engine._runner, len(TEXT)
    blocks = torch.arange(-(-tokens // runner.block_size), dtype=torch.int32, device=runner.device)
    positions = torch.arange(tokens, device=runner.device)
    contexts = torch.tensor([tokens], dtype=torch.int32, device=runner.device)
    step = AttentionMetadata(runner.block_size, positions, blocks[None], contexts, 0, [(0, tokens)])
    ids = torch.tensor(TEXT, device=runner.device)
    return runner.logits(runner.forward(ids, positions, step, lambda layer: None)).float().cpu()


def quality(ours: Tensor, reference: Tensor) -> Quality:
    following = torch.tensor(TEXT[1:])[:, None]
    loss = -ours[:-1].log_softmax(-1).gather(1, following).mean()
    return Quality(float(loss.exp()), float((ours.argmax(-1) == reference.argmax(-1)).float().mean()))
