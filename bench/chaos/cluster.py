"""A cluster of `baton` processes without Ray: every worker, and the router, is started again when it ends.

The command lines are those that a user would type; the workers file is rewritten as by any supervisor. There
is no backoff: what is killed a hundred times comes back a hundred times.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from bench import roles
from bench.chaos import processes
from cluster.model import EMBEDDED_NAME

START_S = 180.0
STOP_S = 30.0
WHOLE_S = 15.0
_MUST_BE_ZERO = (
    "requests_running", "requests_waiting", "tokens_waiting", "held_prefills", "reservations",
    "transfers_open",
)  # fmt: skip


class Worker:
    """One place in the cluster, a worker's or the router's: its present process, and those before.

    Attributes:
        lives: what each incarnation reported when it was ready.
        exits: the exit code of each that ended.
    """

    def __init__(self, cluster: LocalCluster, role: str, index: int, flags: Sequence[str]) -> None:
        self.role, self.index = role, index
        self.name = f"{role} {index}"
        self.log = cluster.directory / f"{role}-{index}.log"
        self.lives: list[dict[str, Any]] = []
        self.exits: list[int] = []
        self.ready = False
        self._cluster = cluster
        self._flags = flags
        self._may_start = threading.Event()
        self._may_start.set()
        self._popen: subprocess.Popen[bytes] | None = None
        self._stopping = False
        # The process dies with the thread that started it: one thread for all of its lives.
        self._thread = threading.Thread(target=self._supervise, name=self.name, daemon=True)
        self._thread.start()

    def processes(self) -> dict[str, int]:
        """Pids by kind: service, engine, transfer."""
        return processes.tree(self._popen.pid) if self._popen is not None else {}

    def kill(self, kind: str) -> None:
        processes.kill(self.processes()[kind])

    def hang(self, kind: str) -> None:
        """SIGSTOP."""
        processes.stop(self.processes()[kind])

    def terminate(self) -> None:
        """SIGTERM: it drains."""
        assert self._popen is not None
        self._popen.send_signal(signal.SIGTERM)

    def hold(self) -> None:
        """Once it has ended it is not started again before `release`."""
        self._may_start.clear()

    def release(self) -> None:
        self._may_start.set()

    def wait_life(self, count: int, within: float = START_S) -> None:
        """Until `count` incarnations came up and the last of them serves."""
        self._cluster.wait_for(
            lambda: len(self.lives) >= count and self.ready, within, f"{self.name}, for the {count}th time"
        )

    def wait_exit(self, count: int, within: float = STOP_S) -> int:
        """Until `count` of its processes have ended; the exit code of that one."""
        self._cluster.wait_for(lambda: len(self.exits) >= count, within, f"the end of {self.name}")
        return self.exits[count - 1]

    def metric(self, name: str) -> float:
        """The sum over all labels of one series that the present incarnation exports."""
        with urllib.request.urlopen(
            f"http://{self.lives[-1]['metrics_address']}/metrics", timeout=10
        ) as page:
            lines = page.read().decode().splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith((name + "{", name + " ")))

    def end(self) -> None:
        self._stopping = True
        self._may_start.set()
        if self._popen is not None and self._popen.poll() is None:
            for pid in self.processes().values():
                os.kill(pid, signal.SIGCONT)  # who hangs cannot stop
            self._popen.send_signal(signal.SIGINT)
            try:
                self._popen.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._popen.kill()
        self._thread.join()

    def _supervise(self) -> None:
        while self._may_start.wait() and not self._stopping:
            self._live()

    def _live(self) -> None:
        popen, pipe = self._cluster.spawn(self.role, "--index", str(self.index), *self._flags, log=self.log)
        self._popen = popen
        with pipe:
            for line in pipe:
                message = json.loads(line)
                if "ready" in message:
                    self.lives.append(message["ready"])
                    self._cluster.listed(self, ready=True)
        code = popen.wait()
        self.exits.append(code)
        self._cluster.listed(self, ready=False)


class LocalCluster:
    """Use as a context manager: up when entered, gone when left. All methods may block; from any thread."""

    def __init__(
        self,
        directory: Path,
        *,
        prefill: int = 2,
        decode: int = 2,
        worker_flags: Sequence[str] = (),
        decode_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        key: str = "",
    ) -> None:
        """`key`: of the API, where the flags of the router make it ask for one."""
        self.directory = directory
        self._key = key
        self.url = ""
        self.workers: list[Worker] = []
        self._counts = {"prefill": prefill, "decode": decode}
        self._flags = {"prefill": [*worker_flags], "decode": [*worker_flags, *decode_flags]}
        self._router_flags = router_flags
        self._router: Worker | None = None
        self._file = directory / "workers"
        self._news = threading.Condition()
        self.secret = secrets.token_hex(16)
        self._environment = {**os.environ, "BATON_CLUSTER_SECRET": self.secret}
        self._write()

    def of(self, role: str) -> list[Worker]:
        """Of all of a role, which may be `router`."""
        if role == "router" and self._router is not None:
            return [self._router]
        return [worker for worker in self.workers if worker.role == role]

    def __enter__(self) -> LocalCluster:
        with contextlib.ExitStack() as unless_it_is_up:
            unless_it_is_up.callback(self.close)
            for role, count in self._counts.items():
                self.workers += [Worker(self, role, i, self._flags[role]) for i in range(count)]
            port = str(free_port())  # the same for all of its lives
            # Named, so that a router can start while all workers are down.
            flags = ("--model", EMBEDDED_NAME, "--port", port, "--workers-file", str(self._file))
            self._router = Worker(self, "router", 0, (*flags, *self._router_flags))
            self._router.wait_life(1)
            self.url = self._router.lives[0]["url"]
            for worker in self.workers:
                worker.wait_life(1)
            self.wait_serving(len(self.workers))
            unless_it_is_up.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        routers = [self._router] if self._router is not None else []
        ends = [threading.Thread(target=worker.end) for worker in (*routers, *self.workers)]
        for end in ends:
            end.start()
        for end in ends:
            end.join()

    # ------------------------------------------------------------ what the router sees

    def status(self) -> dict[str, Any]:
        return status(self.url, self._key)

    def _states(self) -> dict[str, str]:
        """State by address of the workers that the router has; none while the router is away."""
        try:
            return {worker["address"]: worker["state"] for worker in self.status()["workers"]}
        except (OSError, http.client.HTTPException):
            return {}

    def wait_serving(self, workers: int, within: float = START_S) -> None:
        """Until the router has attached to so many workers."""

        def attached() -> bool:
            return list(self._states().values()).count("ready") >= workers

        self.wait_for(attached, within, f"{workers} workers at the router")

    def wait_attached(self, worker: Worker, within: float = START_S) -> None:
        """Until the router has this worker's present incarnation."""

        def attached() -> bool:
            return worker.ready and self._states().get(worker.lives[-1]["address"]) == "ready"

        self.wait_for(attached, within, f"{worker.name} at the router")

    def router_metric(self, name: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith((name + "{", name + " ")))

    # ------------------------------------------------------------ for workers

    def spawn(self, role: str, *flags: str, log: Path) -> tuple[subprocess.Popen[bytes], TextIO]:
        with log.open("ab") as output:
            return roles.spawn(role, *flags, environment=self._environment, output=output)

    def listed(self, worker: Worker, *, ready: bool) -> None:
        """It came or went: routers are told, and who waits looks again."""
        with self._news:
            worker.ready = ready
            self._write()
            self._news.notify_all()

    def wait_for(self, condition: Any, within: float, what: str) -> None:
        deadline = time.monotonic() + within
        with self._news:
            while not condition():
                assert time.monotonic() < deadline, f"waited {within:g} s for {what}"
                self._news.wait(0.1)  # not all that is waited for is told

    def _write(self) -> None:
        draft = self._file.with_suffix(".new")
        draft.write_text("".join(f"{w.lives[-1]['address']}\n" for w in self.workers if w.ready))
        draft.replace(self._file)


def status(url: str, key: str = "") -> dict[str, Any]:
    """Of a router. `key`: of its API."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(url + "/status", headers=headers), timeout=30) as page:
        return json.load(page)


def leaks(url: str, key: str = "") -> dict[str, int]:
    """What is not whole in the pools of any worker of a router; empty when all is well."""
    found: dict[str, int] = {}
    for worker in status(url, key)["workers"]:
        told, name = worker["status"], f"{worker['role']} {worker['index']}"
        found |= {f"{name}: {field}": told[field] for field in _MUST_BE_ZERO}
        for pool in ("blocks", "arena_slots"):
            found[f"{name}: {pool} missing"] = told[f"{pool}_total"] - told[f"{pool}_free"]
    return {name: count for name, count in found.items() if count}


def leaks_when_idle(url: str, key: str = "", within: float = WHOLE_S) -> dict[str, int]:
    """As `leaks`, once nothing changes any more: releases follow the last token."""
    deadline = time.monotonic() + within
    while (found := leaks(url, key)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def free_port() -> int:
    """A port of 127.0.0.1 that nothing uses. Linux gives ports below 32768 to no outgoing connection, so a
    process may listen on this port later, and again after a restart."""
    while True:
        port = random.randrange(10_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
