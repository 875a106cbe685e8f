"""What is measured: clusters of Baton, which this bench starts, and endpoints that run already."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from baton.bench.chaos.cluster import LocalCluster
from baton.bench.shapes import DENSE, write_shape

COLOCATED = "colocated"
SPLIT = "split"
LAYOUTS = ("1p1d", "2p2d", "3p1d", "1p3d")
ON_CPU = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1")
ON_CUDA = ("--load-format", "dummy", "--max-model-len", "33000")
_AGAINST = re.compile(r"(?P<name>[\w.-]+)=(?P<urls>https?://\S+)\s+(?P<flags>\S.*)")


@dataclass(frozen=True)
class Side:
    """One deployment.

    Attributes:
        flags: the command line by process.
        serve: starts it, and gives the value of `--url`. Leaving the context ends it.
    """

    name: str
    flags: Mapping[str, str]
    serve: Callable[[], AbstractContextManager[str]]


def against(text: str) -> Side:
    """Reads `NAME=URL[,URL] FLAGS`. Raises ValueError."""
    match = _AGAINST.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"--against {text!r}: write 'NAME=URL[,URL] FLAGS'. The report states FLAGS: how it was started."
        )
    urls = match["urls"]
    return Side(match["name"], {urls: match["flags"]}, lambda: nullcontext(urls))


def pools(layout: str) -> tuple[int, int]:
    """Prefill and decode workers of a layout such as 1p1d."""
    prefill, decode = layout.rstrip("d").split("p")
    return int(prefill), int(decode)


def baton(
    layout: str, device: str, worker_flags: str, directory: Path, *, shape: str = DENSE, ranks: int = 1
) -> tuple[Side, Side, Side]:
    """Baton colocated, with the layout as a fixed split, and with the layout, on as many devices.

    Workers get `worker_flags` besides.

    `shape`: of the model on GPUs. `ranks`: of each worker.
    """
    prefill, decode = pools(layout)
    count = prefill + decode
    if device == "cpu":
        worker, router, devices = [*ON_CPU], [], []
    else:
        model = str(write_shape(shape, directory, tokenizer=True))
        worker, router = ["--model", model, *ON_CUDA], ["--model", model]
        devices = [f"cuda:{i * ranks}" for i in range(count)]
    worker += ["--tensor-parallel-size", str(ranks), *shlex.split(worker_flags)]

    def side(name: str, prefill: int, decode: int, router: Sequence[str]) -> Side:
        @contextmanager
        def serve() -> Iterator[str]:
            logs = directory / name
            logs.mkdir(exist_ok=True)
            with LocalCluster(
                logs,
                prefill=prefill,
                decode=decode,
                worker_flags=worker,
                router_flags=router,
                devices=devices,
            ) as cluster:
                yield cluster.url

        return Side(name, _flags(prefill, decode, worker, router), serve)

    return (
        side(COLOCATED, 0, count, router),
        side(SPLIT, prefill, decode, [*router, "--no-overflow"]),
        side(layout, prefill, decode, router),
    )


def _flags(prefill: int, decode: int, worker: Sequence[str], router: Sequence[str]) -> dict[str, str]:
    roles = {"prefill": (prefill, worker), "decode": (decode, worker), "router": (1, router)}
    return {f"{count} × baton {role}": shlex.join(flags) for role, (count, flags) in roles.items() if count}
