"""`baton chat` and `baton status` against a server that speaks just enough of the API."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from baton.bench.lab.router.stand_in import Lanes
from baton.cluster.cli import app
from baton.cluster.tools import status
from baton.cluster.tools.ask_workers import report_of
from baton.cluster.tools.status import device_of, name_of
from baton.rpc import worker_pb2 as pb
from baton.rpc.plain import plain
from baton.system.python_path import PACKAGES
from baton.system.words import counted
from tests.fake_worker import SECRET, FakeWorker
from tests.within import WITHIN

STATUS: dict[str, Any] = {
    "router": {"ready": False},
    "workers": [
        {
            "role": "decode", "index": 0, "incarnation": "7cd5cd6aa2f23fee", "state": "ready",
            "address": "127.0.0.1:5", "description": {"device": "cuda", "tensor_parallel_size": 2},
            "status": {"requests_running": 3, "requests_waiting": 1, "blocks_free": 6, "blocks_total": 8},
        },
        {
            "role": "prefill", "index": 0, "state": "connecting", "address": "127.0.0.1:4", "status": None,
            "reason": "nothing listens at this address", "remedy": "Start it.",
        },
    ]
}  # fmt: skip


CARD: dict[str, Any] = {"id": "tiny", "default_sampling_params": {"temperature": 0.6, "top_k": 20}}


class Router(BaseHTTPRequestHandler):
    """Answers every chat with the words of its last question, each a token; "wait" never ends."""

    requests: list[dict[str, Any]] = []  # noqa: RUF012
    asked = threading.Event()

    def do_GET(self) -> None:
        if self.headers.get("Authorization") == "Bearer wrong":
            self._json(401, {"error": {"message": "unknown key"}})
        else:
            self._json(200, STATUS if self.path == "/status" else {"data": [CARD]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(request)
        question = request["messages"][-1]["content"]
        if question == "bad":
            self._json(400, {"error": {"message": "messages: too bad"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        words = question.split()
        for word in words:
            self._event({"choices": [{"delta": {"content": word.upper() + " "}}]})
        if question == "wait":
            self.asked.set()
            threading.Event().wait(5)
        if question == "broken":
            self._event({"error": {"message": "the engine is gone"}})
            return
        if question == "long":
            self._event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        self._event({"choices": [], "usage": {"completion_tokens": len(words)}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Router.requests.clear()
    Router.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Router)
    server.daemon_threads = True
    server.handle_error = lambda request, client_address: None  # a client that interrupts is no error
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run_baton(*args: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, args, input=typed)


def test_one_question(url: str) -> None:
    result = run_baton(
        "chat", "--url", url, "--advanced.system", "be brief", "--advanced.max-tokens", "9", "how are you"
    )
    assert result.exit_code == 0
    assert result.stdout == "HOW ARE YOU \n"
    assert re.search(r"first token after \d+ ms, 3 tokens, then [\d.]+ tokens/s", result.stderr)
    [request] = Router.requests
    assert request["model"] == "tiny", "the first one served"
    assert [m["role"] for m in request["messages"]] == ["system", "user"]
    assert (request["max_tokens"], request["stream"]) == (9, True)
    assert "temperature" not in request, "the server's default"
    assert run_baton("chat", "--url", url, "--model", "other", "hi").exit_code == 0
    assert Router.requests[-1]["model"] == "other"


def test_an_answer_has_an_end_also_without_a_limit(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    assert "cut for length" not in run_baton("chat", "--url", url, "hi").stderr
    monkeypatch.setitem(CARD, "max_model_len", 512)
    result = run_baton("chat", "--url", url, "long")
    assert [request["max_tokens"] for request in Router.requests] == [2048, 512]
    assert "cut for length: --advanced.max-tokens" in result.stderr


def test_a_chat_remembers_its_turns(url: str) -> None:
    result = run_baton("chat", "--url", url, typed="one\n\ntwo words\n")
    assert result.exit_code == 0
    assert [m["content"] for m in Router.requests[1]["messages"]] == ["one", "ONE ", "two words"]
    assert "Sampling defaults of the server: temperature 0.6, top_k 20." in result.stdout


def test_a_failed_turn_does_not_end_the_chat_and_is_forgotten(url: str) -> None:
    result = run_baton("chat", "--url", url, typed="bad\nbroken\ngood\n")
    assert "400 messages: too bad" in result.stderr
    assert "the engine is gone" in result.stderr
    assert [m["content"] for m in Router.requests[2]["messages"]] == ["good"]
    assert "GOOD" in result.stdout


@pytest.mark.all
def test_ctrl_c_interrupts_the_answer_and_keeps_its_received_part(url: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "baton.cluster.cli", "chat", "--url", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": PACKAGES, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("wait\n")
    process.stdin.flush()
    assert Router.asked.wait(WITHIN)
    shown = b""
    while b"WAIT" not in shown:
        shown += os.read(process.stdout.fileno(), 4096)
    process.send_signal(signal.SIGINT)
    process.stdin.write("more\n")
    process.stdin.flush()
    out, err = process.communicate(timeout=WITHIN)
    assert process.returncode == 0, err
    assert "MORE" in out
    assert [m["content"] for m in Router.requests[1]["messages"]] == ["wait", "WAIT ", "more"]


def test_status_as_a_table_and_as_json(url: str) -> None:
    result = run_baton("status", "--url", url)
    assert result.exit_code == 1, "the router is not ready"
    lines = result.stdout.splitlines()
    assert lines[1].split()[:4] == ["prefill", "0", "prefill", "connecting"]
    assert lines[2].split()[:4] == ["decode", "0", "decode", "ready"]
    assert lines[2].split()[4:9] == ["3", "1", "25%", "2", "GPUs"]
    assert lines[3] == "prefill 0 at 127.0.0.1:4 is connecting: nothing listens at this address. Start it."
    assert json.loads(run_baton("status", "--url", url, "--json").stdout) == STATUS


@pytest.mark.parametrize(
    ("description", "shown"),
    [
        ({"device": "cuda:0", "tensor_parallel_size": 1}, "1 GPU"),
        ({"device": "cuda", "tensor_parallel_size": 4}, "4 GPUs"),
        ({"device": "cpu", "tensor_parallel_size": 1}, "CPU"),
        ({"device": "cpu", "tensor_parallel_size": 3}, "CPU, 3 ranks"),
        ({"device": "", "tensor_parallel_size": 0}, ""),  # not reached yet
        (None, ""),
    ],
)
def test_the_device_of_a_worker(description: dict[str, Any] | None, shown: str) -> None:
    assert device_of({"description": description}) == shown


def test_status_shows_the_present_pool_beside_the_name(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    worker = STATUS["workers"][0]
    moved = {**worker, "index": 1, "status": worker["status"] | {"pool": "pool_prefill"}}
    monkeypatch.setitem(STATUS, "workers", [worker, moved])
    monkeypatch.setitem(STATUS, "router", {"ready": True})
    result = run_baton("status", "--url", url)
    assert [line.split()[:3] for line in result.stdout.splitlines()[1:]] == [
        ["decode", "0", "decode"], ["decode", "1", "prefill"],
    ]  # fmt: skip
    assert result.exit_code == 0, "the router is ready"


def test_status_shows_the_transports_of_kv(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    status = pb.WorkerStatus(
        kv_transports={"decode 1": "tcp: another machine", "decode 2": "cuda_ipc", "decode 0": "cuda_ipc"}
    )
    worker = {"role": "prefill", "index": 3, "state": "ready", "status": plain(status)}
    monkeypatch.setitem(STATUS, "workers", [worker])
    shown = run_baton("status", "--url", url).stdout
    assert "KV from prefill 3: cuda_ipc (decode 0, decode 2); tcp: another machine (decode 1)\n" in shown


def test_bytes_of_reports_are_text() -> None:
    shown = plain(pb.WorkerStatus(adapters_on_device=[b"\x01", b"\xff"], released=["kv"]))
    assert (shown["adapters_on_device"], shown["released"]) == (["01", "ff"], ["kv"])
    assert json.dumps(shown)


def test_status_shows_the_router_and_its_last_failures(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    failure = {
        "at": 0, "request_id": "mine", "code": "lost", "worker": "decode 0 at 127.0.0.1:4",
        "message": "decode 0 was lost", "remedy": "see its log",
    }  # fmt: skip
    minute = {"requests": 120, "errors": 1}
    router = {"version": "1.2", "uptime_seconds": 300, "last_minute": minute, "failures": [failure]}
    monkeypatch.setitem(STATUS, "router", {"ready": True, **router})
    shown = run_baton("status", "--url", url).stdout
    assert "Router: Baton 1.2, up 5 min; last minute: 120 requests ended, 1 error\n" in shown
    told = "request mine: lost at decode 0 at 127.0.0.1:4: decode 0 was lost. Remedy: see its log\n"
    assert told in shown


async def test_status_asks_workers_where_no_router_runs() -> None:
    worker = await FakeWorker(pb.POOL_DECODE, Lanes(), [], index=4).start()
    try:
        addresses = [worker.address, "127.0.0.1:9"]
        report = await report_of(addresses, SECRET, None)
        refused = await report_of(addresses[:1], b"another secret of another cluster", None)
    finally:
        await worker.kill()
    assert not report["router"]["ready"]
    names = [(name_of(each), each["state"]) for each in report["workers"]]
    assert names == [("decode 4", "ready"), ("?", "silent")]
    assert "UNAVAILABLE" in report["workers"][1]["reason"]
    assert [each["state"] for each in refused["workers"]] == ["silent"]
    status.show(report)


def test_status_shows_each_address_in_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Several workers may have one number, and those that never described themselves have none."""
    unknown = {
        "role": "unknown",
        "index": 0,
        "incarnation": "0" * 16,
        "state": "connecting",
        "reason": "no way",
    }
    more = [{"role": "prefill", "index": 0, "state": "ready", "address": "127.0.0.1:6"}]
    more += [{**unknown, "address": address} for address in ("127.0.0.1:7", "127.0.0.1:8", "127.0.0.1:9")]
    supervised = {
        "role": "decode", "index": 1, "phase": "ready", "address": "127.0.0.1:9", "crash_loop": False,
        "leaving": False, "node": "", "restarts": 0, "last_exit": "",
    }  # fmt: skip
    monkeypatch.setitem(STATUS, "workers", [*STATUS["workers"], *more])
    monkeypatch.setitem(STATUS, "cluster", {"roles": [supervised], "pools": {}})
    lines = run_baton("status", "--url", url).stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:7]] == [
        "prefill 0", "prefill 0", "decode 0", "decode 1", "127.0.0.1:7", "127.0.0.1:8",
    ]  # fmt: skip
    addresses = [re.findall(r"127\.0\.0\.1:\d", line) for line in lines[1:7]]
    assert addresses == [[f"127.0.0.1:{port}"] for port in (4, 6, 5, 9, 7, 8)]
    assert lines[0].split()[:2] == ["worker", "address"], "names that two have tell nothing"
    assert "worker at 127.0.0.1:7 is connecting: no way." in lines
    assert "decode 1 at 127.0.0.1:9 is connecting: no way." in lines


def test_status_shows_what_only_the_supervisor_knows(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    common = {"stage": "ready", "address": None, "crash_loop": False, "leaving": False, "node": "host-a"}
    roles = [
        common | {"role": "decode", "index": 0, "phase": "ready", "restarts": 2, "last_exit": "was killed"},
        common | {"role": "decode", "index": 1, "phase": "starting", "restarts": 0, "last_exit": ""}
        | {"stage": "loading weights"},
        common | {"role": "prefill", "index": 1, "phase": "waiting", "restarts": 7, "last_exit": "[no] room"}
        | {"crash_loop": True},
        common | {"role": "router", "index": 0, "phase": "ready", "restarts": 0, "last_exit": ""},
    ]  # fmt: skip
    pool = {"size": 2, "ready": 1, "least": 1, "most": 4, "group": 1, "needed": 1.7, "why": "the queue"}
    one = pool | {"size": 1}
    monkeypatch.setitem(
        STATUS, "cluster", {"roles": roles, "pools": {"prefill": pool | {"group": 2}, "decode": one}}
    )
    lines = run_baton("status", "--url", url).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["prefill", "0"], ["prefill", "1"], ["decode", "0"], ["decode", "1"],
    ]  # fmt: skip
    assert "CRASH LOOP" in lines[2]
    assert re.search(r" 7 .* host-a .* \[no\] room$", lines[2].rstrip())
    assert lines[3].split()[3] == "ready"
    assert re.search(r" 2 .* host-a .* was killed$", lines[3].rstrip())
    assert "starting" in lines[4]
    assert "decode 1 is starting: loading weights" in lines
    assert "prefill 1 has ended ([no] room); it keeps crashing: see its log" in lines
    assert lines[-2:] == [
        "prefill: 2 groups of 2 workers (1 to 4), 1.7 needed: the queue",
        "decode: 1 worker (1 to 4), 1.7 needed: the queue",
    ]


def test_status_fits_into_the_terminal(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Nothing is cut: what a table has no room for is named, and shown in a pipe."""
    role = {"stage": "ready", "phase": "ready", "crash_loop": False, "leaving": False, "restarts": 12345}
    role |= {
        "node": "gpu-node-17.region.example.com",
        "last_exit": "the engine process was killed by SIGKILL",
    }
    workers = [
        STATUS["workers"][0] | {"index": index, "address": f"10.200.100.{index}:7001"} for index in (0, 120)
    ]
    roles = [role | {name: worker[name] for name in ("role", "index", "address")} for worker in workers]
    router: dict[str, Any] = {
        "ready": True,
        "handovers": 7,
        "split_prompts": 2,
        "overflow": {"short": 3, "cached": 0},
    }
    router["overflow_why"] = {"short": "on a decode worker: the prompt is short"}
    monkeypatch.setitem(STATUS, "workers", workers)
    monkeypatch.setitem(STATUS, "cluster", {"roles": roles, "pools": {}})
    monkeypatch.setitem(STATUS, "router", router)
    for columns in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        default = run_baton("status", "--url", url).stdout
        assert max(map(len, default.splitlines())) <= columns
        assert "…" not in default
        assert "last exit." in default.replace("\n", " "), "the last column is named"
        requests = "Requests: 7 with a handover (2 prompts split), 3 on one worker "
        requests += "3 on a decode worker: the prompt is short (short)"
        assert requests in " ".join(default.split())
        assert {"decode 120", "running", "KV used"} <= set(re.split(r"\s{2,}", default.replace("\n", "  ")))
    monkeypatch.delenv("COLUMNS")
    piped = run_baton("status", "--url", url).stdout
    (line,) = [each for each in piped.splitlines() if each.startswith("decode 120")]
    for word in ("7cd5cd6aa2f23fee", "was killed by SIGKILL", "gpu-node-17.region.example.com", "12345"):
        assert word in line


def test_weights_at_a_relative_path_are_those_of_this_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str
) -> None:
    """Workers run in other directories."""
    asked = list[str]()

    async def replace(path: str, *_: object) -> str:
        asked.append(path)
        return "done"

    monkeypatch.setattr("baton.cluster.tools.weights._replace", replace)
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "s" * 32)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new").mkdir()
    for path in ("new", "./new", "/on/the/workers"):
        assert run_baton("weights", path, "--url", url).exit_code == 0
    assert asked == [str(tmp_path / "new"), str(tmp_path / "new"), "/on/the/workers"]
    missing = run_baton("weights", "old", "--url", url)
    assert missing.exit_code == 2
    assert f"old: no such file or directory in {tmp_path}; give the absolute path" in missing.stderr.replace(
        "\n", " "
    )
    assert len(asked) == 3


def test_a_missing_server_and_a_wrong_key_are_clear_errors(url: str) -> None:
    gone = run_baton("status", "--url", "http://127.0.0.1:9")
    assert gone.exit_code == 2
    assert "--url http://127.0.0.1:9" in gone.stderr
    assert "baton serve" in gone.stderr
    for path in ("/", "/v1", "/v1/"):  # clients of OpenAI's API have /v1
        assert json.loads(run_baton("status", "--json", "--url", url + path).stdout) == STATUS
    for other in ("ftp://127.0.0.1", "127.0.0.1:8000"):
        wrong = run_baton("status", "--url", other)
        assert wrong.exit_code == 2
        assert f"--url {other}: it must begin with http:// or https://" in wrong.stderr
    for other in ("http://", "http://:80", "http://127.0.0.1:x", "http://127.0.0.1:99999", "http://a:1,b:2"):
        wrong = run_baton("status", "--url", other)
        assert (wrong.exit_code, wrong.stderr) == (
            2, f"Error: --url {other}: it must have the form http://HOST:PORT\n",
        )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as grpc:  # answers with a frame of HTTP/2
        address = f"http://127.0.0.1:{grpc.getsockname()[1]}"

        def answer() -> None:
            connection, _ = grpc.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(bytes(4) + b"\x04" + bytes(4))

        answering = threading.Thread(target=answer)
        answering.start()
        other = run_baton("status", "--url", address)
        answering.join()
    assert f"--url {address}: what answers there is not the HTTP port of a router" in other.stderr
    refused = run_baton("status", "--url", url, "--api-key", "wrong")
    assert refused.exit_code == 2
    assert "unknown key" in refused.stderr
    assert "set BATON_API_KEY to a key" in refused.stderr


def test_status_shows_how_kv_and_states_share_memory() -> None:
    worker: dict[str, Any] = {
        "role": "decode",
        "index": 0,
        "status": {"kv_memory_bytes": 3 << 30, "state_memory_bytes": 1 << 29},
    }
    assert status.memory(worker) == "memory of decode 0: KV 3.00 GiB, states 0.50 GiB, moved as needed"
    worker["status"] = {"kv_memory_bytes": 3 << 30, "window_memory_bytes": 1 << 30}
    assert status.memory(worker) == "memory of decode 0: KV 3.00 GiB, windows 1.00 GiB, moved as needed"
    assert not status.memory({"role": "decode", "index": 0, "status": None})


def test_status_shows_what_a_standby_takes() -> None:
    worker: dict[str, Any] = {"role": "decode", "index": 0, "status": {}}
    assert status.standby(worker) == ""
    worker["status"] = {"standby": "ready", "standby_memory_bytes": 3 << 29}
    assert status.standby(worker) == "standby of decode 0: ready, with 1.50 GiB"
    worker["status"] = {"standby": "ended"}
    assert status.standby(worker).startswith("standby of decode 0: none; ")


@pytest.mark.parametrize(("number", "told"), [(0, "0 workers"), (1, "1 worker"), (1200, "1,200 workers")])
def test_what_is_counted_has_its_number(number: int, told: str) -> None:
    assert counted(number, "worker") == told
