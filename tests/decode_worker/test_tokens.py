"""A prefill and a decode worker give the same tokens as a single engine."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.engine import Engine, EngineConfig, EngineRequest, SamplingParams, build_engine
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import unpacked_ids
from tests.cluster_helpers import assert_whole, metrics, paired, request, sampling
from tests.device import DEVICE

from .conftest import TINY, Workers, prompt


@pytest.fixture(scope="module")
def engine(caching_directory: Path) -> Engine:
    settings: dict[str, Any] = TINY | {"dtype": "float32", "device": DEVICE, "num_threads": 1}
    return build_engine(EngineConfig(str(caching_directory / "model"), **settings))


def alone(engine: Engine, requests: list[pb.Request]) -> list[list[int]]:
    """Returns the tokens of one engine that prefills and decodes these requests."""
    tokens: dict[bytes, list[int]] = {}
    for r in requests:
        fields = {name.name: getattr(r.sampling, name.name) for name in r.sampling.DESCRIPTOR.fields}
        fields["stop_token_ids"] = tuple(r.sampling.stop_token_ids)
        fields["logit_bias"] = dict(r.sampling.logit_bias)
        fields["logprobs"] = r.sampling.logprobs if r.sampling.HasField("logprobs") else None
        fields["structured_output"] = None  # no request of this test asks for it
        tokens[r.request_id] = []
        engine.add(
            EngineRequest(
                r.request_id, list(unpacked_ids(r.prompt_ids)), list(r.output_ids), SamplingParams(**fields)
            )
        )
    while not engine.idle:
        for output in engine.loop.step().outputs:
            tokens[output.id].append(output.token)
    engine.assert_whole()
    return list(tokens.values())


@pytest.mark.all
async def test_concurrent_mixed_requests_yield_the_tokens_of_one_engine(
    caching_workers: Workers, engine: Engine
) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 7, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "seed": 2**63 + 5, "presence_penalty": 0.5},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    ]
    lengths = (1, 15, 16, 17, 60, 129, 300)
    requests = [
        request(prompt(n), sampling(max_tokens=10, ignore_eos=True, **kinds[i % len(kinds)]))
        for i, n in enumerate(lengths)
    ]
    requests.append(request(prompt(40), sampling(max_tokens=20, ignore_eos=True), prompt(6)))
    expected = alone(engine, requests)
    before = metrics(caching_workers[1])
    async with paired(*caching_workers) as pair:
        answers = await asyncio.gather(
            *(
                pair.generate(list(unpacked_ids(r.prompt_ids)), r.sampling, list(r.output_ids))
                for r in requests
            )
        )
        steps = pair.decode.steps
    assert [answer.tokens for answer in answers] == expected
    for r, answer in zip(requests, answers, strict=True):
        start = len(r.output_ids)
        assert [t.output_index for t in answer.decoded] == list(range(start, r.sampling.max_tokens))
        assert not any(t.finish_reason for t in answer.decoded[:-1])
        assert answer.finish_reason == pb.FINISH_REASON_LENGTH
        # The decode worker repeats prefill's token with its log probabilities.
        repeated = answer.decoded[0]
        assert (answer.first.output_index, answer.first.token_id) == (start, repeated.token_id)
        assert answer.first.logprobs == repeated.logprobs
        if r.sampling.HasField("logprobs"):
            assert len(repeated.logprobs.top_ids) == 2
            assert repeated.logprobs.logprob < 0
    assert max(len(step.tokens) for step in steps) > 1, "the tokens of one step are in one message"
    await assert_whole(*caching_workers)
    after = metrics(caching_workers[1])
    transfers, hidden = (
        after[f"baton:kv_hidden_share_{of}"] - before[f"baton:kv_hidden_share_{of}"]
        for of in ("count", "sum")
    )
    assert transfers == len(requests)
    assert 0 <= hidden <= transfers
