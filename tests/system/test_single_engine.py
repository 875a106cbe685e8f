"""The cluster gives the tokens of one engine, in float32: greedy and seeded, mixed and chunked."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import openai

from baton.cluster.model import EMBEDDED_NAME
from baton.engine import Engine, EngineRequest, SamplingParams

from .recovery import Broken

PROMPT_LENGTHS = (1, 17, 63, 300)  # one for each variant; the cluster's step budget is 64
NUM_TOKENS = 8
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 1.0, "seed": 12, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.2, "seed": 13, "min_p": 0.05, "repetition_penalty": 1.2, "presence_penalty": 0.5},
]


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Ordinary tokens (no special ones), every length with another variant."""
    draw = random.Random(5)
    return [
        ([draw.randrange(100, 20_000) for _ in range(length)], VARIANTS[i % len(VARIANTS)])
        for i, length in enumerate(PROMPT_LENGTHS)
    ]


def tokens_of(engine: Engine, work: list[tuple[list[int], dict[str, Any]]]) -> list[list[int]]:
    tokens: dict[bytes, list[int]] = {}
    for i, (prompt, sampling) in enumerate(work):
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **sampling)
        tokens[i.to_bytes(16)] = []
        engine.add(EngineRequest(i.to_bytes(16), prompt, [], params))
    while engine.has_work:
        for output in engine.step().outputs:
            tokens[output.id].append(output.token)
    engine.assert_whole()
    return list(tokens.values())


async def test_equals_one_engine(
    broken: Broken, client_of_broken: openai.AsyncOpenAI, one_engine: Engine
) -> None:
    await asyncio.to_thread(broken.all_back)
    work = requests()

    async def ask(prompt: list[int], sampling: dict[str, Any]) -> list[int]:
        answer: Any = await client_of_broken.completions.create(
            model=EMBEDDED_NAME, prompt=prompt, max_tokens=NUM_TOKENS,
            extra_body={"return_token_ids": True, "ignore_eos": True, **sampling},
        )  # fmt: skip
        return answer.choices[0].token_ids

    got = await asyncio.gather(*(ask(prompt, sampling) for prompt, sampling in work))
    want = tokens_of(one_engine, work)
    for (prompt, sampling), cluster, one in zip(work, got, want, strict=True):
        assert cluster == one, f"{len(prompt)} prompt tokens, {sampling}"
    await broken.settled()
