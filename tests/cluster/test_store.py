"""`baton store` and `baton serve --kv-store local`: what runs, and which mistakes of users are named."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import baton.cluster.serve
import baton.cluster.store
from baton.cluster.cli import app
from baton.cluster.options.roles import StoreOptions, StoreRole
from baton.cluster.supervision.blueprint import Blueprint
from baton.kv_transfer.shared_store.chunk_object import StoreKeys
from baton.system.addresses import free_port
from baton.worker import WorkerConfig  # noqa: F401 - the options of workers need it

URL = "mooncake://127.0.0.1:50051"
KEYS = """
[alice]
key = "k1"
salt = "team a"
[bob]
key = "k2"
"""


@pytest.fixture
def blueprint(monkeypatch: pytest.MonkeyPatch) -> Any:
    def parsed(*flags: str) -> Blueprint:
        blueprints: list[Blueprint] = []
        monkeypatch.setattr(baton.cluster.serve, "run", lambda blueprint: blueprints.append(blueprint) or 0)
        result = CliRunner().invoke(app, ["serve", "--device", "cpu", *flags])
        assert result.exit_code == 0, result.output
        return blueprints[0]

    return parsed


def test_serve_runs_a_store_that_its_workers_use(blueprint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = blueprint("--kv-store", "local?size=2GiB&max_age=60")
    *_, router, store = made.roles()
    assert [spec.role for spec in made.roles()] == ["prefill", "decode", "router", "store"]
    url = made.worker("prefill").transfer.kv_store
    assert url == made.worker("decode").transfer.kv_store
    assert url.startswith("mooncake://127.0.0.1:")
    assert url.endswith("?max_age=60")
    assert "--kv-store" not in router.args
    given: list[StoreRole] = []
    monkeypatch.setattr(baton.cluster.store, "run", lambda options: given.append(options) or 0)
    result = CliRunner().invoke(app, ["store", *store.args, "--index", "0"])
    assert result.exit_code == 0, result.output
    [options] = given
    assert (options.store.size, f":{options.store.port}?") == (
        "2GiB",
        url[len("mooncake://127.0.0.1") :][:-10],
    )
    assert [spec.role for spec in blueprint("--kv-store", URL).roles()] == ["prefill", "decode", "router"]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--kv-store", "local", "--ray-address", "10.0.0.1:6379"], "--kv-store local: is for one machine"),
        (["--kv-store", "local?size=much"], "'much' is not a size"),
    ],
)
def test_a_local_store_that_cannot_be(
    blueprint: Any, monkeypatch: pytest.MonkeyPatch, flags: list[str], error: str
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "x" * 64)
    with pytest.raises(ValueError, match=error):
        blueprint(*flags).roles()


class Client:
    """`ClientProcess`, of a store that is open."""

    patterns: list[str]

    def __init__(self, url: str, title: str) -> None:
        assert url == URL

    def open(self, size: int) -> None:
        pass

    def reason(self) -> str:
        return ""

    def call(self, connection: int, method: str, keys: str) -> int:
        assert method == "clear"
        Client.patterns.append(keys)
        return 7

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "Removed 7 objects."),
        (["--advanced.tenant", "alice"], "Removed 7 objects."),
        (["--advanced.tenant", "bob"], "--advanced.tenant bob: this key has no salt"),
        (["--advanced.tenant", "eve"], "--advanced.tenant eve: there is no such key; there are alice, bob"),
    ],
)
def test_clear(flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baton.cluster.store, "ClientProcess", Client)
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "s" * 32)
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    Client.patterns = []
    arguments = ["store", "clear", "--kv-store", URL, "--api-key-file", str(keys), *flags]
    result = CliRunner().invoke(app, arguments)
    assert message in result.output
    made = StoreKeys(b"s" * 32)
    of_alice = made.pattern(salt=baton.cluster.store._salt_of(keys, "alice")) if "alice" in flags else ""
    assert Client.patterns == ([] if result.exit_code else [of_alice or made.pattern()])


def test_clear_without_a_store_or_a_key_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "s" * 32)
    result = CliRunner().invoke(app, ["store", "clear"])
    assert "--kv-store: required" in result.output
    result = CliRunner().invoke(app, ["store", "clear", "--kv-store", URL, "--advanced.tenant", "alice"])
    assert "--advanced.tenant: names an API key of --api-key-file" in result.output


def test_a_master_that_does_not_lead_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it leads, a master of several listens for metrics alone."""
    started: list[tuple[list[list[str]], list[int]]] = []

    async def run(commands: list[list[str]], ports: list[int], *_: object) -> int:
        started.append((commands, ports))
        return 0

    monkeypatch.setattr(baton.cluster.store, "run_processes", run)
    port, metrics = free_port(), free_port()
    arguments = ["store", "serve", f"--port={port}", f"--metrics-port={metrics}"]
    for flags in (["--advanced.etcd=10.0.0.1:2379"], []):
        assert CliRunner().invoke(app, [*arguments, "--size=0", *flags]).exit_code == 0
    (with_etcd, alone), (ready_at, alone_ready_at) = zip(*started, strict=True)
    assert {"--enable_ha=true", "--etcd_endpoints=10.0.0.1:2379", "--enable_oplog=true"} < {*with_etcd[0]}
    assert (ready_at, alone_ready_at) == ([metrics], [port])
    assert not any("ha" in flag.split("_") for flag in alone[0])


async def test_the_processes_of_a_store_have_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Any peer of Mooncake may read their memory."""
    monkeypatch.setenv("BATON_CLUSTER_SECRET", "s" * 32)
    seen = tmp_path / "environment"
    command = ["sh", "-c", f"env > {seen}; exit 127"]
    assert await baton.cluster.store.run_processes([command], [1], StoreOptions(), None) == 1
    assert "sh exited with 127 (Debian: apt install libibverbs1)" in capfd.readouterr().err
    assert "PATH=" in seen.read_text()
    assert "BATON_" not in seen.read_text()
