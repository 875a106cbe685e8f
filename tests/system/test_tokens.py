"""Through the whole cluster, greedy tokens in float32 are those of transformers (see make_goldens.py)."""

import asyncio
from typing import Any

import openai
import pytest

from .conftest import BUDGET
from .serve import Serve


async def ask(
    client: openai.AsyncOpenAI, model: str, golden: dict[str, Any], max_tokens: int
) -> tuple[list[int], int]:
    """Output token ids and the number of prompt tokens that the server counted."""
    common: dict[str, Any] = {
        "model": model, "temperature": 0, "max_tokens": max_tokens, "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    if "messages" in golden:
        answer: Any = await client.chat.completions.create(messages=golden["messages"], **common)
    else:
        answer = await client.completions.create(prompt=golden["prompt"], **common)
    return answer.choices[0].token_ids, answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("which", "max_tokens"),
    [(slice(0, None, 3), 10), pytest.param(slice(None), 32, marks=pytest.mark.long)],
)
async def test_eight_at_a_time(
    server: Serve,
    aclient: openai.AsyncOpenAI,
    model_id: str,
    goldens: list[dict[str, Any]],
    which: slice,
    max_tokens: int,
) -> None:
    goldens = goldens[which]
    lengths = [len(golden["prompt_ids"]) for golden in goldens]
    assert (min(lengths), max(lengths) > 2 * BUDGET) == (1, True)
    gate = asyncio.Semaphore(8)

    async def one(golden: dict[str, Any]) -> tuple[list[int], int]:
        async with gate:
            return await ask(aclient, model_id, golden, max_tokens)

    answers = await asyncio.gather(*(one(g) for g in goldens))
    for golden, (got, prompt_tokens) in zip(goldens, answers, strict=True):
        assert prompt_tokens == len(golden["prompt_ids"]), golden
        assert got == golden["output_ids"][:max_tokens], golden
    server.assert_whole()


@pytest.mark.all
@pytest.mark.parametrize("which", [slice(3, None, 5), pytest.param(slice(None), marks=pytest.mark.long)])
async def test_prompts_are_scored(
    server: Serve, aclient: openai.AsyncOpenAI, model_id: str, goldens: list[dict[str, Any]], which: slice
) -> None:
    """The score of prompt and output is that of transformers, and greedy tokens are the most likely ones."""

    async def one(golden: dict[str, Any]) -> None:
        ids, count = golden["prompt_ids"] + golden["output_ids"], len(golden["output_ids"])
        answer: Any = await aclient.completions.create(
            model=model_id, prompt=ids, max_tokens=0, echo=True, logprobs=1,
            extra_body={"prompt_logprobs": 0, "return_token_ids": True},
        )  # fmt: skip
        choice = answer.choices[0]
        logprobs = choice.logprobs
        assert sum(logprobs.token_logprobs[1:]) == pytest.approx(golden["score"], abs=0.02)
        assert logprobs.token_logprobs[-count:] == [
            max(top.values()) for top in logprobs.top_logprobs[-count:]
        ]
        output = zip(golden["output_ids"], choice.prompt_logprobs[-count:], strict=True)
        assert {entry[str(token_id)]["rank"] for token_id, entry in output} == {1}
        assert (choice.token_ids, answer.usage.prompt_tokens) == ([], len(ids))

    scored = goldens[which]
    assert max(len(golden["prompt_ids"]) for golden in scored) > 2 * BUDGET
    await asyncio.gather(*map(one, scored))
    server.assert_whole()
