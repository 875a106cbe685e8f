"""Deployments that a bench compares: the processes of each, started by the commands of a user."""

import contextlib
import json
import os
import shlex
import sys
import threading
import time
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from baton.bench.lab.driver import Option
from baton.bench.lab.harness.processes import Server
from baton.system.addresses import free_port

START_S = 900.0
STATUS_S = 2.0
"""Seconds between two looks at the status of a server."""
ANSWER_S = 10.0
SERVE = f"{sys.executable} -m baton.cluster.cli serve --port {{port}} "


class Side(NamedTuple):
    """One deployment: its name, and the command line that runs `count` times, each with `gpus`."""

    name: str
    count: int
    command: str
    gpus: int | None = None
    """None: a single process sees all GPUs, and each of several has one."""

    @classmethod
    def parse(cls, text: str) -> Self:
        name, count, command = text.split(maxsplit=2)
        count, _, gpus = count.partition("x")
        return cls(name, int(count), command, int(gpus) if gpus else None)

    def gpus_of(self, number: int, first: int) -> str | None:
        """CUDA_VISIBLE_DEVICES of a process, if the side has the GPUs from `first` on, of those that this
        process sees. None: all."""
        if self.gpus is None and self.count == 1:
            return None
        each = self.gpus or 1
        numbers = range(first + number * each, first + (number + 1) * each)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = None if visible is None else visible.split(",")
        return ",".join(str(number) if names is None else names[number] for number in numbers)


SIDE = Option("--side", "twice, or never", type=Side.parse, action="append", metavar="'NAME COUNT COMMAND'")


def two_sides(args: Namespace, *usual: Side) -> list[Side]:
    """Those of the user, or the usual ones. Raises ValueError if they are not two."""
    sides = args.side or [*usual]
    if len({side.name for side in sides}) != 2 or len(sides) != 2:
        raise ValueError("--side: give it twice, with two names")
    return sides


def in_order(sides: Sequence[Side], seed: int) -> Sequence[Side]:
    """The side that begins changes with each seed."""
    return sides if seed % 2 == 0 else sides[::-1]


@contextlib.contextmanager
def started(
    side: Side, model: Path, first_gpu: int = 0, log: Path | None = None
) -> Iterator[dict[str, Server]]:
    """Starts the processes of a side, and yields them by URL when each has answered. They print to `log`."""
    servers: dict[str, Server] = {}
    body = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
    with contextlib.ExitStack() as until_the_end:
        for number in range(side.count):
            port = str(free_port())
            gpus = side.gpus_of(number, first_gpu)
            words = shlex.split(side.command)
            words = [word.replace("{port}", port).replace("{model}", str(model)) for word in words]
            server = servers[f"http://127.0.0.1:{port}"] = Server(
                side.name, words, log, {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
            )
            until_the_end.callback(server.stop)
        deadline = time.monotonic() + START_S
        for url, server in servers.items():
            server.until_answers(f"{url}/v1/completions", deadline, body)
        yield servers


@contextlib.contextmanager
def watched(urls: Sequence[str], lines: Path) -> Iterator[None]:
    """Writes what routers of Baton say of themselves and of their workers to a file, as JSON lines: at the
    beginning, every `STATUS_S`, and at the end. It tells where prompts went, and what steps cost. A server
    without `/status` is not asked again."""
    told, ended, begun = list(urls), threading.Event(), time.monotonic()

    def look() -> None:
        for url in told[:]:
            try:
                with urllib.request.urlopen(f"{url}/status", timeout=ANSWER_S) as answer:
                    status = json.load(answer)
            except (OSError, ValueError):
                told.remove(url)
                continue
            file.write(json.dumps({"seconds": time.monotonic() - begun, "url": url, **status}) + "\n")

    def watch() -> None:
        while told and not ended.wait(STATUS_S):
            look()

    with lines.open("w") as file:
        look()
        thread = threading.Thread(target=watch, name="status", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            look()
