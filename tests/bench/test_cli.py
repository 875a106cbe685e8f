"""The command as a user starts it: exit codes, files, Ctrl-C. No result depends on the speed of the machine:
a run that has to end early would last an hour otherwise."""

import asyncio
import json
import shlex
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton.bench.load.cli import app
from baton.bench.load.target.answer import Failure, Record
from baton.bench.load.traffic.dataset import read_dataset
from baton.bench.load.traffic.fleet import REFUSALS, Refusals
from baton.bench.load.traffic.trace import SAMPLE_TRACE, read_trace
from tests.bench.mock_server import Behavior, Fault, MockServer, Served
from tests.bench.test_report import report as report_of_a_run
from tests.forked import FreshPopen, forking
from tests.pages import ROOT, blocks

pytestmark = pytest.mark.all

MEASURED = (0, 3)  # 3: on a busy machine the client may not keep up
FOREVER = "3600"
QUICK = ("--input-len", "20", "--output-len", "4", "--advanced.processes", "1", "--warmup", "0")


@pytest.fixture(scope="module", autouse=True)
def forked_processes() -> Iterator[None]:
    with forking():
        yield


async def _start(*args: str | Path) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "baton.cluster.cli", "bench", *map(str, args)]
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=PIPE, stderr=PIPE)


async def _bench(*args: str | Path) -> tuple[int, str, str]:
    process = await _start(*args)
    out, err = await process.communicate()
    assert process.returncode is not None
    assert "Traceback" not in err.decode(), err.decode()
    return process.returncode, out.decode(), err.decode()


async def _against(behavior: Behavior, command: str, *args: str | Path) -> tuple[int, str, str, list[Served]]:
    """Exit code and output of a command against a server, and what the server saw."""
    async with MockServer(behavior) as server:
        code, out, err = await _bench(command, "--url", server.url, "--quiet", *args)
        return code, out, err, server.served


def _rows(path: Path) -> dict[str, Any]:
    return {row["name"]: row["value"] for row in json.loads(path.read_text())["results"]}


def _latencies(lines: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """The times to first tokens and all gaps, in ms, of the lines of --advanced.jsonl."""
    gaps = [(b - a) * 1e3 for line in lines for a, b in pairwise(line["arrivals"])]
    return [line["ttft_ms"] for line in lines], gaps


async def test_run_writes_every_file_that_its_options_name(tmp_path: Path) -> None:
    files = [tmp_path / f"r.{kind}" for kind in ("json", "jsonl", "html")]
    outputs = ["--json", files[0], "--advanced.jsonl", files[1], "--html", files[2]]
    code, out, err, served = await _against(
        Behavior(ttft=0.02, gaps=(0.005,)), "run", "--rate", "30", "--duration", "1", "--slo", "ttft=100s",
        *QUICK, *outputs,
    )  # fmt: skip
    assert code in MEASURED, err
    report = json.loads(files[0].read_text())
    assert {"machine", "versions", "parameters", "started", "results"} <= set(report)
    assert json.dumps(report["detail"]["curves"]["distributions"]["ttft"]) in files[2].read_text()
    rows = _rows(files[0])
    lines = [json.loads(line) for line in files[1].read_text().splitlines()]
    assert rows["requests.sent"] == len(lines)
    assert len(served) == len(lines) + 1, "one probe and the load, no other request"
    ttfts, gaps = (sorted(values) for values in _latencies(lines))
    assert rows["ttft.max"] == pytest.approx(ttfts[-1])
    assert rows["ttft.p50"] == pytest.approx(ttfts[(len(ttfts) - 1) // 2])
    assert rows["itl.p50"] == pytest.approx(gaps[(len(gaps) - 1) // 2])
    assert rows["input.off"] == rows["requests.failed"] == 0
    assert rows["goodput.share"] == 1
    assert "TTFT" in out


async def test_the_command_of_the_quick_start_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are fresh ones, as a user's are."""
    monkeypatch.setattr(subprocess, "Popen", FreshPopen)
    [command] = [
        block.text for block in blocks(ROOT / "docs/quickstart.md") if block.text.startswith("baton bench ")
    ]
    args = shlex.split(command)[2:]
    assert "--url" not in args, "where `make serve` listens"
    shorter = ("--duration", "0.5", "--warmup", "0", "--json", tmp_path / "report.json")
    code, _, err, _ = await _against(Behavior(ttft=0.01), *args, *shorter)
    assert code in MEASURED, err
    assert (tmp_path / "report.json").exists()


async def test_a_run_without_any_success_exits_with_1(tmp_path: Path) -> None:
    """The probe succeeds, every later request fails."""
    faults: list[Fault] = ["none", *["429"] * 20]
    code, out, _, _ = await _against(
        Behavior(ttft=0, faults=faults), "run", "--requests", "20", *QUICK, "--json", tmp_path / "r.json"
    )
    assert code == 1, "nothing could be measured"
    assert "http_429" in out
    rows = _rows(tmp_path / "r.json")
    assert rows["errors.http_429"] == rows["requests.failed"] == rows["requests.sent"] == 20
    assert "ttft.p50" not in rows


async def test_a_server_that_refuses_everything_ends_the_run() -> None:
    faults: list[Fault] = ["none", *["429"] * 100_000]
    behavior = Behavior(ttft=0, faults=faults)
    code, out, err, _ = await _against(behavior, "run", "--duration", FOREVER, *QUICK)
    assert code == 1
    assert "stopped, because the server refused 20 requests in a row: http_429" in err
    assert "INCOMPLETE" in out


def _refused(at: float, failure: Failure | None = Failure.REFUSED) -> Record:
    return Record(index=0, intended=at, sent=at, ended=at, failure=failure)


def test_only_refusals_in_a_row_end_a_run() -> None:
    def hopeless(*records: Record, answering: int = 0) -> list[bool]:
        refusals = Refusals()
        return [refusals.are_hopeless(record, answering) for record in records]

    row = [_refused(n / 10) for n in range(30)]
    assert hopeless(*row).index(True) == REFUSALS - 1
    assert not any(hopeless(*row, answering=1)), "a server that is full answers others"
    assert not any(hopeless(*row[:15], _refused(1.5, None), *row[15:])), "one request succeeded"
    assert not any(hopeless(*(_refused(n / 1000) for n in range(100)))), (
        "a burst of refusals does not end a run"
    )
    assert not any(hopeless(*(_refused(n / 10, Failure.STREAM_ERROR) for n in range(30))))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("run", "--url", "http://127.0.0.1:1"), "no answer"),
        (("run", "--rate", "0"), "--rate 0 must be a positive number"),
        (("run", "--slo", "nonsense"), "--slo 'nonsense'"),
        (("sweep",), "one of --rate, --find-rate, and --concurrency"),
        (("sweep", "--rate", "1,x"), "--rate '1,x'"),
        (("sweep", "--find-rate", "4"), "--find-rate needs an objective"),
        (("sweep", "--find-rate", "0", "--slo", "ttft.p99=300"), "--find-rate 0 must be a positive number"),
        (("sweep", "--rate", "1", "--find-rate", "3"), "one of --rate, --find-rate, and --concurrency"),
        (("sweep", "--rate", "1,2", "--concurrency", "3,4"), "with rates give one number"),
        (("sweep", "--rates", "1,2"), "Baton does not have this. Give --rate to"),
        (("sweep", "--concurrency", "1.5"), "whole numbers"),
        (("compare", "a.json"), "compare a.json: with what"),
        (("compare", "nowhere.json", "b.json"), "nowhere.json: no report"),
    ],
)
def test_a_mistake_in_the_options_exits_with_2_and_a_server_that_is_down_with_1(
    args: tuple[str, ...], said: str
) -> None:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == (1 if said == "no answer" else 2)
    assert said in result.stderr


async def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    async with MockServer(Behavior(ttft=0.01)) as server:
        process = await _start(
            "run", "--url", server.url, "--duration", FOREVER, "--input-len", "20", "--output-len", "4",
            "--advanced.processes", "2", "--concurrency", "4", "--quiet", "--json", tmp_path / "r.json",
        )  # fmt: skip
        await server.requests(40)
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert "INCOMPLETE" in out.decode()
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["detail"]["incomplete"] is True
    assert report["detail"]["interrupted"] >= 1
    rows = _rows(tmp_path / "r.json")
    assert rows["requests.ok"] >= 20
    assert rows["requests.failed"] == 0


async def test_ctrl_c_before_the_first_answer_exits_with_130() -> None:
    async with MockServer(Behavior(ttft=3600.0)) as server:
        process = await _start("run", "--url", server.url, "--quiet", *QUICK)
        await server.requests(1)
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in err


async def test_clients_end_with_their_parent() -> None:
    async with MockServer(Behavior(ttft=0.01)) as server:
        process = await _start("run", "--url", server.url, "--quiet", "--duration", FOREVER, *QUICK)
        await server.requests(20)
        process.kill()
        await process.communicate()  # they share the output of the parent, so it returns when they are gone


async def test_a_sweep_writes_the_rows_of_every_load(tmp_path: Path) -> None:
    code, out, err, served = await _against(
        Behavior(ttft=0.01), "sweep", "--concurrency", "1,3", "--duration", "0.5", *QUICK,
        "--json", tmp_path / "r.json",
    )  # fmt: skip
    prompts = [str(s.prompt) for s in served]
    assert code in MEASURED, err
    assert "Sweep" in out
    points = json.loads((tmp_path / "r.json").read_text())["detail"]["points"]
    assert [point["parameters"]["load"] for point in points] == [
        "closed loop, 1 user", "closed loop, 3 users",
    ]  # fmt: skip
    assert {f"concurrency={users}.throughput.requests" for users in (1, 3)} <= {*_rows(tmp_path / "r.json")}
    # Each load has its probe and otherwise new prompts, so that no prefix cache helps the later loads.
    assert len(set(prompts)) == len(prompts) - 1


async def test_a_search_without_a_good_rate_exits_with_1(tmp_path: Path) -> None:
    code, _, err, _ = await _against(
        Behavior(ttft=0.01), "sweep", "--find-rate", "0.02", "--advanced.burstiness", "inf",
        "--requests", "1", "--slo", "ttft.p50=1ms", *QUICK, "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert code in (1, 3), err
    assert "max_rate" not in _rows(tmp_path / "r.json")
    assert "No rate meets ttft.p50=1ms" in err or code == 3


QUESTION = {"role": "user", "content": "Why?"}
SHAREGPT = [
    {"conversations": [
        {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So." * 8},
        {"from": "human", "value": "And?"}, {"from": "gpt", "value": "Thus" * 3},
    ]},
    {"conversations": [{"from": "gpt", "value": "No question."}]},
]  # fmt: skip
BATCH = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
DATASETS: dict[str, tuple[str, list[tuple[list[str], int]]]] = {
    "ShareGPT": (json.dumps(SHAREGPT), [(["Why?"], 6), (["Why?", "ANSWER", "And?"], 3)]),
    "messages": (
        "\n".join(
            json.dumps({"messages": [{"role": "system", "content": "Be."}, QUESTION], "max_tokens": n})
            for n in (2, 3)
        ),
        [(["Be.", "Why?"], 2), (["Be.", "Why?"], 3)],
    ),
    "batch": (
        json.dumps(BATCH | {"body": {"model": "x", "max_completion_tokens": 4, "messages": [QUESTION]}}),
        [(["Why?"], 4)],
    ),
}


@pytest.mark.parametrize("form", DATASETS)
async def test_a_dataset_is_sent_as_it_is_and_once(tmp_path: Path, form: str) -> None:
    text, expected = DATASETS[form]
    file = tmp_path / "data"
    file.write_text(text)
    code, _, err, served = await _against(
        Behavior(ttft=0.001), "run", "--dataset", file, "--api", "chat", "--concurrency", "1",
        "--warmup", "0", "--advanced.processes", "1", "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert code in MEASURED, err
    asked = [each for each in served if "Why?" in str(each.prompt)]
    assert len(asked) == len(expected)
    for each, (contents, length) in zip(asked, expected, strict=True):
        assert each.max_tokens == length
        for content in set(contents) - {"ANSWER"}:
            assert content in str(each.prompt)
    assert json.loads((tmp_path / "r.json").read_text())["parameters"]["workload"] == {"dataset": "data"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "has no questions"), ("[1]", "record 1 is no object"), ("{", "cannot be read"),
     ('{"messages": 5}', "record 1 has no messages"), ('{"messages": [{"content": 5}]}', "is no text")],
)  # fmt: skip
def test_a_dataset_of_another_form_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "data"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_dataset(file, first=None, output_len=None)


async def test_replay_keeps_the_lengths_and_times_of_the_trace(tmp_path: Path) -> None:
    code, _, err, [_, _, *served] = await _against(
        Behavior(ttft=0, gaps=(0,)),
        "replay",
        "--speed",
        "40",
        "--json",
        tmp_path / "r.json",
        "--advanced.jsonl",
        tmp_path / "r.jsonl",
    )  # the first ones are the probes of text and of token ids
    assert code in MEASURED, err
    lines = read_trace(SAMPLE_TRACE)
    assert sorted(s.prompt_tokens for s in served) == sorted(line.input_length for line in lines)
    assert sorted(s.max_tokens for s in served) == sorted(line.output_length for line in lines)
    sent = [json.loads(line)["intended"] for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert sent == pytest.approx([(line.timestamp - lines[0].timestamp) / 1e3 / 40 for line in lines])
    assert _rows(tmp_path / "r.json")["input.off"] == 0


def test_compare_takes_several_reports(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    report = report_of_a_run().as_dict()
    old.write_text(json.dumps(report))
    for row in report["results"]:
        for end in {"value", "low", "high"} & {*row} if row["name"] == "itl.p90" else ():
            row[end] *= 1.2
    new.write_text(json.dumps(report))

    def code(*args: object) -> int:
        return CliRunner().invoke(app, list(map(str, args))).exit_code

    slower = ("--fail-if", "itl.p90>+5%")
    assert code("compare", old, new) == code("compare", new, old, *slower) == 0
    assert code("compare", old, new, "--html", tmp_path / "both.html") == 0
    assert '"name": "old"' in (tmp_path / "both.html").read_text()
    assert code("compare", old, new, "--fail-if", "ttft.p50>+5%", *slower) == 1
    assert code("compare", old, old, new, *slower) == 1, "a condition that holds for any later report fails"
    assert code("compare", old, new, "--fail-if", "no.such.row>+5%") == 2
