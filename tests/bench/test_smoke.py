"""Every bench runs to its report at the smallest size. The figures mean nothing.

A stand-in replaces workers and `baton bench`. `make test-long` runs some benches with real processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import http.server
import itertools
import json
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import typer
import typer.main
import uvloop
from grpc.aio import Channel

from baton.bench.lab import driver, encoder, flip, images, split
from baton.bench.lab.disagg import __main__ as disagg
from baton.bench.lab.driver import Bench
from baton.bench.lab.harness.cluster import LocalCluster, Worker
from baton.bench.lab.harness.sides import Side
from baton.bench.lab.harness.streams import new_session
from baton.bench.lab.harness.workers import Driver, Workers
from baton.bench.lab.kv import __main__ as kv
from baton.bench.lab.kv import exported
from baton.bench.lab.kv.pair import Pair
from baton.bench.lab.kv.raw_sockets import MIB
from baton.bench.lab.overlap.streams import Background
from baton.bench.lab.reuse import Turns
from baton.bench.lab.router import __main__ as router
from baton.bench.lab.router import ends
from baton.bench.lab.shapes import SHAPES, write_shape
from baton.bench.report import commit, machine
from baton.kv_transfer import TraceWriter
from baton.rpc import worker_pb2 as pb
from baton.vision.images import ImageSettings
from baton.vision.tower_graphs import TowerGraphs
from tests.engine.conftest import TINY_SPARSE
from tests.engine.replays import Capture
from tests.forked import forking
from tests.mooncake import libraries
from tests.stand_in import stand_in

pytestmark = pytest.mark.all

ROOT = Path(__file__).parents[2]
LAB = ROOT / "bench" / "lab"
TINY = "one-small-layer"
ELSEWHERE = {
    "kernels": "tests/bench/test_kernels.py",
    "chaos": "tests/system/test_chaos.py",
    "store": "test_the_short_form_runs_with_real_processes",
    "quality": "test_the_short_form_runs_with_real_processes",
    "survive": "test_the_short_form_runs_with_real_processes",
    "weights": "test_the_short_form_runs_with_real_processes",
    "vllm": "tests/vllm_worker/test_bench.py",
}


@pytest.fixture(scope="module", autouse=True)
def forked_processes() -> Iterator[None]:
    """Roles, and the processes of `multiprocessing`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["pytest", "baton.bench.lab.kv.pair", "baton.bench.lab.kv.exported", "baton.bench.lab.router.ends"]
    )
    with forking(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda method: context)
        patch.setattr(ends, "CONTEXT", context)
        yield


def benches() -> set[str]:
    commands = [path.parent for path in LAB.glob("*/__main__.py")]
    commands += [path for path in LAB.glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    return {path.stem for path in commands}


def bench_of(name: str) -> Bench:
    found = f"baton.bench.lab.{name}.__main__" if (LAB / name).is_dir() else f"baton.bench.lab.{name}"
    return import_module(found).BENCH


def test_every_bench_has_a_run() -> None:
    smoked = {name.removeprefix("test_runs_") for name in globals() if name.startswith("test_runs_")}
    assert smoked | ELSEWHERE.keys() == benches()


def test_the_readme_names_every_bench() -> None:
    index = (ROOT / "bench" / "README.md").read_text()
    assert not {name for name in benches() if f"`python -m baton.bench.{name}" not in index}


@pytest.mark.parametrize("name", sorted(benches()))
def test_a_bench_refuses_a_gpu_that_is_not_there(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver, "gpus", list)
    with pytest.raises(SystemExit) as ended:
        bench_of(name).main(["--device", "cuda"])
    assert ended.value.code == driver.EXIT_CANNOT_MEASURE
    wrong = "needs a GPU" if "cuda" in bench_of(name).devices else "measures on cpu only"
    assert wrong in capsys.readouterr().err


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a bench as `python -m baton.bench.NAME FLAGS` does. Returns value by row of its JSON report."""

    def run(name: str, *flags: str) -> dict[str, Any]:
        out = tmp_path / "report.json"
        assert bench_of(name).main(["--json", str(out), *flags]) == 0
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


@cache
def commands_of(app: typer.Typer) -> dict[str, Any]:
    found: Any = typer.main.get_command(app)
    return found.commands


def check_flags(command: str, *flags: str) -> dict[str, Any]:
    """What `baton COMMAND` reads from flags. Raises an error for those that it does not take."""
    from baton.cluster.cli import app

    return commands_of(app)[command].make_context(command, [*flags]).params


# ---------------------------------------------------------------- one process


def test_runs_engine(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    from baton.bench.lab.engine import on_cpu

    monkeypatch.setattr(driver, "gpus", list)
    monkeypatch.setattr(on_cpu, "embedded_path", lambda: checkpoint)
    monkeypatch.setattr(on_cpu, "_transformers", LlamaForCausalLM.from_pretrained)
    for name, smallest in (("PROMPT_TOKENS", 4), ("BATCH", 2), ("MIN_PAIRS", 1), ("REQUESTS", 3)):
        monkeypatch.setattr(on_cpu, name, smallest)
    monkeypatch.setattr(driver, "MIN_PAIRS", 1)
    monkeypatch.setattr(on_cpu, "FORMAT_PROMPT_TOKENS", 16)
    rows = run("engine", "--short")
    assert {"engine.cpu.default.ttft", "engine.cpu.vs_transformers.b16", "engine.cpu.predicted.error"} <= {
        *rows
    }


def test_runs_host(run: Run) -> None:
    assert {*run("host", "--short")} == {
        *(f"host.step.b{batch}" for batch in (1, 64, 256)),
        *(f"host.{name}" for name in ("admission", "full", "report", "second_turn")),
    }


def test_runs_elastic(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.bench.lab import elastic

    monkeypatch.setattr(driver, "MIN_PAIRS", 1)
    for name in ("MIN_PAIRS", "STEP_BATCHES"):
        monkeypatch.setattr(elastic, name, {"MIN_PAIRS": 1, "STEP_BATCHES": (1,)}[name])
    case = dataclasses.replace(elastic.ON_CPU, short=elastic.Load(64, 16, 1))
    monkeypatch.setattr(elastic, "ON_CPU", case)
    rows = run("elastic", "--short")
    assert rows["elastic.cpu.short"] == rows["elastic.cpu.short_again"] == 64
    assert rows["elastic.cpu.long"] > 16
    assert {"elastic.cpu.move", "elastic.cpu.step.b1"} <= {*rows}


def test_runs_speculation(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.bench.lab import speculation

    monkeypatch.setattr(driver, "gpus", list)
    monkeypatch.setattr(speculation, "embedded_path", lambda: checkpoint)
    monkeypatch.setattr(speculation, "SHORT", 4)
    for module in (driver, speculation):
        monkeypatch.setattr(module, "MIN_PAIRS", 1)
    rows = run("speculation", "--short")
    assert rows["speculation.cpu.different"] == 0
    assert {"speculation.cpu.copying", "speculation.cpu.free"} <= {*rows}


def test_the_bench_of_a_mixture_counts_the_experts_that_a_step_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from baton.bench.lab.engine import on_gpu
    from baton.engine import EngineConfig, build_engine

    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 8}
    shape = SHAPES[TINY] | experts | {"architectures": ["Qwen3MoeForCausalLM"]}
    monkeypatch.setitem(SHAPES, "tiny-moe", shape)

    monkeypatch.setattr(on_gpu, "COUNTED", 4)
    model = str(write_shape("tiny-moe", tmp_path))
    engine = build_engine(EngineConfig(model, dtype="float32", load_format="dummy", num_blocks=64))
    assert on_gpu.experts_read(engine, 1, 20) == 4
    assert 4 < on_gpu.experts_read(engine, 4, 20) <= 16
    attention, router, expert, head = 2 * 16 * 8 * 3, 16 * 16, 3 * 16 * 8, 16 * 50_000
    kv_bytes = 20 * 2 * 8 * 4
    case = on_gpu.MOE_CASES[None]
    assert on_gpu.bytes_moved(engine, case, 2, 20, 5.5) == pytest.approx(
        2 * (attention + router + 5.5 * expert + head) + 2 * kv_bytes
    )


@pytest.mark.long
def test_runs_kv(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "gpus", list)
    monkeypatch.setattr(kv, "SIZES", (1,))
    monkeypatch.setattr(exported, "SIZES", {"cpu": (1,)})
    settings = kv.Settings(1, 4, MIB, MIB, device="cpu", transport="shared_memory")
    monkeypatch.setattr(exported, "variants", lambda device: {"": settings})
    threads = torch.get_num_threads()
    flags = ("--short", "--lanes", "1", "--slots", "4", "--slot-bytes", str(MIB))
    # One pair for all variants, since each pair starts four processes.
    with contextlib.closing(Pair(settings)) as pair:
        shared = stand_in(Pair, seconds=pair.seconds, cpu_seconds=pair.cpu_seconds, close=lambda: None)
        monkeypatch.setattr(kv, "Pair", lambda settings: shared)
        rows = run("kv", *flags)
    torch.set_num_threads(threads)
    assert rows["kv.tcp.lanes1.1MiB"] > 0
    assert rows["kv.shared_memory.1MiB"] > 0
    assert {
        "kv.shared_memory.1MiB.plain",
        "kv.tcp.lanes1.1MiB.raw.cpu",
        "kv.tcp.lanes1.1MiB.pool",
    } <= {*rows}


def test_runs_routing_sim(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.bench.lab.routing_sim import __main__ as sim
    from baton.bench.lab.routing_sim import agents

    smallest = {
        "MAIN": 8, "SCALES": {4: (4, 10, 3), 8: (4, 5, 3), 16: (1, 2, 3)}, "SHORT": {4: 1, 8: 1, 16: 1},
        "LOADS": {load: rates[:1] for load, rates in sim.LOADS.items()},
        "PLACED_SHORT": (2,), "PLACED_SECONDS": 0.0, "PLACED_REQUESTS_SHORT": 10, "SPLIT_SHORT": 4,
    }  # fmt: skip
    for name, value in smallest.items():
        monkeypatch.setattr(sim, name, value)
    few = agents.Case(4, 2)
    for name, value in {"MAIN": "agents4", "CASES": {"agents4": few}, "TRACE_SECONDS": 6.0}.items():
        monkeypatch.setattr(agents, name, value)
    rows = run("routing_sim", "--short")
    assert "routing_sim.agents4.tokens.vs_colocated" in rows
    assert "routing_sim.trace.latency_p90.vs_colocated" in rows
    assert "routing_sim.multi_turn.w8.changes.sticky.hits" in rows
    assert rows["routing_sim.placement.500_500.6.w2.ttft_p99"] > 0


# ---------------------------------------------------------------- a router with fake workers


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, ends.FakeWorkers]]:
    """Fake workers in their process, and a real router."""
    secret, where = "a secret of the cluster", tmp_path_factory.mktemp("router")
    with (
        contextlib.closing(ends.FakeWorkers(secret.encode())) as workers,
        LocalCluster(where, prefill=0, decode=0, secret=secret, router_flags=workers.flags) as cluster,
    ):
        uvloop.run(router.until_ready(cluster.url))
        yield cluster, workers


def test_runs_router(
    run: Run, routed: tuple[LocalCluster, ends.FakeWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, workers = routed

    def started(directory: Path, *, prefill: int, decode: int, secret: str, router_flags: list[str]) -> Any:
        check_flags("router", *router_flags)
        assert prefill == decode == 0
        made = stand_in(LocalCluster, url=cluster.url, report=cluster.report, restart_router=restarted)
        return contextlib.nullcontext(made)

    def restarted(*flags: str) -> None:
        check_flags("router", *flags)

    large = {"message": ("/v1/chat/completions", b'{"messages": [], "a": "%b"}' % bytes(100_000))}
    few, cpu_seconds = partial(router.decisions, 100, 2), ends.cpu_seconds
    for module, name, smaller in (
        (router, "LocalCluster", started),
        (ends, "FakeWorkers", lambda secret: contextlib.nullcontext(workers)),
        (router, "WARM_UP", 1),
        (router, "PERIODS", 1),
        # In such a short time the kernel may count no CPU time.
        (ends, "cpu_seconds", lambda pid: cpu_seconds(pid) + time.monotonic()),
        (ends, "large_requests", lambda answer: large),
        (router, "decisions", lambda workers, count, busy: few(busy=busy)),
    ):
        monkeypatch.setattr(module, name, smaller)
    monkeypatch.setattr(router.secrets, "token_hex", lambda count: cluster.secret)
    monkeypatch.setattr(contextlib, "closing", lambda given: given)
    monkeypatch.setattr("gc.disable", lambda: None)
    monkeypatch.setattr(ends, "SPREAD_S", 0.0)
    sleep = time.sleep
    with ends.OpenStreams(cluster.url, 1) as load:  # one load for all, since each is a process
        monkeypatch.setattr(ends, "OpenStreams", lambda url, streams: contextlib.nullcontext(load))

        def until_a_token(seconds: float) -> None:
            before = load.tokens.value
            while load.tokens.value == before:
                sleep(0.001)

        monkeypatch.setattr(time, "sleep", until_a_token)
        rows = run("router", "--pairs", "100", "--streams", "1", "--seconds", "0.1")
    assert {"router.decision.w1000", "router.added.p99", "router.processes2.tokens_per_s"} <= {*rows}
    assert rows["router.stall.large_request"] > 0
    workers.step.value = 0.0


# ---------------------------------------------------------------- clusters


@pytest.mark.long
def test_runs_overlap(run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = import_module("baton.bench.lab.overlap.__main__")
    monkeypatch.setattr(driver, "gpus", list)
    monkeypatch.setattr("gc.disable", lambda: None)
    smallest = {"REST_S": 0.0, "PERIODS": 1, "PERIOD_S": 0.1, "CONTEXT": 100, "LONG_OUTPUT": 5}
    for name, value in smallest.items():
        monkeypatch.setattr(overlap, name, value)
    rows = run(
        "overlap", "--short", "--tokens", "100", "--batch", "3", "--long", "16",
        "--lanes", "1", "--model", str(checkpoint), "--prefill-ranks", "2", "--decode-kv-cache-dtype", "fp8",
        "--no-elastic-memory",
    )  # fmt: skip
    of = "overlap.tcp.2to1.autotofp8.fixed"
    assert {f"{of}.n100.hidden", f"{of}.n100.wire", f"{of}.n100.ttit.b3"} <= {*rows}
    assert rows[f"{of}.long.n16.whole"] > rows[f"{of}.long.n16.ttft"]


@pytest.mark.long
def test_runs_reuse(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "gpus", list)
    monkeypatch.setattr("baton.bench.lab.reuse.SHORT_ON_CPU", Turns(150, 20))
    rows = run("reuse", "--short", "--model", str(checkpoint))
    turns = {"second_turn", "from_decode", "on_decode", "computed"}
    assert {f"reuse.cpu.{name}" for name in turns} <= {*rows}
    assert rows["reuse.cpu.bytes_over_missing"] == 1


def test_runs_worker(run: Run) -> None:
    rows = run("worker", "--short", "--streams", "8", "--seconds", "0.5")
    assert {f"worker.cpu.{kind}_us_per_token" for kind in ("service", "engine")} <= {*rows}
    assert rows["worker.cpu.tokens"] > 0


@pytest.mark.long
def test_runs_split(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy would not split: a step of the tiny model takes as long with one token as with many."""

    async def plan(pair: split.Pair, tokens: int) -> list[tuple[Driver, int]]:
        return [(pair.prefill, 192), (pair.decode, tokens)]

    monkeypatch.setattr(driver, "gpus", list)
    monkeypatch.setattr(split.Pair, "plan", plan)
    rows = run("split", "--short", "--tokens", "400", "--model", str(checkpoint))
    assert rows["split.cpu.failed"] == 0
    assert {"split.cpu.ttft", "split.cpu.alone", "split.cpu.waited"} < {*rows}


def test_overlap_gives_each_rank_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overlap = import_module("baton.bench.lab.overlap.__main__")

    def devices(prefill: int, decode: int, present: int) -> list[str]:
        monkeypatch.setattr(driver, "visible_gpus", lambda: range(present))
        first_gpus, _ = overlap.devices(argparse.Namespace(prefill_ranks=prefill, decode_ranks=decode))
        return [name.removeprefix("cuda:") for name in first_gpus]

    assert (devices(2, 1, 4), devices(2, 2, 4)) == (["0", "3"], ["0", "2"])
    assert (devices(2, 1, 2), devices(2, 2, 2), devices(1, 1, 1)) == (["0", "1"], ["0", "0"], ["0", "0"])
    with pytest.raises(SystemExit):
        devices(1, 2, 1)
    assert "--prefill-ranks 1 --decode-ranks 2: needs 2 GPUs, and there are 1" in capsys.readouterr().err


@pytest.mark.parametrize(("elastic", "named"), [(None, ""), (True, ".elastic"), (False, ".fixed")])
def test_overlap_says_whether_memory_is_elastic(elastic: bool | None, named: str) -> None:
    overlap = import_module("baton.bench.lab.overlap.__main__")
    args = argparse.Namespace(
        device="cuda", model=None, model_shape="bamba-9b", lanes=1, kv_connector="tcp", tokens=[100], long=[],
        prefill_ranks=1, decode_ranks=1, prefill_kv_cache_dtype="auto", decode_kv_cache_dtype="auto",
        elastic_memory=elastic,
    )  # fmt: skip
    flags = [*overlap.flags(args), *overlap.on_gpus(args)]
    assert [check_flags(role, *flags)["elastic_memory"] for role in ("prefill", "decode")] == [elastic] * 2
    assert overlap.transport_label(args) == f"overlap.tcp.bamba-9b{named}"


def test_gaps_are_not_measured_beside_a_stream_that_has_ended() -> None:
    times = {b"one": [0.0, 1.0, 2.0], b"other": [0.5, 1.5]}
    workers = stand_in(Workers, decode=stand_in(Driver, times=times.__getitem__))
    assert Background(workers, list(times), length=4).gaps(0.5, 2.0) == [1.0, 1.0]
    with pytest.raises(RuntimeError, match="ended after its 3 tokens"):
        Background(workers, list(times), length=3).gaps(0.5, 2.0)


def test_the_script_for_gpus_has_each_step_that_it_names() -> None:
    script = Path("bench/gpu.sh").read_text()
    told = script.partition("# STEP: ")[2].partition("# DIR")[0]
    steps = set(re.findall(r"\w+", re.sub(r"\([^)]*\)", "", told)))
    assert steps == set(re.findall(r"^([a-z0-9_]+)\(\) \{", script, re.M))


class AnswersAtOnce(http.server.BaseHTTPRequestHandler):
    """A router with one worker and one model, whose answers have two tokens."""

    asked: ClassVar[list[int]] = []
    """Images of each request."""
    encoded: ClassVar[set[str]] = set()

    def do_GET(self) -> None:
        port = self.connection.getsockname()[1]
        family = "# TYPE baton:images_encoded counter\nbaton:images_encoded_total"
        pages = {
            "/v1/models": json.dumps({"data": [{"id": "m"}]}),
            "/metrics/targets": json.dumps([{"targets": [f"127.0.0.1:{port}"]}]),
            "/metrics": f"{family} {len(self.encoded)}.0\n",
        }
        self._send(pages[self.path].encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        images = [part["image_url"]["url"] for part in body["messages"][0]["content"][:-1]]
        self.asked.append(len(images))
        self.encoded.update(images)
        deltas = [{"role": "assistant"}, {"content": "a"}, {"content": "b"}]
        events = [json.dumps({"choices": [{"delta": delta}]}) for delta in deltas]
        events.append(json.dumps({"choices": [], "usage": {"prompt_tokens": 30}}))
        self._send("".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode())

    def _send(self, data: bytes) -> None:
        kind = "application/json" if self.command == "GET" else "text/event-stream"
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_runs_encoder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_cpu(settings: ImageSettings, device: torch.device) -> TowerGraphs:
        return TowerGraphs(Capture, 100, settings.pixel_bytes(1, 1), device)

    monkeypatch.setattr(encoder, "REPLAYED_ON", ("cpu",))
    monkeypatch.setattr(encoder, "tower_graphs", on_cpu)
    rows = run("encoder", "--short", "--pixels", "64x32")
    assert rows["encoder.differ"] == 0
    assert rows.keys() == {
        *(f"encoder.{how}.{beside}" for how in ("launched", "replayed") for beside in ("alone", "busy")),
        *(f"encoder.{name}" for name in ("captured", "kept", "differ")),
    }


def test_runs_images(run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    turns, real = list[str](), images.measure_side

    def started(side: Side, model: Path) -> contextlib.nullcontext[list[str]]:
        turns.append(side.name)
        check_flags(*side.command.format(model=model, port=8000).split()[3:])
        if turns == ["pool", "inside"]:
            raise RuntimeError("no GPU")
        return contextlib.nullcontext([f"http://127.0.0.1:{server.server_port}"])

    def shortened(urls: Sequence[str], seed: int, args: Any, *more: Any) -> Any:
        args.seconds = 0.01
        return real(urls, seed, args, *more)

    monkeypatch.setattr(images, "started", started)
    monkeypatch.setattr(images, "measure_side", shortened)
    monkeypatch.setattr(images, "METRICS_S", 0.0)
    flags = (
        *("--device", "cpu", "--short", "--ttft", "60000", "--streams", "1"),
        *("--at-once", "6", "--pixels", "64x64"),
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), AnswersAtOnce) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(AssertionError):  # exit status 1
            run("images", *flags)
        assert "inside.0: failed: no GPU" in capfd.readouterr().err
        rows = run("images", *flags, "--resume")
        assert run("images", *flags, "--resume") == rows, "nothing is left"
        with pytest.raises(SystemExit):
            run("images", *flags, "--resume", "--rated", "9")
        server.shutdown()
    assert "another rated" in capfd.readouterr().err
    assert turns == ["pool", "inside", "inside"], "a side with results is not measured again"
    assert rows["images.pool.rate"] == pytest.approx(1.25 * rows["images.pool.limit"])
    assert rows["images.pool.repeat.encoded"] == 0
    of_side = {"one", "repeat", "at_once.6", "limit", "prefill", "encode", "rate", "of_limit", "gaps"}
    of_side |= {"encode.busiest"}
    assert rows.keys() > {f"images.{side}.{name}" for side in ("pool", "inside") for name in of_side}
    assert rows.keys() > {"images.one", "images.repeat", "images.at_once.6", "images.rate"}
    assert {0, 1, 2, 4} == set(AnswersAtOnce.asked), "six at once are four and two"


@pytest.mark.parametrize(
    ("busy", "silent", "count", "holds"), [(1, 0, 100, True), (2, 0, 100, False), (0, 1, 1, False)]
)
async def test_a_rate_misses_once_too_many_are_late(busy: int, silent: int, count: int, holds: bool) -> None:
    """Of 100 requests one may be late or refused, of one none."""
    number, ended = itertools.count(), threading.Event()

    class Overloaded(AnswersAtOnce):
        def do_POST(self) -> None:
            mine = next(number)
            if mine < busy:
                return self.send_error(429)
            if mine < silent:
                ended.wait(60)
            return super().do_POST()

        def _send(self, data: bytes) -> None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                super()._send(data)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Overloaded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        async with new_session() as session:
            client = images.Client(session, [url], ["m"], seed=0)
            args = argparse.Namespace(ttft=50 if silent else 60000)
            turn = images.Turn(client, [url], images.Pictures(64, 64, seed=0), args)
            assert await turn.holds(500.0, [client.body([], 1) for _ in range(count)]) == holds
        ended.set()
        server.shutdown()


async def test_a_server_without_a_list_of_workers_tells_no_encoded_images() -> None:
    class OfVllm(AnswersAtOnce):
        def do_GET(self) -> None:
            """Metrics at each address below /metrics."""
            self.command = "METRICS"
            self._send(b"# TYPE vllm:num_requests_running gauge\n")

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OfVllm) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        async with new_session() as session:
            assert await images.Client(session, [url], ["m"], seed=0).encoded(url) is None
        server.shutdown()


async def test_gaps_beside_image_requests_that_fail_are_no_result() -> None:
    asked = threading.Event()

    class Refuses(AnswersAtOnce):
        def do_POST(self) -> None:
            self.send_error(503)
            asked.set()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        async with new_session() as session:
            client = images.Client(session, [url], ["m"], seed=0)
            turn = images.Turn(client, [url], images.Pictures(64, 64, seed=0), None)
            with pytest.raises(RuntimeError, match="a request failed"):
                async with turn._beside(rate=50.0):
                    await asyncio.to_thread(asked.wait, 60)
        server.shutdown()


@pytest.mark.parametrize(
    ("limit", "least", "tried"),
    [(5.3, 5.0, 9), (0.3, 0.28, 9), (0.01, 0.0, 5), (99, 10.0, 6)],
)
async def test_the_highest_rate_is_found(limit: float, least: float, tried: int) -> None:
    rates = list[float]()

    async def holds(rate: float) -> bool:
        rates.append(rate)
        return rate <= limit

    assert least <= await images.highest(holds, 1.0, 10.0, 4) <= limit
    assert len(rates) <= tried
    assert max(rates) <= 10.0


def test_runs_disagg(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in writes the report of each `baton bench`, and another one starts no side."""
    from baton.bench.load.cli import app

    turns: list[tuple[str, int]] = []
    loads: list[list[str]] = []

    def started(side: disagg.Side, model: Path, first_gpu: int) -> contextlib.nullcontext[list[str]]:
        command = side.command.format(model=model, port=8000).split()
        assert command[:4] == [sys.executable, "-m", "baton.cluster.cli", "serve"]
        check_flags(*command[3:])
        turns.append((side.name, first_gpu))
        return contextlib.nullcontext(["http://127.0.0.1:1"])

    def measured(line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert line[:4] == [sys.executable, "-m", "baton.cluster.cli", "bench"], line
        asked = commands_of(app)[line[4]].make_context(line[4], line[5:]).params
        rows = [{"name": name, "value": 1.0} for name in disagg.TOTALS]
        detail = {"valid": True, "invalid_reasons": [], "notes": []}
        asked["json"].write_text(json.dumps({"results": rows, "detail": detail}))
        if asked["jsonl"] is not None:
            answered = {"ttft_ms": 50, "e2e_ms": 150, "output_tokens": 2, "arrivals": [0.1, 0.2]}
            lines = [answered | {"turn": 0}, answered | {"turn": 1}, {"failure": "refused"}]
            asked["jsonl"].write_text("".join(json.dumps(line) + "\n" for line in lines))
        loads.append(line[4:])
        return subprocess.CompletedProcess(line, 0)

    machine(), commit()  # which ask processes, once
    monkeypatch.setattr(subprocess, "run", measured)
    monkeypatch.setattr(driver, "gpus", lambda: ["a GPU"] * 2)
    monkeypatch.setattr(disagg, "started", started)
    rows = run("disagg", "--seeds", "2", "--model-shape", TINY, "--reports", str(tmp_path / "reports"))
    assert [name for name, _ in turns] == ["1p1d", "colocated", "colocated", "1p1d"]
    assert len(loads) == 4 * (21 + 9)  # levels and warm-ups
    assert rows["disagg.30000_100.r0.5.1p1d.answered"] == 4
    assert rows["disagg.saturated.c256.ttft.p50"] == rows["disagg.agents.a48.ttft.later.p50"] == 1
    assert rows["disagg.agents.a16.1p1d.e2e.per_token.p50"] == 75
    assert (tmp_path / "reports" / "500_500.r24.colocated.1.json").exists()

    (tmp_path / "reports" / "500_500.r24.colocated.1.json").unlink()
    turns.clear()
    loads.clear()
    again = ("--seeds", "2", "--model-shape", TINY, "--reports", str(tmp_path / "reports"), "--resume")
    assert run("disagg", *again) == rows
    assert turns == [("colocated", 0)], "the other runs have reports"
    assert [line[line.index("--requests") + 1] for line in loads] == ["8", "300"], (
        "a warm-up and what is left"
    )

    turns.clear()
    sides = [word for name in ("one 1x2", "two 2") for word in ("--side", f"{name} {disagg.SERVE}")]
    rows = run("disagg", "--seeds", "1", "--model-shape", TINY, "--loads", "steps", "--at-once", *sides)
    assert sorted(turns) == [("one", 0), ("two", 2)], "each side has its own GPUs"
    assert rows["disagg.steps.b256.gap.p50"] == 1


def test_runs_flip(
    run: Run,
    routed: tuple[LocalCluster, ends.FakeWorkers],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fake workers, which compute no prompt. A made-up trace has one for each flip, and one before it."""
    real, workers = routed
    decode = stand_in(Worker, lives=[{"address": workers.decode}])
    cluster = stand_in(LocalCluster, url=real.url, secret=real.secret, of=lambda role: [None, decode])
    computed = iter(range(100))
    writers: list[TraceWriter] = []
    monkeypatch.setattr(driver, "gpus", list)

    def started(directory: Path, *, worker_flags: list[str], router_flags: list[str], **_: Any) -> Any:
        traces = Path(check_flags("prefill", *worker_flags)["trace_dir"])
        check_flags("router", *router_flags)
        traces.mkdir()
        writers.append(TraceWriter(traces / "decode-1-engine.trace", "decode-1"))
        traced(writers[-1], "before")
        return contextlib.nullcontext(cluster)

    def traced(writer: TraceWriter, attempt: str) -> None:
        writer.instant("taken", attempt=attempt.encode().hex())
        writer.instant("first token", prefill=attempt.encode().hex(), computing=0.0)
        writer.flush()

    monkeypatch.setattr("baton.bench.lab.harness.cluster.LocalCluster", started)
    monkeypatch.setattr(flip, "leaks_when_idle", lambda url: {})
    monkeypatch.setattr(flip, "QUIET_S", (0.0, 0.0))

    async def status(channel: Channel, within: float) -> pb.WorkerStatus:
        number = next(computed)
        traced(writers[-1], f"{number}")
        return pb.WorkerStatus(prompt_tokens=1 + number)

    async def set_pool(channel: Channel, pool: str, within: float) -> pb.WorkerStatus:
        return pb.WorkerStatus()

    monkeypatch.setattr(flip, "status_of", status)
    monkeypatch.setattr(flip, "set_pool", set_pool)
    rows = run("flip", "--flips", "5", "--clients", "1")
    for writer in writers:
        writer.close()
    assert rows["flip.cpu.flips"] == 5
    assert rows["flip.cpu.failed"] == rows["flip.cpu.different_tokens"] == 0
    assert rows["flip.cpu.seconds"] >= rows["flip.cpu.until_prompt"] > 0


# ---------------------------------------------------------------- with real clusters


@pytest.mark.long
@pytest.mark.parametrize(
    "bench",
    [
        "disagg",
        "engine",
        "flip",
        "kv --only tcp",
        "quality --only killed",
        "reuse",
        "router.scale streams --workers 8",
        "split",
        "store",
        "survive",
        "weights",
        "weights --trainer",
    ],
)
def test_the_short_form_runs_with_real_processes(
    bench: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", libraries(tmp_path / "lib"))
    out = tmp_path / "report.json"
    name, *flags = bench.split()
    command = [sys.executable, "-m", f"baton.bench.{name}", *flags, "--short", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(out.read_text())["results"]


def test_decodes_at_many_positions_need_no_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.bench.lab.engine import on_gpu, positions
    from baton.engine import EngineConfig, build_engine

    sparse = TINY_SPARSE | {"architectures": ["GlmMoeDsaForCausalLM"], "hidden_act": "silu"}
    monkeypatch.setitem(SHAPES, "tiny-sparse", SHAPES[TINY] | sparse)
    model = str(write_shape("tiny-sparse", tmp_path))
    engine = build_engine(EngineConfig(model, dtype="float32", load_format="dummy", num_blocks=32))
    positions.clear(engine)
    gaps = positions.decode_gaps(engine, 2, 100, 6)
    assert gaps is not None
    assert len(gaps) == 6
    assert positions.decode_gaps(engine, 8, 200, 6) is None, "no room"
    engine.assert_whole()
    of_layers = engine.model_config.num_layers * 4
    assert on_gpu.cache_bytes_moved(engine, 100) == of_layers * (100 * 32 + 12 * 48)


OF_KV = 2 * 2
"""K and V, in bfloat16."""
# of a layer whose positions are all read, and of one with a window
OSS_LAYER = 12 * 8 * 64 * OF_KV, 12 * 8 * 64 * OF_KV
GEMMA_LAYER = 7 * 2 * 512 * OF_KV, 35 * 2 * 256 * OF_KV


@pytest.mark.parametrize(
    ("name", "window", "per_position", "active"),
    [("gpt-oss-20b", 128, OSS_LAYER, 3.61e9), ("gemma-4-e4b", 512, GEMMA_LAYER, 4.64e9)],
)
def test_a_step_of_a_model_with_windows_has_the_floor_of_what_it_reads(
    name: str, window: int, per_position: tuple[int, int], active: float
) -> None:
    """The 18 last layers of Gemma 4 E4B keep no KV. They read that of others. The floor has neither the table
    of its layers nor the input embedding of gpt-oss, of which a step reads some rows."""
    from baton.bench.lab.engine import on_gpu
    from baton.engine import Engine
    from baton.engine.loader.families import cache_spec
    from baton.engine.loader.hf_config import model_config_from_hf

    config = model_config_from_hf(SHAPES[name], {}, name)
    engine = stand_in(Engine, model_config=config, cache_spec=cache_spec(config, torch.bfloat16))
    case = on_gpu.WINDOWED_CASE
    all_read, windowed = per_position
    for positions in (100, 1064, 128_000):
        of_request = positions * all_read + min(positions, window) * windowed
        assert on_gpu.cache_bytes_moved(engine, positions) == of_request
        weights = on_gpu.weight_bytes(engine, case, 1, None)
        assert weights == pytest.approx(2 * active, rel=0.002)
        assert on_gpu.bytes_moved(engine, case, 1, positions, None) == weights + of_request
