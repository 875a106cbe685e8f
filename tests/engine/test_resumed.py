"""A request that goes on where it was prefilled, and times that count from before an engine has a request."""

import math
import time
from dataclasses import replace
from typing import Any

from baton.engine import Output
from tests.engine.conftest import MakeEngine, request_of, run
from tests.engine.scheduling import live_of


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
