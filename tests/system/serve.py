"""One `baton serve`, as a user's shell would have it."""

import json
import signal
import subprocess
import urllib.request
from collections import defaultdict
from typing import Any

import psutil

from baton.bench.lab.harness.cluster import free_port, leaks_when_idle
from baton.cluster.tools.status import name_of
from baton.processes.tree import alive
from baton.rpc.pools import pool_of
from tests.forked import FreshPopen
from tests.within import WITHIN

from .machine import BATON, Machine, command_lines, listening, listening_sockets, titled, tree, until

START_S = 300.0


class Serve:
    """On its way up until `until_ready` returns. `in_background`: as a shell starts it with `&`. `fresh`: its
    processes are no forks (`tests.forked`).
    """

    def __init__(
        self, machine: Machine, *flags: str, in_background: bool = False, fresh: bool = False
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = machine.outputs / f"{self.port}.log"
        self.machine = machine
        before = signal.getsignal(signal.SIGINT)
        with self.log.open("wb") as out:
            if in_background:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            try:
                self.process = (FreshPopen if fresh else subprocess.Popen)(
                    [*BATON, "serve", "--port", str(self.port), "--dtype", "float32", *flags],
                    env=machine.environment,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            finally:
                signal.signal(signal.SIGINT, before)

    def output(self) -> str:
        return self.log.read_text()

    def until_ready(self) -> None:
        def ready() -> bool | None:
            assert self.process.poll() is None, self.output()
            return True if "Ready in" in self.output() and "Stop:" in self.output() else None

        until(ready, START_S, "ready")

    def role(self, name: str) -> psutil.Process | None:
        """The service process of a role, or "decode 0 engine"."""
        return titled(self.process.pid, f"baton {self.port}: {name}")

    def processes(self) -> dict[str, set[int]]:
        """Pids by title: "decode 0 engine". Requests start children, such as "router 0 bodies"."""
        found = defaultdict(set, {"serve": {self.process.pid}})
        for process, line in command_lines(self.process.pid).items():
            title = line.partition("\0")[0].strip()
            if title != "baton tests: fork server":
                found[title.removeprefix(f"baton {self.port}: ")].add(process.pid)
        return dict(found)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=WITHIN) as response:
            return json.load(response)

    def incarnations(self) -> dict[str, str]:
        """Of the workers that serve, by name."""
        workers = self.get("/status")["workers"]
        return {f"{w['role']} {w['index']}": w["incarnation"] for w in workers if w["state"] == "ready"}

    def pool_of(self, name: str) -> str:
        """In which pool the router has a worker."""
        return next(pool_of(each) for each in self.get("/status")["workers"] if name_of(each) == name)

    def assert_whole(self) -> None:
        """All pools are whole, soon after the last answer: releases are asynchronous."""
        assert leaks_when_idle(self.url) == {}

    def stop(self, signum: int) -> None:
        """Sends the signal, and asserts a clean end: exit code, processes, ports."""
        processes = tree(self.process.pid)
        ports, sockets = listening(processes), listening_sockets(processes)
        assert len(processes) >= 7, "two workers of three processes, and a router"
        assert self.port in ports
        assert len(sockets) >= len(ports)
        self.process.send_signal(signum)
        assert self.process.wait(WITHIN) == 0, self.output()
        assert not any(map(alive, processes)), "no process outlives serve, not even for a moment"
        assert not sockets & listening_sockets()
        assert self.output().splitlines()[-2:] == ["Stopping …", "Stopped."], "nothing had to be killed"

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
