"""Log probabilities of prompts: `echo` with `logprobs`, `prompt_logprobs`, and prompts without an answer."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.router.preparation import jobs
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb

from .conftest import TEXT, Cluster, make_cluster

PROMPT = list(range(200, 211))
CHAT = [{"role": "user", "content": "Hi"}]


def of_token(cluster: Cluster, position: int, top: int) -> dict[str, Any]:
    """As the fake worker says it, in vLLM's form."""
    ranked = [(PROMPT[position], -position, position), *((100 + i, -i, i + 1) for i in range(top))]
    return {
        str(i): {"logprob": logprob, "rank": rank, "decoded_token": cluster.tokenizer.decode([i])}
        for i, logprob, rank in ranked
    }


def prefills(cluster: Cluster) -> list[pb.SubmitPrefill]:
    return [m.prefill for w in cluster.workers for m in w.submitted if m.HasField("prefill")]


def decodes(cluster: Cluster) -> list[pb.SubmitDecode]:
    return [m.decode for w in cluster.workers for m in w.submitted if m.HasField("decode")]


async def test_echo_with_logprobs_scores_a_prompt_on_the_prefill_worker_alone(cluster: Cluster):
    """As lm-eval asks: with one token, and with none."""
    tokenizer = cluster.tokenizer
    spelled, first = [tokenizer.decode([i]) for i in PROMPT], tokenizer.encode(TEXT)[0]
    for max_tokens, more, reason in ((1, [tokenizer.decode([first])], "length"), (0, [], "length")):
        result = await cluster.complete(prompt=PROMPT, max_tokens=max_tokens, echo=True, logprobs=2)
        [choice] = result["choices"]
        assert choice["text"] == "".join([*spelled, *more])
        assert choice["finish_reason"] == reason
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [*spelled, *more]
        assert logprobs["token_logprobs"] == [None, *(-p for p in range(1, 11)), *[-0.5] * max_tokens]
        top = {tokenizer.decode([100]): 0, tokenizer.decode([101]): -1}
        expected = [None, *({**top, spelled[p]: -p} for p in range(1, 11))]
        assert logprobs["top_logprobs"][:11] == expected
        assert len(logprobs["top_logprobs"]) == 11 + max_tokens
        for offset, text in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            assert choice["text"][offset:].startswith(text)
        assert result["usage"]["completion_tokens"] == max_tokens
    assert [(p.handover, p.request.sampling.prompt_logprobs) for p in prefills(cluster)] == [(False, 2)] * 2
    assert not decodes(cluster)
    queued = 'baton:router_queue_seconds_count{model_name="fake",role="router"} 2.0'
    assert queued in await cluster.metrics(), "the first submission of each request"


async def test_prompt_logprobs_come_with_an_answer(cluster: Cluster):
    """The prompt is computed without a handover. Then the answer goes on with the ordinary one."""
    more = {"prompt": PROMPT, "logprobs": 1, "prompt_logprobs": 0, "echo": True, "n": 2}
    result = await cluster.complete(max_tokens=200, min_tokens=2, **more)
    expected = [None, *(of_token(cluster, p, 0) for p in range(1, 11))]
    for choice in result["choices"]:
        assert choice["text"] == cluster.tokenizer.decode(PROMPT) + TEXT
        assert choice["prompt_logprobs"] == expected
        assert choice["logprobs"]["token_logprobs"][:12] == [None, *(-p for p in range(1, 11)), -0.5]
        assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    sent = [(p.handover, len(p.request.output_ids), p.request.sampling) for p in prefills(cluster)]
    assert sorted((h, n, s.min_tokens, s.max_tokens, s.HasField("prompt_logprobs")) for h, n, s in sent) == (
        [(False, 0, 1, 1, True)] * 2 + [(True, 1, 2, 200, False)] * 2
    )
    _, chat = await cluster.post("/v1/chat/completions", messages=CHAT, max_tokens=3, prompt_logprobs=3)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][0] is None
    assert [entry["rank"] for entry in chat["prompt_logprobs"][9].values()] == [9, 1, 2, 3]


async def test_a_prompt_is_scored_again_when_its_worker_dies(pair: Cluster):
    """The log probabilities of the first attempt do not count twice."""
    for worker in pair.prefills:
        worker.steps = asyncio.Semaphore(0)
    answer = asyncio.create_task(pair.complete(prompt=PROMPT, max_tokens=2, prompt_logprobs=1))
    connections = pair.pool.connections
    await pair.until(lambda: any(len(a.scores) == 3 for c in connections for a in c.attempts.values()))
    [first] = [worker for worker in pair.prefills if worker.submitted]
    [second] = [worker for worker in pair.prefills if worker is not first]
    second.steps = None
    await first.kill()
    [choice] = (await answer)["choices"]
    assert choice["prompt_logprobs"] == [None, *(of_token(pair, p, 1) for p in range(1, 11))]
    assert choice["text"] == "The capital"


async def test_decode_workers_score_prompts_if_there_are_no_others(tokenizer: ModelTokenizer, tmp_path: Path):
    """A request for one token goes there, too."""
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode_only=True) as cluster:
        for max_tokens in (0, 1, 2):
            result = await cluster.complete(prompt=PROMPT, max_tokens=max_tokens, prompt_logprobs=0)
            assert len(result["choices"][0]["prompt_logprobs"]) == len(PROMPT)
            assert (await cluster.complete(max_tokens=1))["choices"][0]["text"] == "The"
        assert len(decodes(cluster)) == 6


async def test_a_worker_that_sends_none_does_not_answer(cluster: Cluster):
    for worker in cluster.workers:
        worker.scores_prompts = False
    status, result = await cluster.post("/v1/completions", prompt=PROMPT, echo=True, logprobs=0)
    assert status == 500
    assert "no log probabilities for a part of the prompt" in result["error"]["message"]
    assert (await cluster.complete(prompt=PROMPT[:1], echo=True, logprobs=0, max_tokens=0))["choices"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": PROMPT, "n": 4, "prompt_logprobs": 2}, "prompt_logprobs"),
        ({"prompt": [PROMPT] * 4, "echo": True, "logprobs": 2}, "logprobs"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    cluster: Cluster, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jobs, "MAX_PROMPT_LOGPROBS", 4 * 3 * len(PROMPT) - 1)
    status, result = await cluster.post("/v1/completions", **{"prompt": "x", **body})
    assert (status, result["error"]["param"]) == (400, param)
