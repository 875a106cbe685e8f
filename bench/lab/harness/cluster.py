"""A cluster of `baton` processes. Every worker, and the router, starts again when its process ends.

The command lines are those of a user, and a workers file names the workers, as with any supervisor.
"""

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import signal
import threading
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from baton.bench.lab.driver import Option, Run, gpus_or_exit
from baton.bench.lab.harness import processes
from baton.bench.lab.harness.hosts import Host
from baton.bench.lab.harness.workers import Driver, metric
from baton.bench.lab.shapes import DENSE, write_shape
from baton.cluster.gpus import visible_gpus
from baton.cluster.model import EMBEDDED_NAME
from baton.cluster.supervision.blueprint import Pool
from baton.cluster.supervision.calls import set_pool
from baton.cluster.supervision.role_log import end_of
from baton.cluster.supervision.role_process import RoleProcess
from baton.cluster.supervision.runner import BATON, write_atomically
from baton.processes.restarts import RestartPolicy
from baton.rpc.channel import connect
from baton.system.addresses import free_port
from baton.system.python_path import python_path

START_S = 900.0  # of a machine that others use, too; a process that ends is seen at once
STOP_S = 60.0
SET_POOL_S = 60.0
WHOLE_S = 25.0  # less than a prefill waits for its decode worker, which would hide a leak
_MUST_BE_ZERO = (
    "requests_running", "requests_waiting", "tokens_waiting", "held_prefills", "reservations",
    "transfers_open",
)  # fmt: skip


class Worker:
    """One worker, or the router: its current process and the earlier ones. A `RoleProcess` keeps it running.

    Attributes:
        lives: the report of each process when it was ready.
        exits: why each process ended, as "exited with 1".
    """

    def __init__(
        self,
        cluster: "LocalCluster",
        role: str,
        index: int,
        flags: Sequence[str],
        cpus: Collection[int] = (),
        host: Host | None = None,
    ) -> None:
        """`cpus`: that its processes may use; empty: those of this one. `host`: where it runs; None: on this
        machine's network."""
        self.role, self.index = role, index
        self.name = f"{role} {index}"
        self.log = cluster.directory / f"{role}-{index}.log"
        self.lives: list[Mapping[str, Any]] = []
        self.exits: list[str] = []
        self.ready = False
        self.cluster = cluster
        self._cpus, self._host = cpus, host
        at = () if host is None else ("--host", host.address)
        command = (*BATON, role, "--index", str(index), *flags, *at)
        environment, at_once = {**cluster.environment, **python_path()}, RestartPolicy(first_delay=0.0)
        self._process = RoleProcess(command, environment, self.log, at_once, _unwatched)
        self._ending, self._loop = asyncio.Event(), asyncio.new_event_loop()
        # The CPUs and the network of a process are those of the thread that starts it.
        self._thread = threading.Thread(target=self._supervise, name=self.name, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Of its service process; None: none runs."""
        return self._process.state.pid

    def processes(self) -> dict[str, int]:
        """Pids by kind: service, engine, transfer."""
        return {} if self.pid is None else processes.tree(self.pid)

    def kill(self, kind: str) -> None:
        processes.kill(self.processes()[kind])

    def hang(self, kind: str) -> None:
        """SIGSTOP."""
        processes.kill(self.processes()[kind], signal.SIGSTOP)

    def terminate(self) -> None:
        """SIGTERM: the worker drains."""
        assert self.pid is not None
        processes.kill(self.pid, signal.SIGTERM)

    def set_pool(self, pool: Pool) -> None:
        """Moves the worker to a pool, as `baton flip` does."""

        async def call() -> None:
            address, secret = self.lives[-1]["address"], self.cluster.secret.encode()
            async with connect(address, secret) as channel:
                await set_pool(channel, pool, SET_POOL_S)

        asyncio.run(call())

    def wait_life(self, count: int) -> None:
        """Waits until `count` processes have been ready, and the last one serves."""
        self.cluster.wait_for(
            lambda: len(self.lives) >= count and self.ready, START_S, f"{self.name}, for the {count}th time"
        )

    def wait_first_life(self) -> None:
        """Raises RuntimeError if the first process ends before it is ready."""
        self.cluster.wait_for(lambda: self.lives or self.exits, START_S, f"{self.name} to start")
        if not self.lives:
            raise RuntimeError(f"{self.name}, before it was ready: {self.exits[0]}\n{end_of(self.log)}")

    def metric(self, name: str, **labels: str) -> float:
        """Of the current process, as `harness.workers.metric`."""
        return metric(f"http://{self.lives[-1]['metrics_address']}", name, **labels)

    def end(self) -> None:
        for pid in self.processes().values():
            processes.kill(pid, signal.SIGCONT)  # a stopped process cannot end
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def _supervise(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        if self._host is not None:
            self._host.enter()
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._keep())

    async def _keep(self) -> None:
        following = asyncio.create_task(self._follow())
        await self._ending.wait()
        await self._process.stop(signal.SIGINT, STOP_S)
        await following

    async def _follow(self) -> None:
        before = state = self._process.launch()
        while state.phase != "stopped":
            state = await self._process.changed(state.token)
            if (state.ready, state.restarts) != (before.ready, before.restarts):
                if state.restarts > before.restarts:
                    self.exits.append(state.error)
                if state.ready is not None:
                    self.lives.append(state.ready)
                self.cluster.listed(self, ready=state.ready is not None)
                before = state


async def _unwatched(_: Mapping[str, Any]) -> str:
    """A process that gives no answer stays: the lab stops processes and cuts links. A check by gRPC would
    also wake this event loop for each message of a bench, which has another loop."""
    return await asyncio.get_running_loop().create_future()


class LocalCluster:
    """Use as a context manager:

    entering starts the cluster, leaving ends it. Methods may block, in any thread.
    """

    def __init__(
        self,
        directory: Path,
        *,
        prefill: int = 2,
        decode: int = 2,
        encode: int = 0,
        router: bool = True,
        worker_flags: Sequence[str] = (),
        prefill_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        devices: Sequence[str] = (),
        cpus: Sequence[Collection[int]] = (),
        hosts: Sequence[Host] = (),
        secret: str = "",
    ) -> None:
        """Makes no process yet.

        Args:
            encode: encoders. With some, all workers have --advanced.encoder-pool.
            router: False: the workers alone.
            devices: of the prefill workers, then of the decode workers; empty: what `--device` says.
            cpus: that each may use, in the same order; empty: those of this process.
            hosts: where each runs, in the same order; empty: on this machine's network, as the router.
            secret: of the cluster; empty: a new one.
        """
        self.directory = directory
        self.url = ""
        self.workers: list[Worker] = []
        self._counts = {"encode": encode, "prefill": prefill, "decode": decode}
        pooled = ["--advanced.encoder-pool"] if encode else []
        self._flags = {
            "encode": [*worker_flags],
            "prefill": [*worker_flags, *pooled, *prefill_flags],
            "decode": [*worker_flags, *pooled, *decode_flags],
        }
        self._has_router, self._router_flags = router, tuple(router_flags)
        self._devices, self._cpus, self._hosts = devices, cpus, hosts
        self._routers: list[Worker] = []  # one, or none
        self._file = directory / "workers"
        self._news = threading.Condition()
        self.secret = secret or secrets.token_hex(16)
        self.environment = {**os.environ, "BATON_CLUSTER_SECRET": self.secret}
        self._write()

    def of(self, role: str) -> list[Worker]:
        """All workers of a role, or the router."""
        return [worker for worker in (*self._routers, *self.workers) if worker.role == role]

    def report(self, role: str) -> Mapping[str, Any]:
        """What the first worker of a role, or the router, said when it was ready last: address, pid, …"""
        return self.of(role)[0].lives[-1]

    def drivers(self) -> tuple[Driver, Driver]:
        """Of the first prefill and the first decode worker."""
        prefill, decode = (Driver(self.report(role), self.secret) for role in ("prefill", "decode"))
        return prefill, decode

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as unless_it_is_up:
            unless_it_is_up.push(self)
            named = [(role, i) for role, count in self._counts.items() for i in range(count)]
            device_flags = [("--device", device) for device in self._devices] or [()] * len(named)
            cpus = self._cpus or [()] * len(named)
            hosts = self._hosts or [None] * len(named)
            for (role, i), device, allowed, host in zip(named, device_flags, cpus, hosts, strict=True):
                self.workers.append(Worker(self, role, i, (*self._flags[role], *device), allowed, host))
            if self._has_router:
                port = str(free_port())  # the same for all of its lives
                # With a model name the router can start while all workers are down.
                flags = ("--model", EMBEDDED_NAME, "--port", port, "--workers-file", str(self._file))
                router = Worker(self, "router", 0, (*flags, *self._router_flags))
                self._routers.append(router)
                router.wait_first_life()
                self.url = router.lives[0]["url"]
            for worker in self.workers:
                worker.wait_first_life()
            if self._has_router:
                self.wait_serving(len(self.workers))
            unless_it_is_up.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        ends = [threading.Thread(target=worker.end) for worker in (*self._routers, *self.workers)]
        for end in ends:
            end.start()
        for end in ends:
            end.join()

    # ------------------------------------------------------------ what the router sees

    def _states(self) -> dict[str, str]:
        """State by address of the router's workers. Empty while the router is away."""
        try:
            return {worker["address"]: worker["state"] for worker in status(self.url)["workers"]}
        except (OSError, http.client.HTTPException):
            return {}

    def wait_serving(self, workers: int) -> None:
        """Waits until the router has attached to that many workers."""

        def attached() -> bool:
            return list(self._states().values()).count("ready") >= workers

        self.wait_for(attached, START_S, f"{workers} workers at the router")

    def wait_attached(self, worker: Worker) -> None:
        """Waits until the router has attached to the current process of a worker."""

        def attached() -> bool:
            return worker.ready and self._states().get(worker.lives[-1]["address"]) == "ready"

        self.wait_for(attached, START_S, f"{worker.name} at the router")

    # ------------------------------------------------------------ for workers

    def listed(self, worker: Worker, *, ready: bool) -> None:
        """A worker became ready, or ended: tells the router and wakes waiting threads."""
        with self._news:
            worker.ready = ready
            self._write()
            self._news.notify_all()

    def wait_for(self, condition: Any, within: float, event: str) -> None:
        deadline = time.monotonic() + within
        with self._news:
            while not condition():
                assert time.monotonic() < deadline, f"waited {within:g} s for {event}"
                self._news.wait(0.1)  # some conditions change without a notification

    def _write(self) -> None:
        write_atomically(self._file, "".join(f"{w.lives[-1]['address']}\n" for w in self.workers if w.ready))


@contextlib.contextmanager
def served(
    run: Run,
    *flags: str,
    shape: str = "",
    model: str = "",
    on_cpu: Sequence[str] = ("--dtype", "float32"),
    on_gpus: Sequence[str] = (),
    name: str = "",
    prefill: int = 1,
    decode: int = 1,
    router: bool = True,
    router_flags: Sequence[str] = (),
    devices: Sequence[str] = (),
    **more: Any,
) -> Iterator[LocalCluster]:
    """The cluster that a bench measures, on its `--device`. On GPUs the workers take these in turn.

    On a CPU each worker has one thread: otherwise engines would compete for the cores of a small machine.

    Args:
        flags: of all workers. `on_cpu`, `on_gpus`: further ones there.
        shape: served with random weights; without it `model`, or the embedded model.
        name: of the directory with logs, if the run has several clusters.
        devices: of the workers, in place of those GPUs. With `--device=…` in `prefill_flags` there are none.
        more: as for `LocalCluster`.
    """
    directory = run.logs / name
    directory.mkdir(exist_ok=True)
    if shape:
        model = str(write_shape(shape, run.directory, tokenizer=router))
        flags = ("--load-format", "dummy", *flags)
    named = ("--model", model) if model else ()
    if run.on_gpus:
        gpus = gpus_or_exit(1, "this bench")
        devices = devices or [f"cuda:{number % gpus}" for number in range(prefill + decode)]
        flags = (*flags, *on_gpus)
    else:
        flags = ("--device", "cpu", "--advanced.num-threads", "1", *flags, *on_cpu)
    with LocalCluster(
        directory, prefill=prefill, decode=decode, router=router, worker_flags=[*named, *flags],
        router_flags=[*named, *router_flags], devices=devices if run.on_gpus else (), **more,
    ) as cluster:  # fmt: skip
        yield cluster


MODEL = Option("--model", f"(default: the embedded model on a CPU, {DENSE} with random weights on a GPU)")


def two_workers(run: Run, *flags: str) -> AbstractContextManager[LocalCluster]:
    """A prefill and a decode worker without a router, for the bench's `MODEL`. Each has a GPU, or both have
    half of the only one."""
    share = ("--gpu-memory-utilization", "0.45") if len(visible_gpus()) == 1 else ()
    model, shape = run.args.model or "", "" if run.args.model or not run.on_gpus else DENSE
    on_gpus = ("--load-format", "dummy", *share)
    return served(run, *flags, model=model, shape=shape, on_gpus=on_gpus, router=False)


def status(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/status", timeout=60) as page:
        return json.load(page)


def leaks(url: str) -> dict[str, int]:
    """What the pools of all workers miss. Empty if every pool is whole."""
    counts: dict[str, int] = {}
    for worker in status(url)["workers"]:
        status_of, name = worker["status"], f"{worker['role']} {worker['index']}"
        counts |= {f"{name}: {field}": status_of[field] for field in _MUST_BE_ZERO}
        for pool in ("blocks", "arena_slots"):
            counts[f"{name}: {pool} missing"] = status_of[f"{pool}_total"] - status_of[f"{pool}_free"]
    return {name: count for name, count in counts.items() if count}


def leaks_when_idle(url: str, within: float = WHOLE_S) -> dict[str, int]:
    """As `leaks`, but waits up to `within` seconds, since releases follow the last token."""
    deadline = time.monotonic() + within
    while (counts := leaks(url)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return counts
