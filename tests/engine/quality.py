"""How much a format of weights or KV changes what a model predicts, on a text."""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine import Engine
from baton.engine.kernels import AttentionMetadata

TEXT: list[int] = next(
    golden["prompt_ids"]
    for golden in json.loads((Path(__file__).parents[1] / "system" / "goldens.json").read_text())
    if len(golden["prompt_ids"]) == 639
)
"""Sentences in the tokens of the embedded model."""


NO_IMAGES = {
    "rotary_shift": torch.empty(0, dtype=torch.int32),
    "images.index": torch.empty(0, dtype=torch.int32),
}


class Quality(NamedTuple):
    perplexity: float
    equal: float
    """Share of the positions where the most probable token is that of the reference."""


@torch.inference_mode()
def logits(
    engine: Engine, chunk: int = len(TEXT), decoded: int = 0, first: int = 0, stop: int = len(TEXT)
) -> Tensor:
    """[positions, vocabulary] float32 on the host: for each position of TEXT, in chunks; the last `decoded`
    positions are decoded one by one. With `first`, the KV of the positions before is in the cache."""
    runner, prompt, found = engine.runner, stop - decoded, []
    blocks = torch.arange(-(-len(TEXT) // runner.block_size), dtype=torch.int32, device=runner.device)
    for start in (*range(first, prompt, chunk), *range(prompt, stop)):
        end = min(start + chunk, prompt) if start < prompt else start + 1
        positions = torch.arange(start, end, device=runner.device)
        contexts = torch.tensor([end], dtype=torch.int32, device=runner.device)
        decodes, chunks = (0, [(start, end)]) if start < prompt else (1, [])
        step = AttentionMetadata(runner.block_size, positions, blocks[None], contexts, decodes, chunks)
        ids = torch.tensor(TEXT[start:end], device=runner.device)
        known = torch.full((len(ids),), -1, dtype=torch.int32, device=runner.device)
        inputs = {"token_ids": ids, "source_rows": known, "positions": positions, **NO_IMAGES}
        hidden = runner.forward(inputs, step, lambda layer: None)
        found.append(runner.logits(hidden).float().cpu())
    return torch.cat(found)


def quality(ours: Tensor, reference: Tensor) -> Quality:
    following = torch.tensor(TEXT[1 : len(ours)])[:, None]
    loss = -ours[:-1].log_softmax(-1).gather(1, following).mean()
    return Quality(float(loss.exp()), float((ours.argmax(-1) == reference.argmax(-1)).float().mean()))
