"""Engine processes of a cluster are killed and replaced within their workers; no client reads another token.

`tests/worker/test_replaced_engine.py` kills those of one worker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.bench.lab.harness.cluster import LocalCluster
from baton.bench.lab.harness.streams import Case, Stream, expected
from tests.forked.popen import FORKS_AGAIN
from tests.within import WITHIN

from .recovery import FLAGS, LONG, PATIENT, SHORT, Broken, each_has, leaks_when_idle
from .test_continuation import PLAIN, ROWS

CACHED = [flag for flag in FLAGS if flag != "--no-enable-prefix-caching"]
OPTIONS = [ROWS[name](Stream(PLAIN)) for name in ("penalties", "greedy penalties", "logprobs", "seed")]
ASKED = [*SHORT, *OPTIONS, *LONG]

pytestmark = pytest.mark.long


def salted(case: Case, salt: str) -> Case:
    """The same request, which finds no KV of others."""
    return replace(case, options=json.dumps(json.loads(case.options) | {"cache_salt": salt}))


@pytest.fixture(scope="module")
def replacing(tmp_path_factory: pytest.TempPathFactory, shallow_model: list[str]) -> Iterator[Broken]:
    """One worker of each role."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(FORKS_AGAIN, "1")
        cluster = LocalCluster(
            tmp_path_factory.mktemp("replacing"),
            prefill=1,
            decode=1,
            worker_flags=[*CACHED, "--replace-engine", *shallow_model],
            router_flags=["--advanced.no-overflow", *PATIENT, *shallow_model],
        )
    with cluster:
        right = asyncio.run(expected(cluster.url, [salted(case, "right") for case in ASKED], at_once=16))
        yield Broken(cluster, dict(zip(ASKED, right.values(), strict=True)))


async def rides(replacing: Broken, salt: str, asked: list[Case], *faults: tuple) -> None:
    for case in asked:
        replacing.right[salted(case, salt)] = replacing.right[case]
    await replacing.ride([salted(case, salt) for case in asked], *faults, felt=replacing.prompts_again)
    assert await asyncio.to_thread(leaks_when_idle, replacing.cluster.url, WITHIN) == {}
    assert [worker.exits for worker in replacing.cluster.workers] == [[], []]


async def test_streams_go_on_when_the_engine_that_decodes_is_killed(replacing: Broken) -> None:
    """With penalties, log probabilities and seeds."""
    [decode] = replacing.cluster.of("decode")
    await rides(replacing, "decode", [*SHORT, *OPTIONS], (each_has(3), lambda: decode.kill("engine")))
    assert "and are used" in decode.log.read_text()


async def test_streams_go_on_when_both_engines_are_killed(replacing: Broken) -> None:
    """That which computes prompts dies while KV is under way, the other one while it decodes."""
    [prefill], [decode] = replacing.cluster.of("prefill"), replacing.cluster.of("decode")
    await rides(
        replacing,
        "both",
        [*LONG, *SHORT[:4]],
        (replacing.transferring, lambda: prefill.kill("engine")),
        (each_has(2), lambda: decode.kill("engine")),
    )
