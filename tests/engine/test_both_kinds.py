"""One engine prefills for others, decodes for others, and does both for itself, at the same time."""

import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine import Engine, EngineRequest, Output
from baton.engine.core.live_request import LiveRequest
from tests.engine.conftest import MakeEngine, request_of, run
from tests.engine.scheduling import end, hooks_to, live_of
from tests.engine.test_disaggregation import LIST, copy_kv

WAYS = ("add", "start", "resume", "join")


class Everything:
    """Serves requests on one engine, each in its way of `WAYS`. A request that is handed back starts anew."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.outputs: dict[bytes, list[Output]] = {}
        self.handed_back = self.joined = 0
        self.tables: dict[bytes, Sequence[int]] = {}
        engine.loop.hooks = hooks_to(self)

    def prefill_started(self, live: LiveRequest) -> None:
        self.tables[live.owner] = list(live.blocks)

    def layer_done(self, layer: int, chunks: Any) -> None:
        assert all(request_id.startswith(b"prefill") for request_id in chunks)

    def serve(self, requests: Sequence[EngineRequest], ways: Sequence[str]) -> dict[bytes, list[Output]]:
        engine = self.engine
        way_of = {request.id: way for request, way in zip(requests, ways, strict=True)}
        current = {request.id: request for request in requests}
        self.outputs = {request.id: [] for request in requests}
        waiting = list(requests)  # not in the engine
        held: list[Output] = []
        while waiting or held or not engine.idle:
            waiting = [request for request in waiting if not self.enter(request, way_of[request.id])]
            held = [first for first in held if not self.go_on(current, way_of, first)]
            result = engine.loop.step()
            assert not result.failed
            assert not result.refused
            for output in result.outputs:
                if output.id in self.outputs:
                    self.emit(output)
                    continue
                if output.finish_reason:
                    self.emit(output._replace(id=output.id.removeprefix(b"prefill")))
                    end(engine, output.id)
                else:
                    held.append(output)
            for request_id in result.preempted:
                self.handed_back += 1
                emitted = [output.token for output in self.outputs[request_id]]
                current[request_id] = replace(current[request_id], output_ids=emitted)
                waiting.append(current[request_id])
        engine.assert_whole()
        return self.outputs

    def emit(self, output: Output) -> None:
        assert output.output_index == len(self.outputs[output.id]), "lost or repeated"
        self.outputs[output.id].append(output)

    def enter(self, request: EngineRequest, way: str) -> bool:
        match way:
            case "start":
                return self.engine.start(request) is not None
            case "add":
                self.engine.add(request)
            case _:
                self.engine.add(replace(request, id=b"prefill" + request.id), handover=True)
        return True

    def go_on(self, current: dict[bytes, EngineRequest], way_of: dict[bytes, str], first: Output) -> bool:
        """Takes a held request on: in a reservation that gets a copy of its KV, or where it is."""
        engine, request = self.engine, current[first.id.removeprefix(b"prefill")]
        target = engine.reserve(request) if way_of[request.id] == "join" else None
        if target is None:
            again = engine.resume(live_of(engine, first.id), request.id)
            if again is None:
                return False
        else:
            self.joined += 1
            count = len(request.prompt_ids) + len(request.output_ids)
            copy_kv(engine, self.tables[first.id], engine, target, count)
            end(engine, first.id)
            again = engine.join(live_of(engine, request.id), first.token, first.logprobs)
        assert again[:5] == (request.id, *first[1:5]), "index, token, log probabilities and the reason to end"
        assert (again.queue_seconds, again.prefill_seconds) == (0, 0)
        self.emit(again)
        return True


def requests_of() -> list[EngineRequest]:
    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"structured_output": LIST, "max_tokens": 60},
        {"ignore_eos": True, "max_tokens": 25, "frequency_penalty": 0.5},
    ]
    trunk = [rng.randrange(3, 199) for _ in range(30)]
    requests = []
    for number in range(12):
        kind = kinds[number // len(WAYS) % len(kinds)]  # each kind in each way
        prompt = trunk[: rng.randrange(24)] + [rng.randrange(3, 199) for _ in range(rng.randrange(1, 9))]
        requests.append(
            request_of(number, prompt, **{"max_tokens": 1 + rng.randrange(25), "seed": number, **kind})
        )
    return requests


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    return requests_of()


@pytest.fixture(scope="module")
def alone(tiny_engine: MakeEngine, spelled_path: Path, requests: list[EngineRequest]) -> dict[bytes, Any]:
    """The results of an engine that does nothing else."""
    return run(tiny_engine(model=str(spelled_path), num_blocks=1024), requests)


@pytest.mark.all
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"num_blocks": 512}, id="room"),
        pytest.param({"num_blocks": 24, "max_num_seqs": 6, "max_num_batched_tokens": 24}, id="few blocks"),
        pytest.param({"num_blocks": 64, "max_num_seqs": 2, "max_num_batched_tokens": 9}, id="few seats"),
        pytest.param({"num_blocks": 40, "enable_prefix_caching": True}, id="prefix cache"),
    ],
)
def test_tokens_do_not_depend_on_the_way_that_a_request_takes(
    tiny_engine: MakeEngine,
    spelled_path: Path,
    requests: list[EngineRequest],
    alone: dict[bytes, Any],
    config: dict[str, Any],
) -> None:
    engine = tiny_engine(model=str(spelled_path), **config)
    served = Everything(engine)
    outputs = served.serve(requests, [way for way, _ in zip(itertools.cycle(WAYS), requests, strict=False)])
    if config["num_blocks"] == 512:
        assert served.joined
    if config["num_blocks"] == 24:
        assert served.handed_back
    for request in requests:
        ours, expected = outputs[request.id], alone[request.id].outputs
        assert [o.token for o in ours] == [o.token for o in expected]
        assert ours[-1].finish_reason == expected[-1].finish_reason
        for a, b in zip(ours, expected, strict=True):
            assert (a.logprobs is None) == (b.logprobs is None)
            if a.logprobs is not None and b.logprobs is not None:
                assert a.logprobs.top_ids == b.logprobs.top_ids
                assert a.logprobs.logprob == pytest.approx(b.logprobs.logprob, abs=1e-4)


def test_nothing_is_computed_twice_for_a_resumed_request(tiny_engine: MakeEngine) -> None:
    request = request_of(1, range(3, 14), max_tokens=6, ignore_eos=True)
    expected = run(tiny_engine(), [request])[request.id].tokens
    engine = tiny_engine(enable_prefix_caching=True)
    engine.add(replace(request, id=b"prefill"), handover=True)
    (first,) = engine.loop.step().outputs
    again = engine.resume(live_of(engine, b"prefill"), request.id)
    assert again == Output(request.id, 0, first.token)
    computed: list[tuple[int, int]] = []
    run_step = engine.runner.run

    def watched(step: Any, layer_done: Any) -> Any:
        computed.append((len(step.token_ids), int(step.positions[0])))
        return run_step(step, layer_done)

    engine.runner.run = watched
    rest = run(engine)[request.id].tokens
    assert [first.token, *rest] == expected
    assert computed == [(1, 11 + number) for number in range(5)]
    assert engine.stats().blocks_cached == 4, "of 16 computed positions"
    engine.assert_whole()


def test_resuming_ends_a_request_with_its_last_token(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine()
    engine.add(request_of(1, [3, 4, 5], max_tokens=1), handover=True)
    (first,) = engine.loop.step().outputs
    again = engine.resume(live_of(engine, first.id), b"decode")
    assert again == Output(b"decode", 0, first.token, finish_reason="length")
    engine.assert_whole()


def test_a_stream_that_goes_on_here_is_late(tiny_engine: MakeEngine) -> None:
    """Else its prompt would come in the smallest chunks beside decodes, while its reader waits in a gap."""
    engine = tiny_engine()
    engine.add(replace(request_of(1, [3, 4, 5], max_tokens=2), output_ids=[6], first_token_within=31.0))
    assert [due for _, due in engine.scheduler.prompts()] == [-math.inf]


def test_time_before_the_engine_counts(tiny_engine: MakeEngine) -> None:
    """A request may have waited for a prefix from another worker."""
    engine = tiny_engine()
    arrived = time.monotonic() - 30
    engine.add(replace(request_of(1, [3, 4, 5], max_tokens=1), arrived=arrived, first_token_within=31.0))
    assert [due for _, due in engine.scheduler.prompts()] == [arrived + 31]
    (output,) = engine.loop.step().outputs
    assert output.queue_seconds > 30
