"""Through the whole cluster, greedy tokens in float32 are those of transformers (see make_goldens.py)."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from .serve import Serve

NUM_TOKENS = 32


async def ask(client: openai.AsyncOpenAI, model: str, golden: dict[str, Any]) -> tuple[list[int], int]:
    """Output token ids and the number of prompt tokens that the server counted."""
    common: dict[str, Any] = {
        "model": model, "temperature": 0, "max_tokens": NUM_TOKENS, "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    if "messages" in golden:
        answer: Any = await client.chat.completions.create(messages=golden["messages"], **common)
    else:
        answer = await client.completions.create(prompt=golden["prompt"], **common)
    return answer.choices[0].token_ids, answer.usage.prompt_tokens


@pytest.mark.parametrize("which", [slice(1, None, 3), pytest.param(slice(None), marks=pytest.mark.long)])
async def test_eight_at_a_time(
    server: Serve, aclient: openai.AsyncOpenAI, model_id: str, goldens: list[dict[str, Any]], which: slice
) -> None:
    goldens = [goldens[0], *goldens[which]]
    lengths = [len(golden["prompt_ids"]) for golden in goldens]
    assert (min(lengths), max(lengths) >= 600) == (1, True)
    gate = asyncio.Semaphore(8)

    async def one(golden: dict[str, Any]) -> tuple[list[int], int]:
        async with gate:
            return await ask(aclient, model_id, golden)

    answers = await asyncio.gather(*(one(g) for g in goldens))
    for golden, (got, prompt_tokens) in zip(goldens, answers, strict=True):
        assert prompt_tokens == len(golden["prompt_ids"]), golden
        assert got == golden["output_ids"], golden
    server.assert_whole()
