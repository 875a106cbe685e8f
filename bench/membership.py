"""How soon does a router know that a worker is there, or gone? `python -m bench.membership`

`baton serve` with a model of a few kilobytes, so that a worker starts as fast as Python does. In turn the
decode workers' service processes are killed, or their engines stopped (SIGSTOP: they hang); all of them at
once, so that it does not take all day. Three intervals, each between a moment in one process and a line in
the router's log (`bench.discovery` is about the router's share of it):

- `new`: the worker says that it is ready → the router has attached to it and sends it work;
- `crashed`: SIGKILL → the router sends it nothing more;
- `hung`: SIGSTOP → the same, less `--engine-timeout`, which is how long an engine may be silent.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from bench.chaos import processes
from bench.contract import Report, Row, parser, percentile
from bench.serving import Serving

WORKERS = 2
ENGINE_TIMEOUT = 5.0
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
    """The lines of one log file, as (Unix time, text)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[tuple[float, str]]:
        found = (_LINE.match(line) for line in self._path.read_text(errors="replace").splitlines())
        return [(datetime.fromisoformat(m[1].replace(",", ".")).timestamp(), m[2]) for m in found if m]

    def first(self, after: float, *words: str) -> float:
        """When the first line from then on says all these words. Waits for it."""
        deadline = time.monotonic() + BACK_S
        while True:
            for at, text in self.lines():
                if at >= after - 0.001 and all(word in text for word in words):  # milliseconds are cut off
                    return at
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._path.name} never said {words}")
            time.sleep(0.02)


def one(serving: Serving, role: dict[str, Any], hang: bool) -> tuple[float, float]:
    """Takes a worker down, and waits until its successor serves. Seconds: (until lost, until new known)."""
    index, address = role["index"], role["address"]
    name = f"decode {index}"
    router, worker = Log(serving.logs / "router-0.log"), Log(serving.logs / f"decode-{index}.log")
    victim = processes.tree(role["pid"])["engine" if hang else "service"]
    hit = time.time()
    os.kill(victim, signal.SIGSTOP if hang else signal.SIGKILL)
    lost = router.first(hit, "WARNING", f"{name} at {address}")
    ready = worker.first(hit, "ready at")
    known = router.first(ready, f"{name} at", "is ready")
    return lost - hit, known - ready


def main(argv: Sequence[str] | None = None) -> Report:
    p = parser(__doc__ or "")
    p.add_argument("--rounds", type=int, default=26, help=f"how often it happens to all {WORKERS}")
    args = p.parse_args(argv)
    if args.device == "cuda":
        print("bench.membership: measures processes, not devices: on the CPU only", file=sys.stderr)
        raise SystemExit(2)
    rounds = 2 if args.short else args.rounds
    report = Report(
        "membership", {"rounds": rounds, "workers": WORKERS, "engine_timeout": ENGINE_TIMEOUT}, args.json
    )
    crashed: list[float] = []
    hung: list[float] = []
    new: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        flags: tuple[Any, ...] = (
            "--model", tiny_model(directory), "--load-format", "dummy", "--dtype", "float32",
            "--num-threads", 1, "--num-blocks", 64, "--kv-slots", 8, "--decode", WORKERS,
            "--engine-timeout", ENGINE_TIMEOUT,
        )  # fmt: skip
        with Serving(directory, *map(str, flags)) as serving:
            for _ in range(rounds):
                for hang, found in ((False, crashed), (True, hung)):
                    roles = [r for r in serving.status()["cluster"]["roles"] if r["role"] == "decode"]
                    with ThreadPoolExecutor(WORKERS) as threads:
                        pairs = list(threads.map(one, [serving] * WORKERS, roles, [hang] * WORKERS))
                    found += [lost - ENGINE_TIMEOUT if hang else lost for lost, _ in pairs]
                    new += [known for _, known in pairs]
    for what, times, bound in (("new", new, 1.0), ("crashed", crashed, 2.0), ("hung", hung, 2.0)):
        p99 = percentile(times, 0.99)
        report.add(Row(f"membership.{what}.p50", percentile(times, 0.5), "s", p99=p99))
        report.add(Row(f"membership.{what}.p99", p99, "s", goal=bound, better="lower"))
    report.detail = {"new": new, "crashed": crashed, "hung": hung}
    report.finish()
    return report


if __name__ == "__main__":
    main()
