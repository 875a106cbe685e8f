"""`baton serve --ray-address` on a Ray of several nodes: what it loses, one after another, under load.

The cluster outlives the command that started it, and no client notices that workers, raylets, the supervisor
or GCS die: every stream says, token for token, what it says on a healthy cluster.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from baton.bench.lab.harness.cluster import free_port, leaks_when_idle
from baton.bench.lab.harness.streams import Case, Load, cases, expected, judge
from baton.cluster.on_ray.joined import OtherCluster
from baton.processes.tree import alive
from tests.within import WITHIN, eventually

from .machine import Machine, command_lines, titled, tree, until
from .raylets import Raylets

pytestmark = pytest.mark.all

T = TypeVar("T")
CASES = cases(8, 24)
FLAGS = (
    "--dtype", "float32", "--advanced.num-threads", "1", "--advanced.num-blocks", "600",
    "--max-num-batched-tokens", "64", "--failure-timeout", "30", "--drain-timeout", "5",
)  # fmt: skip
BACK_S = 120.0


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.remove()


@pytest.fixture
def raylets(machine: Machine) -> Iterator[Raylets]:
    machine.environment |= {"BATON_CLUSTER_SECRET": "of this cluster, whoever serves it"}
    raylets = Raylets(machine.home / "ray", machine.environment)
    machine.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(raylets.token)}
    try:
        yield raylets
    finally:
        raylets.close()


# `baton` as if it were called on one node's machine: Ray looks for a raylet beside the command.
_ON_NODE = """
import sys
from ray._private import services
node = sys.argv.pop(1)
services.find_node_ids = lambda: {node}
from baton.cluster.cli import app
app()
"""


# The actor of a role on a machine where the directory of logs cannot be made, and then can.
_LOST_DISK = """
import pathlib, sys
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError
from baton.cluster.on_ray import placement
from baton.cluster.on_ray.actors import RoleActor
from baton.cluster.supervision.blueprint import RoleSpec

address, in_the_way = sys.argv[1], pathlib.Path(sys.argv[2])
in_the_way.touch()
ray.init(address=address, log_to_driver=False)
spec = RoleSpec("prefill", 0, (), {})
role = ray.remote(RoleActor).options(**placement.options(spec))
actor = role.remote(spec, in_the_way / "logs", "127.0.0.1:1")
while True:
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=5)
        break
    except (RayActorError, GetTimeoutError) as error:
        assert not isinstance(error, ActorDiedError), "the actor is lost for good"
        if in_the_way.is_file():
            in_the_way.unlink()
assert not in_the_way.is_file(), "it could not start at first"
ray.kill(actor)
ray.shutdown()
"""


# The actor of a router of two processes: one is killed and replaced, then the actor is killed.
_ROUTER = """
import sys
import time
from contextlib import suppress
import psutil, ray
from baton.cluster import model
from baton.cluster.on_ray import placement
from baton.cluster.on_ray.actors import RoleActor
from baton.cluster.supervision.blueprint import RoleSpec
from baton.processes.tree import alive

def until(found):
    deadline = time.monotonic() + 100
    while not (now := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return now

ray.init(address=sys.argv[1], log_to_driver=False)
args = "--model", model.resolve(None).location, "--port", "0", "--router-processes", "2"
spec = RoleSpec("router", 0, args, {})
actor = ray.remote(RoleActor).options(**placement.options(spec)).remote(spec, None, "127.0.0.1:1")
state = ray.get(actor.start.remote())
while state.phase != "ready":
    assert not state.error, state.error
    state = ray.get(actor.changed.remote(state.token), timeout=100)
router = psutil.Process(state.pid)

def second():
    for each in router.children():
        with suppress(psutil.Error):  # it has just ended
            if each.cmdline()[0].endswith("router 0.1"):
                return each

(before := until(second)).kill()
until(lambda: (now := second()) is not None and now != before)

def all_five():  # with the two that fork; a process between has ended soon
    found = [router, *router.children(recursive=True)]
    return found if len(found) == 5 else []

every = until(all_five)
ray.kill(actor)
until(lambda: not any(map(alive, every)))
ray.shutdown()
"""


class Joined:
    """A cluster there, and a look at it from outside. `front`: the node at which `baton serve` is called."""

    def __init__(
        self, machine: Machine, raylets: Raylets, prefill: int, decode: int, *flags: str, front: str = ""
    ) -> None:
        self.machine, self.raylets = machine, raylets
        self.names = [f"prefill {i}" for i in range(prefill)] + [f"decode {i}" for i in range(decode)]
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self.title = f"baton {port}"
        self.flags = ("--ray-address", raylets.address)
        pools = ("--prefill", str(prefill), "--decode", str(decode))
        self.command = ("serve", *self.flags, "--port", str(port), *pools, *FLAGS, *flags)
        served = self.serve(front)
        assert served.returncode == 0, served.stdout + served.stderr
        self.right: dict[Case, list[int]] = asyncio.run(expected(self.url, CASES))

    def serve(self, front: str, *flags: str) -> subprocess.CompletedProcess[str]:
        """`baton serve` once more, to its end."""
        command = (*self.command, *flags)
        if not front:
            return self.machine.baton(*command, within=240)
        return self.machine.python("-c", _ON_NODE, front, *command, within=240)

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url + "/status", timeout=WITHIN) as response:
            return json.load(response)

    def roles(self) -> dict[str, dict[str, Any]]:
        """As the supervisor sees them."""
        return {f"{r['role']} {r['index']}": r for r in self.status()["cluster"]["roles"]}

    def incarnations(self) -> dict[str, str]:
        """Of the workers that the router has."""
        return {
            f"{w['role']} {w['index']}": w["incarnation"]
            for w in self.status()["workers"]
            if w["state"] == "ready"
        }

    def nodes(self) -> dict[str, str]:
        """The beginning of the id of each role's node."""
        return {name: role["node"].split()[-1] for name, role in self.roles().items()}

    def until_replaced(self, names: list[str], before: dict[str, str]) -> None:
        """New incarnations of these; the others as they were."""

        def replaced() -> bool | None:
            now = self.incarnations()
            if now.keys() != set(self.names) or any(now[name] == before[name] for name in names):
                return None
            return all(role["phase"] == "ready" for role in self.roles().values()) or None

        until(replaced, BACK_S, f"new incarnations of {names}")
        now = self.incarnations()
        assert [name for name in self.names if now[name] != before[name]] == sorted(
            names, key=self.names.index
        )

    @asynccontextmanager
    async def under_load(self, clients: int) -> AsyncIterator[Load]:
        """Afterwards, every answer was right."""
        load = Load(self.url, CASES, random.Random(1))
        async with load.of(clients):
            yield load
        verdict = judge(load.streams, self.right)
        assert (verdict.failed, verdict.lost_or_repeated, verdict.different) == (0, 0, 0), verdict.errors
        assert verdict.requests >= clients

    def assert_whole(self) -> None:
        """Nothing orphaned: one process for each role, in the one place where its actor is; pools whole."""
        head = self.raylets.process.pid
        titles = [line.partition("\0")[0] for line in command_lines(head).values()]
        for name in (*self.names, "router 0"):
            assert titles.count(f"{self.title}: {name}") == 1, "\n".join(titles)
        assert leaks_when_idle(self.url) == {}

    def kill(self, name: str) -> None:
        os.kill(self.roles()[name]["pid"], signal.SIGKILL)

    def stop(self) -> None:
        """Nothing is left but Ray."""
        head = self.raylets.process.pid
        names = (*self.names, "router 0")
        roles = [p for p in (titled(head, f"{self.title}: {name}") for name in names) if p]
        family = [*roles, *(process for role in roles for process in tree(role.pid))]
        assert len(roles) == len(self.names) + 1
        stopped = self.machine.baton("stop", *self.flags)
        assert stopped.returncode == 0, stopped.stderr
        assert not any(map(alive, family))
        assert list(self.machine.tmp.glob("baton*")) == []


async def progress(load: Load, answers: int) -> None:
    """Waits for so many further answers: streams go on."""
    target = len(load.streams) + answers
    await eventually(lambda: len(load.streams) >= target, BACK_S)


async def off(what: Callable[..., T], *args: Any) -> T:
    return await asyncio.to_thread(what, *args)


async def survive(joined: Joined, raylets: list[str], clients: int) -> None:
    """Each worker, each raylet of the list, the supervisor, GCS; one after another.

    The first worker dies together with the supervisor, the last one while GCS is away.
    """
    async with joined.under_load(clients) as load:
        for name in joined.names[1:-1]:
            before = await off(joined.incarnations)
            await off(joined.kill, name)
            await off(joined.until_replaced, [name], before)
        for node in raylets:
            before, nodes = await off(joined.incarnations), await off(joined.nodes)
            hit = [name for name in joined.names if node.startswith(nodes[name])]
            assert hit, "a raylet without a worker says nothing"
            await off(joined.raylets.kill, node)
            await off(joined.until_replaced, hit, before)
        before = await off(joined.incarnations)
        supervisor = titled(joined.raylets.process.pid, "ray::ClusterActor")
        assert supervisor is not None
        os.kill(supervisor.pid, signal.SIGKILL)
        await off(
            joined.kill, joined.names[0]
        )  # only the next supervisor can tell the router of its successor
        await off(joined.until_replaced, [joined.names[0]], before)
        before = await off(joined.incarnations)
        await off(joined.raylets.gcs, False)
        await progress(load, clients)
        await off(joined.kill, joined.names[-1])  # its actor starts it again, and needs no GCS for that
        await off(joined.until_replaced, [joined.names[-1]], before)
        await off(joined.raylets.gcs, True)
        await progress(load, clients)
    router = (await off(joined.roles))["router 0"]
    assert not router["restarts"], router["last_exit"]
    await off(joined.assert_whole)


@pytest.mark.long
def test_an_actor_of_a_role_starts_when_its_disk_has_room_again(machine: Machine, raylets: Raylets) -> None:
    raylets.add(2)
    done = machine.python("-c", _LOST_DISK, raylets.address, str(machine.home / "disk"), within=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_an_actor_of_a_router_has_processes_that_end_with_it(machine: Machine, raylets: Raylets) -> None:
    raylets.add(2)
    done = machine.python("-c", _ROUTER, raylets.address, within=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_one_of_each_over_two_raylets(machine: Machine, raylets: Raylets) -> None:
    raylets.add(4)
    other = raylets.add(2, side="far")
    joined = Joined(machine, raylets, 1, 1, "--advanced.decode-nodes", "side=far")
    nodes = joined.nodes()
    assert other.startswith(nodes["decode 0"]), "its label says where"
    assert not other.startswith(nodes["router 0"]), "the router is where the command was"
    again = machine.baton("serve", *joined.flags, "--port", str(free_port()))
    assert again.returncode == OtherCluster.exit_code
    assert "baton stop" in again.stderr
    raylets.add(2, side="far")  # where decode goes when the first one is gone
    asyncio.run(survive(joined, [other], clients=3))
    shown = machine.baton("status", "--url", joined.url)
    assert "was killed by SIGKILL" in shown.stdout, "why it was started again"
    joined.stop()
    nothing = machine.baton("stop", *joined.flags)
    assert nothing.returncode == 2
    assert "no cluster" in nothing.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_three_of_each_over_three_raylets(machine: Machine, raylets: Raylets) -> None:
    nodes = [raylets.add(7) for _ in range(3)]
    joined = Joined(machine, raylets, 3, 3)
    placed = joined.nodes()
    assert len({placed[name] for name in joined.names}) == 3, "spread over all nodes"
    away = [node for node in nodes[1:] if not node.startswith(placed["router 0"])]
    assert len(away) == 2, "the router is where the command was: on the head's node"
    asyncio.run(survive(joined, away, clients=3))
    joined.stop()


@pytest.mark.long
def test_another_command_goes_on_with_the_cluster_whose_front_was_lost(
    machine: Machine, raylets: Raylets
) -> None:
    """As on KubeRay when the one pod with the router is replaced: the workers do not notice."""
    raylets.add(3, side="far")
    front = raylets.add(1)
    far = ("--advanced.prefill-nodes", "side=far", "--advanced.decode-nodes", "side=far")
    joined = Joined(machine, raylets, 1, 1, *far, front=front)
    workers = joined.incarnations()
    assert front.startswith(joined.nodes()["router 0"])
    other = joined.serve("")
    assert other.returncode == 2
    assert "another machine" in other.stderr
    raylets.kill(front)
    router = f"{joined.title}: router 0"
    until(lambda: titled(raylets.process.pid, router), BACK_S, "a router on the node that is left")
    front = raylets.add(1)
    other = joined.serve(front, "--max-num-seqs", "3")
    assert other.returncode == OtherCluster.exit_code == 3
    assert "other flags" in other.stderr
    for _ in range(2):  # the second time everything is where it should be
        again = joined.serve(front)
        assert again.returncode == 0, again.stdout + again.stderr
        assert front.startswith(joined.nodes()["router 0"])
        assert joined.incarnations() == workers
        assert asyncio.run(expected(joined.url, CASES)) == joined.right
    assert machine.baton("stop", "--routers", *joined.flags).returncode == 0
    assert titled(raylets.process.pid, router) is None
    assert joined.serve(front).returncode == 0
    assert joined.incarnations() == workers
    joined.assert_whole()
    joined.stop()


@pytest.mark.long
def test_pairs_stand_side_by_side(machine: Machine, raylets: Raylets) -> None:
    raylets.add(1)  # the router's
    for _ in range(2):
        raylets.add(3)
    joined = Joined(machine, raylets, 2, 2, "--advanced.placement", "pair")
    nodes = joined.nodes()
    assert nodes["prefill 0"] == nodes["decode 0"]
    assert nodes["prefill 1"] == nodes["decode 1"]
    assert nodes["prefill 0"] != nodes["prefill 1"], "one machine has room for one pair"
    joined.stop()
