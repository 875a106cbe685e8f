"""How soon does a router know that a worker is there, or gone? `python -m bench.membership`

`baton serve` with a model of a few kilobytes, so that a worker starts as fast as Python does. Each worker by
itself, out of step with the others: it serves for half a minute, as long as its supervisor wants to see
before it starts the next one at once; then its service process is killed, or its engine stopped (SIGSTOP: it
hangs), in turns; then its successor is waited for. Three intervals, each between a moment in one process and
a line in the router's log (`bench.discovery` is about the router's share of it):

- `new`: the worker says that it is ready → the router has attached to it and sends it work;
- `crashed`: SIGKILL → the router sends it nothing more;
- `hung`: SIGSTOP → the same, less `--engine-timeout`, which is how long an engine may be silent.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from bench.chaos import processes
from bench.contract import Report, Row, parser, percentile
from bench.serving import Serving

ENGINE_TIMEOUT = 5.0
STEADY_S = 31.0
"""That a worker serves before it is hit: after less the next one would be started with a delay."""
APART_S = 5.0
BACK_S = 180.0
_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (.*)$")
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": 1,
    "torch_dtype": "float32",
}  # fmt: skip


def tiny_model(directory: Path) -> Path:
    """A model directory for `--load-format dummy`, with a tokenizer of 64 characters."""
    where = directory / "tiny"
    where.mkdir()
    (where / "config.json").write_text(json.dumps(_CONFIG))
    tokenizer = Tokenizer(models.BPE({chr(ord("A") + i): i for i in range(_CONFIG["vocab_size"])}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(where / "tokenizer.json"))
    return where


class Log:
    """A log file that grows, for any number of threads. Its lines have their times, so nobody need hurry."""

    def __init__(self, path: Path) -> None:
        self._file = path.open(errors="replace")
        self._lines: list[tuple[float, str]] = []  # (Unix time, text)
        self._unfinished = ""
        self._lock = threading.Lock()

    def _read(self) -> None:
        *lines, self._unfinished = (self._unfinished + self._file.read()).split("\n")
        for match in filter(None, map(_LINE.match, lines)):
            self._lines.append((datetime.fromisoformat(match[1].replace(",", ".")).timestamp(), match[2]))

    def first(self, after: float, *words: str) -> float:
        """When the first line from then on says all these words. Waits for it."""
        deadline = time.monotonic() + BACK_S
        while True:
            with self._lock:
                self._read()
                for at, text in self._lines:
                    if at >= after - 0.001 and all(word in text for word in words):  # a part of a millisecond
                        return at
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._file.name} never said {words}")
            time.sleep(0.2)


@dataclass
class Times:
    """Seconds, of any worker."""

    crashed: list[float] = field(default_factory=list)
    hung: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)


def follow(serving: Serving, router: Log, role: str, index: int, rounds: int, steady: float) -> Times:
    """Takes one worker down again and again, each time after it has served for `steady` seconds."""
    worker, name, found = Log(serving.logs / f"{role}-{index}.log"), f"{role} {index}", Times()
    time.sleep(APART_S * index)
    for _ in range(rounds):
        for kind, process, signum in (
            ("crashed", "service", signal.SIGKILL), ("hung", "engine", signal.SIGSTOP)
        ):  # fmt: skip
            time.sleep(steady)
            [it] = [
                r for r in serving.status()["cluster"]["roles"] if (r["role"], r["index"]) == (role, index)
            ]
            victim = processes.tree(it["pid"])[process]
            hit = time.time()
            os.kill(victim, signum)
            lost = router.first(hit, "WARNING", f"{name} at {it['address']}")
            ready = worker.first(hit, "ready at")
            found.new.append(router.first(ready, f"{name} at", "is ready") - ready)
            getattr(found, kind).append(lost - hit)
    return found


def main(argv: Sequence[str] | None = None) -> Report:
    p = parser(__doc__ or "", devices=("cpu",))
    p.add_argument("--workers", type=int, default=5, help="of each role (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=5, help="kills and stops of each (default: %(default)s)")
    args = p.parse_args(argv)
    if args.short:
        args.workers, args.rounds = 1, 1
    steady = 1.0 if args.short else STEADY_S
    parameters = {"rounds": args.rounds, "workers": 2 * args.workers, "engine_timeout": ENGINE_TIMEOUT}
    report = Report("membership", parameters, args.json)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        flags: tuple[Any, ...] = (
            "--model", tiny_model(directory), "--load-format", "dummy", "--dtype", "float32",
            "--num-threads", 1, "--num-blocks", 64, "--kv-slots", 8,
            "--prefill", args.workers, "--decode", args.workers, "--engine-timeout", ENGINE_TIMEOUT,
        )  # fmt: skip
        with Serving(directory, *map(str, flags)) as serving, ThreadPoolExecutor(2 * args.workers) as threads:
            router = Log(serving.logs / "router-0.log")
            workers = [(role, index) for role in ("prefill", "decode") for index in range(args.workers)]
            each = [
                threads.submit(follow, serving, router, role, index, args.rounds, steady)
                for role, index in workers
            ]
            found = [one.result() for one in each]
    times: dict[str, list[float]] = {
        "new": [seconds for one in found for seconds in one.new],
        "crashed": [seconds for one in found for seconds in one.crashed],
        "hung": [seconds - ENGINE_TIMEOUT for one in found for seconds in one.hung],
    }
    for (what, seconds), bound in zip(times.items(), (1.0, 2.0, 2.0), strict=True):
        p99 = percentile(seconds, 0.99)
        report.add(Row(f"membership.{what}.p50", percentile(seconds, 0.5), "s", p99=p99))
        report.add(Row(f"membership.{what}.p99", p99, "s", goal=bound, better="lower"))
        report.add(Row(f"membership.{what}.times", len(seconds), "times"))
    report.detail = dict(times)
    report.finish()
    return report


if __name__ == "__main__":
    main()
