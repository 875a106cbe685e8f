"""`baton doctor`: what is wrong is found, and each finding says what to do."""

import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from typer.testing import CliRunner

from baton.cluster.cli import app
from baton.cluster.options.clients import DoctorEndpointOptions, DoctorOptions, EndpointOptions, JsonOptions
from baton.cluster.tools.doctor import command, node
from baton.cluster.tools.doctor.finding import Finding, bad, good, warning
from baton.cluster.tools.doctor.running import MOST_PAIRS, running, workers
from baton.rpc.tls import TlsFiles
from tests.conftest import Certificates

SECRET = b"a secret for the doctor"


def level(findings: Any, check: str) -> str:
    [found] = [finding for finding in findings if finding.check == check]
    return found.level


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A /proc and a /sys of a poor machine."""
    (tmp_path / "proc/sys/net/core").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000000 kB\nMemAvailable:  1000000 kB\n")
    (tmp_path / "proc/sys/net/core/rmem_max").write_text("212992\n")
    (tmp_path / "proc/sys/net/core/somaxconn").write_text("4096\n")
    for name, speed in (("eth0", "1000"), ("eth1", "100000"), ("tap0", "-1")):
        card = tmp_path / "sys/class/net" / name
        card.mkdir(parents=True)
        (card / "operstate").write_text("up\n")
        (card / "speed").write_text(speed + "\n")
    return tmp_path


def test_a_container_has_less_than_its_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    (root / "proc/meminfo").write_text("MemAvailable:  64000000 kB\n")
    [machine] = node.memory(root)
    assert (machine.level, machine.found) == ("good", "61.0 GiB free, 64 CPUs")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup/memory.max").write_text(f"{1 << 30}\n")
    (root / "sys/fs/cgroup/cpu.max").write_text("350000 100000\n")
    [container] = node.memory(root)
    assert (container.level, container.found) == ("bad", "1.0 GiB free, 4 CPUs")


def test_a_poor_machine(root: Path) -> None:
    assert level(node.memory(root), "memory") == "bad"
    cards = list(node.cards(root))
    assert [level(cards, f"network {name}") for name in ("eth0", "eth1", "tap0")] == [
        "warning",
        "good",
        "note",
    ]
    assert level(cards, "RDMA") == "note"
    limits = list(node.limits(root))
    assert level(limits, "net.core.rmem_max") == "warning"
    assert level(limits, "net.core.wmem_max") == "note", "what a container hides is no fault"
    assert level(limits, "net.core.somaxconn") == "good"


def test_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_CLUSTER_SECRET", raising=False)
    file = tmp_path / "secret"
    for text, mode, expected in (
        (b"short", 0o600, "bad"),
        (SECRET, 0o644, "warning"),
        (SECRET, 0o600, "good"),
    ):
        file.write_bytes(text)
        file.chmod(mode)
        found = list(node.secret(DoctorOptions(cluster_secret_file=file)))
        assert [finding.level for finding in found] == [expected]
        assert all(SECRET.decode() not in str(finding) for finding in found)
    assert [finding.level for finding in node.secret(DoctorOptions())] == ["note"]


def test_a_model_that_is_not_there() -> None:
    [found] = node.the_model(DoctorOptions(model="/no/such/model"))
    assert found.level == "bad"
    assert "/no/such/model" in found.found


WORKER = {
    "state": "ready",
    "description": {"dtype": "float32"},
    "status": {"blocks_total": 100, "blocks_free": 90},
}


def worker(role: str, index: int, **changes: Any) -> dict[str, Any]:
    return {"role": role, "index": index, **WORKER, **changes}


def test_a_cluster_without_prefill_workers() -> None:
    for complete, expected in ((True, "note"), (False, "bad")):
        assert level(workers([worker("decode", 0)], complete=complete), "prefill workers") == expected


def test_each_pool_names_the_devices_of_its_workers() -> None:
    """Pools and workers of different sizes are no fault."""

    def of(role: str, index: int, gpus: int) -> dict[str, Any]:
        size = {"device": "cuda", "tensor_parallel_size": gpus}
        return worker(role, index, description=WORKER["description"] | size)  # type: ignore[operator]

    found = [*workers([of("prefill", 0, 2), of("decode", 0, 1), of("decode", 1, 4)], complete=True)]
    assert {f.level for f in found} == {"good"}
    told = {f.check: f.found for f in found}
    assert told["prefill workers"] == "1 ready, each on 2 GPUs"
    assert told["decode workers"] == "2 ready, each on 1 GPU or 4 GPUs"


def test_a_pool_without_a_ready_worker() -> None:
    unreachable = worker("decode", 0, state="unreachable", reason="refused")
    assert level(workers([worker("prefill", 0), unreachable], complete=False), "decode workers") == "bad"


def test_the_kv_of_each_worker_is_named() -> None:
    dtypes = {"prefill": "bfloat16", "decode": "float8_e4m3fn"}
    both = [
        worker(role, 0, description={"dtype": dtype, "kv_token_bytes": 512}) for role, dtype in dtypes.items()
    ]
    [found] = [finding for finding in workers(both, complete=True) if finding.check == "KV cache"]
    expected = "good: bfloat16, 512 bytes a token: prefill 0; float8_e4m3fn, 512 bytes a token: decode 0"
    assert f"{found.level}: {found.found}" == expected


def test_links_are_told_and_those_that_are_slow_or_behind() -> None:
    def decode(index: int, rate: float, waiting: int) -> dict[str, Any]:
        link = {"incarnation": "a", "bytes_per_s": rate, "used": 0.25 * index, "bytes_waiting": waiting}
        return worker("decode", index, incarnation=f"d{index}", status={"kv_links": [link]})

    slow, behind, usual = decode(1, 0.125e9, 0), decode(2, 3e9, 6_000_000_000), decode(3, 3.1e9, 0)
    rows = [worker("prefill", 0, incarnation="a"), slow, behind, usual]
    told = [(f.level, f.check, f.found) for f in workers(rows, complete=True) if "link" in f.check]
    assert told == [
        ("warning", "KV link prefill 0 → decode 1", "0.12 GB/s, 25% used"),
        ("warning", "KV link prefill 0 → decode 2", "3.00 GB/s, 50% used, 2.0 s behind"),
        ("good", "KV links", "3 links, 0.12 to 3.10 GB/s, up to 75% used"),
    ]


def test_a_decode_pool_that_is_nearly_full() -> None:
    full = worker("decode", 3, status={"blocks_total": 100, "blocks_free": 2})
    assert level(workers([worker("prefill", 0), full], complete=True), "decode 3") == "warning"


def test_a_missing_router_is_a_bad_finding() -> None:
    """The only one: with --url the command looks at that cluster alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    result = CliRunner().invoke(app, ["doctor", "--json", "--url", url])
    assert [(f["check"], f["level"]) for f in json.loads(result.output)] == [("router", "bad")]


def test_an_admin_port_alone_names_no_cluster() -> None:
    """This machine is not checked in its place."""
    result = CliRunner().invoke(app, ["doctor", "--advanced.admin-url", "http://127.0.0.1:1"])
    assert result.exit_code == 2
    assert "give --url, too" in result.output


def test_every_unused_worker_is_a_finding() -> None:
    """By address, with the router's own reason and remedy. What may come back by itself is a warning."""
    refused = {
        "role": "unknown",
        "index": 0,
        "state": "refused",
        "reason": "a model",
        "remedy": "Mend it.",
    }
    found = list(
        workers(
            [
                worker("prefill", 0), worker("decode", 0), {**refused, "address": "a:1"},
                {**refused, "address": "a:2"},
                worker("decode", 0, state="connecting", reason="", address="a:3"),
            ],
            complete=True,
        )
    )  # fmt: skip
    told = {f.check: (f.level, f.found, f.remedy) for f in found if f.level not in ("good", "note")}
    assert told == {
        "worker at a:1": ("bad", "refused: a model", "Mend it."),
        "worker at a:2": ("bad", "refused: a model", "Mend it."),
        "decode 0 at a:3": ("warning", "connecting: no reason known", "Look at the worker's log."),
    }


@asynccontextmanager
async def front(
    *,
    tokens: int = 3,
    admin: bool = True,
    processes: bool = False,
    tls: ssl.SSLContext | None = None,
    size: tuple[int, int] = (1, 1),
    blocked: str = "",
) -> AsyncIterator[str]:
    """The ports of a router: `tokens` of an answer, and `/status` (`admin`; of several `processes`).

    `size`: of the pools. `blocked`: the address of a prefill worker from which no KV comes."""
    asked: dict[str, str] = {}
    listed = [worker("prefill", i, address=f"p{i}:1") for i in range(size[0])]
    listed += [worker("decode", i, address=f"d{i}:1") for i in range(size[1])]

    async def status(_: web.Request) -> web.Response:
        if not admin:
            return web.json_response(
                {"error": {"message": "/status is on the admin port, http://it"}}, status=404
            )
        failures = [
            {"request_id": name, "message": "no lane to 10.0.0.5:7002: timed out"}
            for name, pair in asked.items()
            if pair.startswith(blocked or "-")
        ]
        found = {"router": {"ready": True, "failures": failures}, "workers": listed}
        return web.json_response(found | ({"processes": []} if processes else {}))

    async def timeline(request: web.Request) -> web.Response:
        pair = asked[request.match_info["id"]]
        number = int(pair.split()[1][1:].partition(":")[0])
        joined = [] if pair.startswith(blocked or "-") else ["decode has the KV"]
        events = [
            {"what": what, "worker": f"decode {number} at d{number}:1"}
            for what in ["planned: handover", *joined]
        ]
        return web.json_response({"events": events})

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 3000}]})

    async def completions(request: web.Request) -> web.Response:
        words = len((await request.json())["prompt"].split())
        if "x-handover" in request.headers:
            asked[request.headers["x-request-id"]] = request.headers["x-handover"]
        return web.json_response({"usage": {"prompt_tokens": words, "completion_tokens": tokens}})

    app = web.Application()
    app.add_routes([web.get("/status", status), web.get("/status/requests/{id}", timeline)])
    if not processes:
        app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def looked_at(url: str, admin_url: str | None = None) -> list[Finding]:
    return [f async for f in running(DoctorOptions(admin_url=admin_url), EndpointOptions(url=url))]


async def test_a_request_that_comes_back_short() -> None:
    async with front(tokens=1) as url:
        assert level(await looked_at(url), "a request") == "bad"


async def test_each_pair_of_workers_hands_over() -> None:
    async with front(size=(2, 3)) as url:
        *_, found = await looked_at(url)
    assert (found.check, found.level) == ("handovers", "good")
    assert found.found.startswith("KV came over for 6 of 6 pairs of workers")


async def test_a_port_for_kv_that_is_blocked_is_found() -> None:
    async with front(size=(2, 2), blocked="p1:1") as url:
        *_, first, second, rest = await looked_at(url)
    assert {first.check, second.check} == {
        f"KV from prefill 1 at p1:1 to decode {i} at d{i}:1" for i in (0, 1)
    }
    assert (first.level, first.found) == (
        "bad",
        "the KV did not arrive (no lane to 10.0.0.5:7002: timed out)",
    )
    assert "the port for KV of prefill 1: look at firewalls" in first.remedy
    assert rest.found.startswith("KV came over for 2 of 4 pairs")


async def test_of_many_pairs_each_worker_is_in_one() -> None:
    async with front(size=(2, MOST_PAIRS)) as url:
        *_, told, found = await looked_at(url)
    assert told.found.startswith(f"{MOST_PAIRS} pairs are tried, in which each worker is")
    assert found.found.startswith(f"KV came over for {MOST_PAIRS} of {MOST_PAIRS} pairs")


async def test_a_cluster_with_tls(certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `/status` is on the admin port; the request goes to the port of clients."""
    made = TlsFiles(*certificates.server).server_context()
    async with front(admin=False, tls=made) as url, front(processes=True) as admin_url:
        [strange] = await looked_at(url)
        assert strange.level == "bad"
        assert "certificate is not trusted here" in strange.found
        assert "SSL_CERT_FILE" in strange.found
        [closed] = await looked_at(url.replace("https", "http"))
        assert "https://" in closed.found
        monkeypatch.setattr(aiohttp.connector, "_SSL_CONTEXT_VERIFIED", trusting(certificates))
        assert "bad" not in {finding.level for finding in await looked_at(url, admin_url)}
        status, asked = await looked_at(url)
        assert (status.check, status.level, asked.level) == ("status", "warning", "good")
        assert "/status is on the admin port, http://it" in status.found
        assert "--advanced.admin-url" in status.remedy
        *_, request = await looked_at(admin_url)
        assert (request.check, request.level) == ("a request", "warning")
        assert "is an admin port" in request.found


def trusting(certificates: Certificates) -> ssl.SSLContext:
    """As a process has it that was started with SSL_CERT_FILE."""
    return ssl.create_default_context(cafile=certificates.ca)


def test_the_command_as_json_and_its_exit_code() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--model", "./none"])
    assert result.exit_code == 1, result.output
    found = json.loads(result.output)
    assert {f["check"] for f in found} >= {"versions", "memory", "model"}
    assert all(bool(f["remedy"]) == (f["level"] in ("warning", "bad")) for f in found)


@pytest.mark.parametrize(("second", "code"), [(warning, 0), (bad, 1)])
def test_only_bad_findings_set_the_exit_code(
    second: Callable[..., Finding],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "node", lambda _: iter([good("a", "b"), second("c", "d", "e")]))
    assert command.run(DoctorOptions(), DoctorEndpointOptions(), JsonOptions()) == code
    marks = [command.MARKS[level].split("]")[1][0] for level in ("good", "bad" if code else "warning")]
    assert capsys.readouterr().out == f"{marks[0]} a: b\n{marks[1]} c: d\n    e\n"
