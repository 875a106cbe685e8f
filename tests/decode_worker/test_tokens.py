"""A prefill and a decode worker give the same tokens as a single engine."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, EngineConfig, EngineRequest, SamplingParams, build_engine
from rpc import worker_pb2 as pb
from tests.cluster_helpers import assert_whole, metrics, paired, request, sampling
from tests.device import DEVICE

from .conftest import RANKS, TINY, Workers, prompt

CHUNK = TINY["max_num_batched_tokens"]
LAYERS = 2


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
            EngineRequest(r.request_id, list(r.prompt_ids), list(r.output_ids), SamplingParams(**fields))
        )
    while not engine.idle:
        for output in engine.step().outputs:
            tokens[output.id].append(output.token)
    engine.assert_whole()
    return list(tokens.values())


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
    async with paired(*caching_workers) as pair:
        answers = await asyncio.gather(
            *(pair.generate(list(r.prompt_ids), r.sampling, list(r.output_ids)) for r in requests)
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


@pytest.mark.parametrize("caching_workers", RANKS[:1], indirect=True)
async def test_the_first_layer_is_sent_before_the_last_layer_is_computed(
    caching_workers: Workers, caching_directory: Path
) -> None:
    """Sent: gathered to the memory from which lanes send it."""
    began = time.monotonic() * 1e6
    before = metrics(caching_workers[1])
    async with paired(*caching_workers) as pair:
        await pair.generate(prompt(4 * CHUNK), sampling(max_tokens=4, ignore_eos=True))
    await assert_whole(*caching_workers)
    after = metrics(caching_workers[1])
    assert after["baton:kv_hidden_share_count"] == before["baton:kv_hidden_share_count"] + 1
    hidden = after["baton:kv_hidden_share_sum"] - before["baton:kv_hidden_share_sum"]
    assert 0 < hidden <= 1.0, "a part of the transfer is over before prefill samples its token"

    if DEVICE == "cpu":  # a GPU computes a layer later than its trace says, which tells when it was launched
        assert_layer_0_is_early(caching_directory / "traces", began)


def assert_layer_0_is_early(traces: Path, began: float) -> None:
    layers = [
        (event["args"]["layer"], event["args"]["start"], event["ts"])
        for event in events(traces, "prefill-0-engine", "layer", began, 4 * LAYERS)
    ]
    sent = [
        event["ts"] + event["dur"]
        for event in events(traces, "prefill-0-engine", "gather", began, 4 * LAYERS)
        if event["args"]["layers"] == [0]
    ]
    steps = [event["args"] for event in events(traces, "prefill-0-engine", "step", began, 4)]
    computed_by_steps = [(start, stop) for step in steps for _, start, stop in step["prompts"]]
    assert computed_by_steps == [(start, start + CHUNK) for start in range(0, 4 * CHUNK, CHUNK)]
    assert not any(step["decodes"] for step in steps)
    computed = {start: at for layer, start, at in layers if layer == LAYERS - 1}
    assert sorted(computed) == [0, CHUNK, 2 * CHUNK, 3 * CHUNK]
    # This holds for most chunks. On a busy machine a thread may be delayed.
    early = [gone < at for gone, at in zip(sorted(sent), sorted(computed.values()), strict=True)]
    assert sum(early) > len(early) / 2, (
        "layer 0 of a chunk is sent before the last layer of the chunk is computed"
    )


def events(traces: Path, process: str, name: str, since: float, count: int) -> list[dict[str, Any]]:
    """Returns the trace events of this name. Waits for `count` events: processes write traces in batches."""
    deadline = time.monotonic() + 10
    while True:
        files = [path.read_text().rpartition("\n")[0] for path in traces.glob(f"{process}.trace")]
        found = [json.loads(line.rstrip(",")) for file in files for line in file.splitlines()[1:]]
        found = [event for event in found if event["name"] == name and event["ts"] >= since]
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, f"{len(found)} of {count} {name} events of {process}"
        time.sleep(0.05)
