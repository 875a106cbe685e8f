"""`baton weights` on a real cluster: streams go on, no prefix of other weights is used, and a fault changes
nothing."""

import asyncio
import json
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from baton.bench.lab.harness.cluster import LocalCluster
from baton.bench.lab.harness.streams import Stream, expected, new_session, read
from baton.cluster.cli import app
from baton.cluster.model import EMBEDDED_NAME
from tests.shallow import shallow
from tests.within import WITHIN

from .machine import until
from .recovery import FLAGS, PATIENT, SHORT, each_has, leaks_when_idle

pytestmark = pytest.mark.all

TOKENS = 64
CASES = [replace(case, max_tokens=TOKENS) for case in SHORT[:4]]


def status(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/status", timeout=WITHIN) as page:
        return json.load(page)


class Trained:
    """A cluster, and checkpoints of the model before and after training."""

    def __init__(self, cluster: LocalCluster, before: Path, after: Path) -> None:
        self.cluster, self.before, self.after = cluster, before, after

    async def weights(self, path: Path) -> Result:
        command, environment = ["weights", str(path), "--url", self.cluster.url], self.cluster.environment
        return await asyncio.to_thread(lambda: CliRunner().invoke(app, command, env=environment))


@pytest.fixture(scope="module")
def trained(
    shallow_model_path: Path, embedded_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trained]:
    directory = tmp_path_factory.mktemp("trained")
    after = shallow(embedded_model_path, directory / "after.gguf", backwards=True)
    model = ["--model", str(shallow_model_path), "--served-model-name", EMBEDDED_NAME]
    with LocalCluster(
        directory,
        prefill=1,
        decode=1,
        worker_flags=[*FLAGS, "--enable-prefix-caching", *model],
        router_flags=[*PATIENT, *model, "--advanced.admin-key", "trainer"],
    ) as cluster:
        yield Trained(cluster, shallow_model_path, after)


@pytest.mark.long
async def test_streams_go_on_and_answers_are_of_the_new_weights(trained: Trained) -> None:
    url = trained.cluster.url
    old = await expected(url, CASES, at_once=12)
    streams = [Stream(case) for case in CASES]
    async with new_session() as http:
        reading = [asyncio.create_task(read(http, url, stream.case, into=stream)) for stream in streams]
        begun = each_has(4)
        await asyncio.to_thread(until, lambda: begun(streams) or None, WITHIN, "four tokens of each")
        done = await trained.weights(trained.after)
        assert done.exit_code == 0, done.stderr
        await asyncio.gather(*reading)
    for stream in streams:
        assert not stream.failed
        assert len(stream.token_ids) == TOKENS, "no stream has lost or repeated a token"
    new = await expected(url, CASES, at_once=12)
    assert all(new[case] != old[case] for case in CASES)
    assert await asyncio.to_thread(leaks_when_idle, url, WITHIN) == {}


@pytest.mark.long
@pytest.mark.parametrize("clear_cache", ["true", "false"])
async def test_frozen_streams_go_on_with_new_weights_and_later_ones_have_nothing_of_the_old(
    trained: Trained, clear_cache: str
) -> None:
    url, headers = trained.cluster.url, {"Authorization": "Bearer trainer"}
    answers = []
    for path in (trained.after, trained.before):
        assert (await trained.weights(path)).exit_code == 0
        answers.append(await expected(url, CASES, at_once=12))
    new, old = answers
    streams: list[Stream] = []
    async with new_session() as http:

        async def call(path: str) -> None:
            async with http.post(url + path, headers=headers) as response:
                assert response.status == 200, await response.text()

        frozen = [TOKENS]
        while min(frozen) == TOKENS:  # on a busy machine all may end before the pause
            assert (await trained.weights(trained.before)).exit_code == 0
            streams = [Stream(case) for case in CASES]
            reading = [asyncio.create_task(read(http, url, stream.case, into=stream)) for stream in streams]
            begun = partial(each_has(4), streams)
            await asyncio.to_thread(until, lambda begun=begun: begun() or None, WITHIN, "four tokens of each")
            await call(f"/pause?mode=keep&clear_cache={clear_cache}")
            done = await trained.weights(trained.after)
            assert done.exit_code == 0, done.stderr
            frozen = [len(stream.token_ids) for stream in streams]
            await call("/resume")
            await asyncio.gather(*reading)
    for stream, had in zip(streams, frozen, strict=True):
        assert not stream.failed
        assert len(stream.token_ids) == TOKENS
        assert stream.token_ids[:had] == old[stream.case][:had]
    assert await expected(url, CASES, at_once=12) == new
    assert await asyncio.to_thread(leaks_when_idle, url, WITHIN) == {}


@pytest.mark.long
async def test_no_version_has_a_prefix_of_another_one(trained: Trained) -> None:
    url = trained.cluster.url
    answers = []
    for path in (trained.after, trained.before, trained.after, trained.after, trained.before):
        done = await trained.weights(path)
        assert done.exit_code == 0, done.stderr
        answers.append(await expected(url, CASES, at_once=12))
    assert answers[0] == answers[2] == answers[3]
    assert answers[1] == answers[4] != answers[0]


@pytest.mark.long
async def test_a_fault_changes_nothing_and_a_worker_that_starts_again_gets_the_weights_of_the_others(
    trained: Trained,
) -> None:
    url, decode = trained.cluster.url, trained.cluster.workers[1]
    old = await expected(url, CASES, at_once=12)
    missing = await trained.weights(trained.after.with_name("nowhere.gguf"))
    assert missing.exit_code == 2
    for name in ("prefill 0", "decode 0"):
        assert f"{name}: {trained.after.with_name('nowhere.gguf')}: no such file" in missing.stderr
    assert "No weights have changed." in missing.stderr
    assert await expected(url, CASES, at_once=12) == old

    gone = Path(shutil.copy(trained.after, trained.after.with_name("gone.gguf")))
    assert (await trained.weights(gone)).exit_code == 0
    new = await expected(url, CASES, at_once=12)
    lives = len(decode.lives)
    gone.unlink()  # the other worker has it open
    await asyncio.to_thread(decode.kill, "engine")

    def again() -> bool | None:
        workers = status(url)["workers"]
        if len(decode.lives) == lives or any(worker["state"] != "ready" for worker in workers):
            return None
        return True

    await asyncio.to_thread(until, again, WITHIN, "the worker starts, and has the newest weights")
    assert await expected(url, CASES, at_once=12) == new


@pytest.mark.long
async def test_workers_change_one_after_the_other_and_the_others_serve(
    shallow_model_path: Path, embedded_model_path: Path, tmp_path: Path
) -> None:
    after = shallow(embedded_model_path, tmp_path / "after.gguf", backwards=True)
    model = ["--model", str(shallow_model_path), "--served-model-name", EMBEDDED_NAME]
    with LocalCluster(
        tmp_path,
        prefill=2,
        decode=2,
        worker_flags=[*FLAGS, "--enable-prefix-caching", *model],
        router_flags=[*PATIENT, *model],
    ) as cluster:
        url = cluster.url
        old = await expected(url, CASES, at_once=12)
        command = ["weights", str(after), "--url", url, "--max-unavailable", "1"]
        environment = cluster.environment
        changing = asyncio.create_task(
            asyncio.to_thread(lambda: CliRunner().invoke(app, command, env=environment))
        )
        answers = list[Stream]()
        async with new_session() as http:
            while not changing.done():
                answers += await asyncio.gather(*(read(http, url, case) for case in CASES))
        done = await changing
        assert done.exit_code == 0, done.stderr
        assert "1 at a time did not serve, for" in done.stdout
        new = await expected(url, CASES, at_once=12)
        assert all(new[case] != old[case] for case in CASES)
        for stream in answers:
            assert not stream.failed
            assert len(stream.token_ids) == TOKENS
            # What a worker computed that changed meanwhile goes on with the new weights.
            assert stream.token_ids[0] in (old[stream.case][0], new[stream.case][0])
        assert await asyncio.to_thread(leaks_when_idle, url, WITHIN) == {}
