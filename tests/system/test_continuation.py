"""Whatever a request asks for: a run whose workers are killed says what a run in quiet says."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.bench.lab.harness.streams import Case, Stream, new_session, read

from .recovery import Broken, each_has, hold, ride, wait_exit

pytestmark = pytest.mark.all

TOKENS = 24


def case(number: int, **options: Any) -> Case:
    prompt = f"({number}) Once upon a time, in a village by the sea, there lived an old fisherman who"
    return Case(prompt, TOKENS, options.pop("temperature", 0.8), seed=number, options=json.dumps(options))


PLAIN = case(1, temperature=0.0)
Row = Callable[[Stream], Case]
ROWS: dict[str, Row] = {
    "penalties": lambda plain: case(2, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2),
    "greedy penalties": lambda plain: case(3, temperature=0.0, frequency_penalty=1.5),
    "logprobs": lambda plain: case(4, logprobs=3),
    "seed": lambda plain: case(5, temperature=1.3, top_p=0.9, top_k=40, min_p=0.01),
    "logit bias": lambda plain: case(6, logit_bias={str(plain.token_ids[3]): 3.0}),
    # It begins in one token and ends in another, far behind the kill.
    "stop string": lambda plain: case(1, temperature=0.0, stop=[plain.text[-14:-6]]),
    # The token is chosen as soon as it is allowed: tokens that were generated before the kill must count.
    "min_tokens": lambda plain: case(
        1, temperature=0.0, ignore_eos=False, min_tokens=16, stop_token_ids=plain.token_ids[:1],
        logit_bias={str(plain.token_ids[0]): 100.0},
    ),
}  # fmt: skip


async def asked(url: str, cases: list[Case]) -> list[Stream]:
    async with new_session() as http:
        return list(await asyncio.gather(*(read(http, url, one) for one in cases)))


async def test_a_killed_run_equals_a_quiet_one(broken: Broken) -> None:
    """All decode workers are killed. The streams wait, are kept alive, and go on when the workers are back.
    Then an engine is killed."""
    await asyncio.to_thread(broken.all_back)
    decodes = broken.cluster.of("decode")

    releases: list[Callable[[], None]] = []

    def kill_all() -> None:
        broken.all_back()  # when the ride repeats it, one still starts: it would end without a life
        ended = [len(worker.exits) for worker in decodes]
        for worker in decodes:
            worker.kill("service")
        for worker, count in zip(decodes, ended, strict=True):
            wait_exit(worker, count + 1)
            releases.append(hold(worker))

    def are_back(streams: list[Stream]) -> bool:
        """And the streams have some tokens, which they may have had before the kill."""
        return each_has(9)(streams) and all(worker.ready for worker in decodes)

    def release_all() -> None:
        for release in releases:
            release()

    url = broken.cluster.url
    [plain] = await asked(url, [PLAIN])
    cases = [row(plain) for row in ROWS.values()]
    quiet = await asked(url, cases)
    assert len({stream.text for stream in quiet}) == len(ROWS), "each row asks for something else"
    right = {stream.case: stream.token_ids for stream in quiet}
    try:
        killed = await ride(
            url,
            right,
            cases,
            (each_has(4), kill_all),
            # On a slow machine a short answer is over before the kill.
            (lambda streams: all(stream.keepalives or stream.ended for stream in streams), release_all),
            (are_back, lambda: broken.busiest("decode").kill("engine")),
            felt=broken.retries,
        )
    finally:
        release_all()
    for name, before, after in zip(ROWS, quiet, killed, strict=True):
        assert (after.text, after.finish_reason) == (before.text, before.finish_reason), name
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-3), name
    by_name = dict(zip(ROWS, killed, strict=True))
    assert len(by_name["logprobs"].logprobs) == TOKENS
    assert by_name["stop string"].finish_reason == "stop"
    assert 10 < len(by_name["stop string"].token_ids) < TOKENS
    assert by_name["min_tokens"].finish_reason == "stop"
    assert len(by_name["min_tokens"].token_ids) in (16, 17)
    await broken.settled()
