"""`baton flip` and `baton restart --engine` between a stand-in for the router's `/status`, and workers that
answer over gRPC."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner, Result

from baton.cluster.cli import app
from baton.cluster.supervision.announcement import Announcement
from baton.cluster.supervision.rundir import RunDir
from baton.rpc import worker_pb2 as pb
from tests.fake_worker import SECRET, FakeWorker, Lanes

NAMES = {pb.POOL_PREFILL: "prefill", pb.POOL_DECODE: "decode"}


def shown(worker: FakeWorker, group: str = "") -> dict[str, Any]:
    """The worker's entry in the router's `/status`."""
    return {
        "role": NAMES[worker.first_pool], "index": worker.index, "address": worker.address, "state": "ready",
        "status": {"pool": f"pool_{NAMES[worker.status.pool]}"}, "description": {"group": group},
    }  # fmt: skip


class Flipped:
    """Workers prefill 0, decode 0 and decode 1."""

    def __init__(self) -> None:
        self.workers = [
            FakeWorker(pool, Lanes(), [1], index=index)
            for pool, index in ((pb.POOL_PREFILL, 0), (pb.POOL_DECODE, 0), (pb.POOL_DECODE, 1))
        ]
        self.groups = [""] * 3
        self.url = ""

    async def status(self, _: web.Request) -> web.Response:
        return web.json_response({"workers": [*map(shown, self.workers, self.groups)]})

    def pools(self) -> list[str]:
        return [NAMES[worker.status.pool] for worker in self.workers]

    async def flip(self, *args: str, secret: bytes | None = SECRET) -> Result:
        return await self.run("flip", *args, secret=secret)

    async def run(self, *args: str, secret: bytes | None = SECRET) -> Result:
        known = None if secret is None else secret.decode()
        environment: dict[str, str | None] = {"BATON_CLUSTER_SECRET": known, "COLUMNS": "400"}
        command = [*args, "--url", self.url]
        return await asyncio.to_thread(lambda: CliRunner().invoke(app, command, env=environment))


@pytest.fixture
async def cluster() -> AsyncIterator[Flipped]:
    flipped = Flipped()
    for worker in flipped.workers:
        await worker.start()
    application = web.Application()
    application.router.add_get("/status", flipped.status)
    async with TestServer(application) as server:
        flipped.url = f"http://{server.host}:{server.port}"
        yield flipped
    for worker in flipped.workers:
        await worker.kill()


async def test_a_worker_is_moved_by_name_and_back_by_address(cluster: Flipped) -> None:
    moved = await cluster.flip("decode-1", "prefill")
    assert (moved.exit_code, moved.stdout) == (
        0, "decode 1: decode → prefill. What runs on it goes on to its end.\n",
    )  # fmt: skip
    assert cluster.pools() == ["prefill", "decode", "prefill"]
    back = await cluster.flip(cluster.workers[2].address, "decode")
    assert back.stdout.startswith("decode 1: prefill → decode")
    assert cluster.pools() == ["prefill", "decode", "decode"]


async def test_a_worker_that_is_there_already_is_no_error(cluster: Flipped) -> None:
    same = await cluster.flip("decode 0", "decode")
    assert (same.exit_code, same.stdout) == (0, "decode 0 is in the decode pool already.\n")


async def test_the_workers_of_a_group_move_together(cluster: Flipped) -> None:
    cluster.groups = ["", "one", "one"]
    refused = await cluster.flip("decode-1", "prefill")
    assert "decode 0 and decode 1 are the last ready workers of the decode pool" in refused.stderr
    moved = await cluster.flip("decode-1", "prefill", "--force")
    assert moved.stdout.startswith("decode 0 and decode 1: decode → prefill.")
    assert cluster.pools() == ["prefill"] * 3
    again = await cluster.flip("decode-0", "prefill")
    assert again.stdout == "decode 0 and decode 1 are in the prefill pool already.\n"


async def test_the_last_worker_of_a_pool_is_moved_only_by_force(cluster: Flipped) -> None:
    refused = await cluster.flip("prefill-0", "decode")
    assert refused.exit_code == 2
    assert "prefill 0 is the last ready worker of the prefill pool" in refused.stderr
    assert "--force" in refused.stderr
    assert cluster.pools()[0] == "prefill"
    assert (await cluster.flip("prefill-0", "decode", "--force")).exit_code == 0
    assert cluster.pools() == ["decode"] * 3


async def test_errors_name_the_remedy(cluster: Flipped) -> None:
    unknown = await cluster.flip("decode-7", "prefill")
    assert unknown.exit_code == 2
    assert f"decode-1 ({cluster.workers[2].address})" in unknown.stderr
    secret = await cluster.flip("decode-1", "prefill", secret=b"another secret of theirs")
    assert "decode 1" in secret.stderr
    assert "does not prove this secret" in secret.stderr
    assert "BATON_CLUSTER_SECRET" in secret.stderr
    assert "a `baton serve` of the same user on this machine is found by --url" in secret.stderr
    cluster.workers[2].index = 0
    several = await cluster.flip("decode-0", "prefill")
    assert cluster.workers[2].address in several.stderr
    await cluster.workers[2].kill()
    gone = await cluster.flip(cluster.workers[2].address, "prefill")
    assert "no answer" in gone.stderr
    assert cluster.pools() == ["prefill", "decode", "decode"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Sockets allow only short paths."""
    with tempfile.TemporaryDirectory(prefix="baton-") as directory:
        yield Path(directory)


async def test_the_secret_of_a_cluster_of_this_user_is_found(cluster: Flipped, short_path: Path) -> None:
    where = "--advanced.run-dir", str(short_path)
    run_dir = RunDir.create(short_path)
    without = await cluster.flip("decode-1", "prefill", *where, secret=None)
    assert without.exit_code == 2
    assert "no cluster secret" in without.stderr
    port = int(cluster.url.rpartition(":")[2])
    Announcement(os.getpid(), (port,), SECRET.decode()).announce(run_dir.path)
    moved = await cluster.flip("decode-1", "prefill", *where, secret=None)
    assert (moved.exit_code, cluster.pools()) == (0, ["prefill", "decode", "prefill"]), moved.stderr
    given = await cluster.flip("decode-1", "decode", *where, secret=b"another secret of theirs")
    assert "does not prove this secret" in given.stderr, "the one that the user gives wins"
    run_dir.remove()


async def test_engine_processes_are_restarted_one_after_the_other(cluster: Flipped) -> None:
    done = await cluster.run("restart", "--engine")
    assert done.stdout.splitlines() == [
        f"{name}: another engine process goes on after 2.2 s"
        for name in ("prefill 0", "decode 0", "decode 1")
    ], done.stderr
    one = await cluster.run("restart", "--engine", "decode-1")
    assert (one.exit_code, len(one.stdout.splitlines())) == (0, 1)
    assert [worker.engine_restarts for worker in cluster.workers] == [1, 1, 2]
    cluster.workers[1].refuses_restart = "it was started without --replace-engine"
    refused = await cluster.run("restart", "--engine")
    assert refused.exit_code == 2
    assert "decode 0" in refused.stderr
    assert "without --replace-engine" in refused.stderr
    assert [worker.engine_restarts for worker in cluster.workers] == [2, 1, 2], "the ones behind it stay"


async def test_a_whole_worker_is_not_restarted_alone(cluster: Flipped) -> None:
    refused = await cluster.run("restart", "decode-1")
    assert refused.exit_code == 2
    assert "add --engine" in refused.stderr
