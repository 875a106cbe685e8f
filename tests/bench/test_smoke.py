"""Every bench runs to its report, at the smallest sizes. The figures mean nothing here.

A stand-in takes the place of `baton serve` and of a load by `baton bench`. `make test-long` runs these
benches with `--short` and with real clusters.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.main

from bench import contract, disagg, discovery, ends, idle, kv, membership, multi_turn, peers, router
from bench.kv_pair import Pair
from bench.raw_sockets import MIB
from bench.roles import Roles
from bench.shapes import SHAPES, write_shape

ROOT = Path(__file__).parents[2]
TINY = "one-small-layer"
ON_GPU = ("disagg", "engine", "kernels", "kv", "overlap")
ON_CPU = (
    "autoscale", "chaos", "discovery", "idle", "membership", "multi_turn", "peers", "router", "routing_sim",
)  # fmt: skip
ELSEWHERE = {
    "load": "tests/bench/test_cli.py",
    "kernels": "tests/bench/test_kernels.py",
    "chaos": "tests/system/test_chaos.py",
}
DRIVERS = {"kv_peer_driver"}  # run in an environment of another engine
RESULTS = {
    "ttft.p50": 2.0, "ttft.p99": 3.0, "ttit.p50": 1.0, "ttit.p99": 1.5, "requests.ok": 4.0,
    "requests.failed": 0.0, "throughput.output_tokens": 9.0,
}  # fmt: skip


def benches() -> set[str]:
    commands = [path.parent for path in ROOT.glob("bench/*/__main__.py")]
    commands += [path for path in ROOT.glob("bench/*.py") if '__name__ == "__main__"' in path.read_text()]
    return {path.stem for path in commands} - DRIVERS


def main_of(name: str) -> Callable[..., Any]:
    found = f"bench.{name}.__main__" if (ROOT / "bench" / name).is_dir() else f"bench.{name}"
    return import_module(found).main


def test_every_bench_has_a_run() -> None:
    smoked = {name.removeprefix("test_runs_") for name in globals() if name.startswith("test_runs_")}
    assert smoked | ELSEWHERE.keys() == benches()
    assert {*ON_GPU, *ON_CPU, "load"} == benches()


@pytest.mark.parametrize("name", [*ON_GPU, *ON_CPU])
def test_without_a_gpu_it_refuses_to_measure_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contract, "gpus", list)
    monkeypatch.setattr(sys, "argv", [name, "--device", "cuda"])
    with pytest.raises(SystemExit) as ended:
        main_of(name)()
    assert ended.value.code == contract.EXIT_CANNOT_MEASURE
    wrong = "needs a GPU" if name in ON_GPU else "measures on cpu only"
    assert wrong in capsys.readouterr().err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a bench as `python -m bench.NAME FLAGS` does. Returns value by row of its JSON report."""

    def run(name: str, *flags: str) -> dict[str, Any]:
        out = tmp_path / "report.json"
        monkeypatch.setattr(sys, "argv", [name, "--json", str(out), *flags])
        ended = main_of(name)()
        assert ended == 0 or isinstance(ended, contract.Report)
        report = json.loads(out.read_text())
        assert report["bench"] == name
        return {row["name"]: row["value"] for row in report["results"]}

    return run


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one small layer, with a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    where = write_shape(TINY, tmp_path_factory.mktemp("model"), tokenizer=True)
    shape = SHAPES[TINY] | {"max_position_embeddings": 8192}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(where)
    return where


# ---------------------------------------------------------------- stand-ins


def check_flags(command: str, *flags: str) -> None:
    """Raises an error for flags that `baton COMMAND` does not take."""
    from cluster.cli import app

    found: Any = typer.main.get_command(app)
    found.commands[command].make_context(command, [*flags])


class StandInRoles(Roles):
    """Starts nothing, and takes only flags that the role takes."""

    def start(self, role: str, *flags: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
        check_flags(role, *flags)
        return {"address": "127.0.0.1:1", "url": "http://127.0.0.1:1", "metrics_address": "127.0.0.1:1"}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of each `baton bench run` that a bench starts. A stand-in writes its report."""
    from bench.load.cli import app

    sent: list[list[str]] = []
    command: Any = typer.main.get_command(app)

    def stand_in(line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert line[:5] == [sys.executable, "-m", "cluster.cli", "bench", "run"], line
        context = command.commands["run"].make_context("run", line[5:])
        rows = [{"name": name, "value": value} for name, value in RESULTS.items()]
        Path(context.params["json"]).write_text(json.dumps({"results": rows}))
        sent.append(line[5:])
        return subprocess.CompletedProcess(line, 0)

    for bench in (disagg, multi_turn):
        monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=stand_in, DEVNULL=subprocess.DEVNULL))
    return sent


@dataclass
class StandInServing:
    """`bench.serving.Serving` that starts nothing, before the router at `url`."""

    directory: Path
    flags: tuple[str, ...]
    url: str = ""
    pools: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_flags("serve", *self.flags)
        self.started = time.monotonic()
        self.logs, self.output = self.directory / "logs", self.directory / "serve.log"
        self.logs.mkdir()
        self.output.write_text("  0.1s   0.1s  ready\n")
        self.process = subprocess.Popen(["sleep", "60"])

    def __enter__(self) -> StandInServing:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, max_tokens: int = 1) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {"cluster": {"pools": self.pools}}


# ---------------------------------------------------------------- one process


def test_runs_engine(
    run: Callable[..., dict[str, Any]], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    from bench.engine import host, on_cpu, start

    def first_token(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "bench.engine.start"], command
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
            patch.setattr(sys, "argv", command[2:])
            start.main()
        return subprocess.CompletedProcess(command, 0, said.getvalue())

    monkeypatch.setattr(contract, "gpus", list)
    monkeypatch.setattr(on_cpu, "embedded_path", lambda: checkpoint)
    monkeypatch.setattr(on_cpu, "_transformers", LlamaForCausalLM.from_pretrained)
    for name, smallest in (("PROMPT_TOKENS", 4), ("BATCH", 2), ("MIN_PAIRS", 1)):
        monkeypatch.setattr(on_cpu, name, smallest)
    monkeypatch.setattr(contract, "MIN_PAIRS", 1)
    monkeypatch.setattr(host, "measure", partial(host.measure, steps=20))
    monkeypatch.setattr(host, "CONTEXT", 100)
    monkeypatch.setattr(on_cpu, "subprocess", SimpleNamespace(run=first_token))
    rows = run("engine", "--short")
    assert {"engine.cpu.start.first_step", "engine.cpu.host.b256", "engine.cpu.vs_transformers.b16"} <= {
        *rows
    }


def test_runs_kv(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "gpus", list)
    monkeypatch.setattr(kv, "SIZES", (1,))
    threads = torch.get_num_threads()
    flags = ("--short", "--lanes", "1", "--slots", "4", "--slot-bytes", str(MIB))
    # One for all variants: each would start four processes.
    with contextlib.closing(Pair(kv.Settings(1, 4, MIB, None, MIB, device="cpu"))) as pair:
        shared = SimpleNamespace(seconds=pair.seconds, cpu_seconds=pair.cpu_seconds, close=lambda: None)
        monkeypatch.setattr(kv, "Pair", lambda settings: shared)
        rows = run("kv", *flags)
    torch.set_num_threads(threads)
    assert rows["kv.tcp.lanes1.1MiB"] > 0
    assert {"kv.tcp.lanes1.1MiB.raw.cpu", "kv.tcp.lanes1.1MiB.unchecked", "kv.tcp.lanes1.1MiB.pool"} <= {
        *rows
    }


def test_runs_discovery(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "ROUNDS", 1)
    monkeypatch.setattr("logging.disable", lambda level: None)
    monkeypatch.setenv("KUBECONFIG", "")
    assert {"discovery.file.known.p50", "discovery.kubernetes.lost.p99"} <= {*run("discovery")}


def test_runs_routing_sim(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.routing_sim import __main__ as sim

    monkeypatch.setattr(sim, "SHORT", {4: 0.05, 64: 0.05, 1_000: 0.001})
    rows = run("routing_sim", "--short")
    assert {"routing_sim.multi_turn.w64.changes.sticky.hits", "routing_sim.mooncake.w4.bound"} <= {*rows}


# ---------------------------------------------------------------- a router before fake workers


@pytest.fixture(scope="module")
def routed() -> Iterator[tuple[Roles, ends.FakeWorkers, dict[str, Any]]]:
    """Real fake workers, and a real router before them."""
    with Roles() as roles, contextlib.closing(ends.FakeWorkers(roles.secret, faces=2)) as workers:
        yield roles, workers, router.start_router(roles, workers)


@pytest.fixture
def shared(
    routed: tuple[Roles, ends.FakeWorkers, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> ends.FakeWorkers:
    """`bench.router` and `bench.peers` get the router and the workers of `routed`."""
    roles, workers, ready = routed

    class Started(StandInRoles):
        def __init__(self) -> None:
            super().__init__()
            self.secret = roles.secret

        def start(self, role: str, *flags: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
            check_flags(role, *flags)
            return ready

    for bench in (router, peers):
        monkeypatch.setattr(bench, "Roles", Started)
        monkeypatch.setattr(bench, "FakeWorkers", lambda secret, faces=0: contextlib.nullcontext(workers))
        monkeypatch.setattr(bench, "WARM_UP", 1)
        monkeypatch.setattr(bench, "PERIODS", 1)
        # In so short a time the kernel may count none.
        monkeypatch.setattr(bench, "cpu_seconds", lambda pid: ends.cpu_seconds(pid) + time.monotonic())
    monkeypatch.setattr(contextlib, "closing", lambda given: given)
    monkeypatch.setattr("gc.disable", lambda: None)
    monkeypatch.setattr(ends, "SPREAD_S", 0.0)
    return workers


def test_runs_router(
    run: Callable[..., dict[str, Any]],
    routed: tuple[Roles, ends.FakeWorkers, dict[str, Any]],
    shared: ends.FakeWorkers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = {"message": ("/v1/chat/completions", b'{"messages": [], "a": "%b"}' % bytes(100_000))}
    monkeypatch.setattr(router, "large_requests", lambda: large)
    few = partial(router.decisions, 100, 2)
    monkeypatch.setattr(router, "decisions", lambda workers, count, busy: few(busy=busy))
    with ends.Load(routed[2]["url"], 1) as load:  # one for all: each is a process
        monkeypatch.setattr(router, "Load", lambda url, streams: contextlib.nullcontext(load))
        rows = run("router", "--pairs", "100", "--streams", "1", "--seconds", "0.1")
    assert {"router.decision.w1000", "router.added.p99", "router.processes2.tokens_per_s"} <= {*rows}
    assert rows["router.stall.large_request"] > 0
    shared.step.value = 0.0


def test_runs_peers(
    run: Callable[..., dict[str, Any]], shared: ends.FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def started(name: str, program: Path, workers: list[str]) -> Iterator[peers.Contender]:
        yield peers.Contender(name, workers[1], 1, workers[0], ends.text_of, peers.MODEL)

    monkeypatch.setattr(peers, "started", started)
    monkeypatch.setattr(peers, "LOADS", (("tokens", 4, 1, 0.0),))
    rows = run(
        "peers", "--peer", f"smg={sys.executable}", "--rounds", "2", "--streams", "1", "--seconds", "0.1"
    )
    assert {"peers.smg.added.p50", "peers.baton.text.tokens_per_core"} <= {*rows}
    shared.step.value = 0.0


def test_runs_autoscale(
    run: Callable[..., dict[str, Any]],
    routed: tuple[Roles, ends.FakeWorkers, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from bench import autoscale

    pools = {role: {"size": 1, "ready": 1} for role in ("prefill", "decode")}
    serving = partial(StandInServing, url=routed[2]["url"], pools=pools)
    monkeypatch.setattr(autoscale, "Serving", lambda directory, *flags: serving(directory, flags))
    monkeypatch.setattr(autoscale, "PHASES", {"before": 0.1, "busy": 0.2, "after": 0.1})
    picture = tmp_path / "load.svg"
    rows = run("autoscale", "--svg", str(picture), "--high", "2", "--output-len", "2")
    assert rows["autoscale.requests"] > 0
    assert rows["autoscale.failed"] == 0
    assert picture.read_text().startswith("<svg")


# ---------------------------------------------------------------- clusters


def test_runs_overlap(
    run: Callable[..., dict[str, Any]], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overlap = import_module("bench.overlap.__main__")
    monkeypatch.setattr(contract, "gpus", list)
    monkeypatch.setattr("gc.disable", lambda: None)
    monkeypatch.setattr(overlap, "REST_S", 0.0)
    monkeypatch.setattr(overlap, "PERIODS", 1)
    monkeypatch.setattr(overlap, "PERIOD_S", 0.1)
    monkeypatch.setattr(overlap, "CONTEXT", 100)
    picture = tmp_path / "handover.svg"
    rows = run(
        "overlap", "--short", "--tokens", "100", "--batch", "3", "--growth", "16", "--lanes", "1",
        "--model", str(checkpoint), "--picture", str(picture),
    )  # fmt: skip
    assert {"overlap.tcp.n100.hidden", "overlap.tcp.n100.ttit.b3", "overlap.tcp.growth.n16"} <= {*rows}
    assert picture.read_text().startswith("<svg")


def test_runs_disagg(
    run: Callable[..., dict[str, Any]], loads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "gpus", list)
    monkeypatch.setattr(disagg, "Roles", StandInRoles)
    rows = run("disagg", "--short", "--ttit-target", "20")
    assert {"disagg.1p1d.r0.5.ttft.p50", "disagg.overflow_20ms.throughput"} <= {*rows}
    assert len(loads) == 9


def test_runs_multi_turn(
    run: Callable[..., dict[str, Any]], loads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = {
        "vllm:prefix_cache_queries_total": 4.0,
        "vllm:prefix_cache_hits_total": 1.0,
        "baton:prefix_cache_usage_perc": 0.5,
    }
    monkeypatch.setattr(multi_turn, "Roles", StandInRoles)
    monkeypatch.setattr(multi_turn, "_metrics", lambda address: page)
    rows = run("multi_turn", "--short")
    assert rows["multi_turn.sticky.hits"] == 0.25
    assert len(loads) == 2


def test_runs_idle(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "Serving", lambda directory, *flags: StandInServing(directory, flags))
    monkeypatch.setattr(idle, "SETTLE_S", 0.0)
    rows = run("idle", "--starts", "1", "--seconds", "0.1")
    assert rows["idle.memory.all"] > 0


class Dying(StandInServing):
    """Each worker is a process; when it ends, the logs say so, and that there is another."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.workers = {role: subprocess.Popen(["sleep", "60"]) for role in ("prefill", "decode")}
        for name in ("router", *self.workers):
            (self.logs / f"{name}-0.log").touch()

    def status(self) -> dict[str, Any]:
        roles = [
            {"role": role, "index": 0, "pid": worker.pid, "address": "127.0.0.1:1"}
            for role, worker in self.workers.items()
        ]
        return {"cluster": {"roles": roles}}

    def struck(self, role: str) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S,999")
        with (self.logs / "router-0.log").open("a") as log:
            log.write(f"{now} WARNING {role} 0 at 127.0.0.1:1 is gone\n{now} INFO {role} 0 at x is ready\n")
        with (self.logs / f"{role}-0.log").open("a") as log:
            log.write(f"{now} INFO ready at x\n")

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for worker in self.workers.values():
            worker.kill()
            worker.wait()


def test_runs_membership(run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Dying] = []

    def serving(directory: Path, *flags: str) -> Dying:
        served.append(Dying(directory, flags))
        return served[-1]

    def strike(pid: int, signum: int) -> None:
        workers = served[0].workers.items()
        served[0].struck(next(role for role, worker in workers if worker.pid == pid))

    monkeypatch.setattr(membership, "Serving", serving)
    monkeypatch.setattr(membership.processes, "tree", lambda pid: {"service": pid, "engine": pid})
    monkeypatch.setattr(membership, "os", SimpleNamespace(kill=strike))
    monkeypatch.setattr(membership, "STEADY_S", 0.0)
    rows = run("membership", "--workers", "1", "--rounds", "1")
    assert rows["membership.new.times"] == 4
    assert rows["membership.crashed.times"] == rows["membership.hung.times"] == 2


# ---------------------------------------------------------------- with real clusters


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["autoscale", "disagg", "engine", "idle", "membership", "multi_turn"])
def test_the_short_form_measures(name: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", f"bench.{name}", "--short", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["results"]
