"""Wrong values of a worker's configuration, and the addresses that it derives."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine import EngineConfig
from baton.kv_transfer import TransferDeadlines, shared_store
from baton.worker import WorkerConfig


def config(**fields: Any) -> WorkerConfig:
    given: dict[str, Any] = {"role": "prefill", "engine": EngineConfig("model"), "secret": b"x" * 16}
    return WorkerConfig(engine_module="engine", **given | fields)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"kv_lanes": 0}, "--advanced.kv-lanes: 0"),
        ({"kv_slots": 5}, "--advanced.kv-slots: 5"),
        ({"kv_slot_bytes": 100_000}, "--advanced.kv-slot-size: 100000"),
        ({"kv_connector": "nixl", "kv_encrypt": True}, "--kv-encrypt: NIXL"),
        ({"kv_connector": "nixl"}, r"--kv-connector: .*'\.\[nixl\]'"),
        (
            {"kv_store": "mooncake://host"},
            "--kv-store: 'mooncake://host' is no store; give mooncake://HOST:PORT",
        ),
        ({"kv_store": "mooncake://host:x"}, "--kv-store: 'mooncake://host:x'"),
        ({"kv_store": "redis://host:1"}, "--kv-store: 'redis://host:1'"),
        ({"kv_store": "missing://host:1"}, r"--kv-store: the package no_such_package .*'\.\[store\]'"),
        ({"kv_store": "mooncake://host:1?max_age=1d"}, "--kv-store: max_age=1d"),
        ({"kv_store": "mooncake://host:1", "engine_args": ()}, "--kv-store: .*--engine vllm"),
        ({"kv_bind": ("lo", "10.255.255.254")}, "--advanced.kv-bind: '10.255.255.254'"),
        (
            {"engine": EngineConfig("model", max_num_seqs=32_768, max_num_batched_tokens=32_768)},
            "--max-num-seqs",
        ),
        ({"kv_bind": ("no-such-nic",)}, "--advanced.kv-bind: 'no-such-nic'.*lo"),
        ({"kv_host": ("0.0.0.0",)}, "--advanced.kv-host: '0.0.0.0'"),
        ({"kv_host": ("",)}, "--advanced.kv-host: ''"),
        ({"kv_host": ("lo", "")}, "--advanced.kv-host: 'lo,'"),
        ({"kv_host": ("no such host",)}, "--advanced.kv-host: 'no such host' is neither"),
        ({"run_dir": "/tmp/" + "x" * 100}, "--advanced.run-dir: /tmp/xx"),
        ({"deadlines": TransferDeadlines(engine_dead=0)}, "--failure-timeout: 0"),
        ({"standby": True}, "a standby: only with --replace-engine"),
        ({"replace_engine": True, "engine_args": ()}, "--replace-engine: only for Baton's engine"),
        ({"drain_timeout": 1e6}, "--drain-timeout: 1000000.0"),
    ],
)
def test_an_error_names_the_flag_and_the_value(
    fields: dict[str, Any], flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kv_transfer.nixl.memory.WHEELS", ())  # as if it were not installed
    monkeypatch.setitem(shared_store.BACKENDS, "missing", ("module", "no_such_package"))
    with pytest.raises(ValueError, match=flag):
        config(**fields)


@pytest.mark.parametrize(
    ("connector", "device", "nics", "slots"),
    [
        ("nixl", "cuda", True, "cuda:0"),
        ("nixl", "cuda:2", True, "cuda:2"),
        ("nixl", "cuda", False, None),
        ("nixl", "cpu", True, None),
        ("auto", "cuda", True, None),
    ],
)
def test_nixl_reads_memory_of_gpus_where_nics_can(
    connector: Any, device: str, nics: bool, slots: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kv_transfer.nixl.memory.nics_read_gpus", lambda: nics)
    engine = EngineConfig("model", device=device)
    assert config(kv_connector=connector, engine=engine).reader_device() == slots


def test_the_representation_hides_the_secret() -> None:
    assert "xxxx" not in repr(config())


def test_decode_workers_get_kv_host_or_else_host() -> None:
    assert config(host="10.0.0.7").reachable_kv_hosts() == ("10.0.0.7",)
    assert config(host="0.0.0.0", kv_host=("10.0.0.8",)).reachable_kv_hosts() == ("10.0.0.8",)


@pytest.mark.parametrize(
    ("name", "address"), [("localhost", "127.0.0.1"), ("[::1]", "::1"), ("10.1.2.3", "10.1.2.3")]
)
def test_decode_workers_get_a_numeric_address(name: str, address: str) -> None:
    """Peers look up no name."""
    for each in (config(host=name), config(kv_host=(name,))):
        assert each.reachable_kv_hosts() == (address,)
        assert each.lane_sources == ()
    assert config(host="[::1]").kv_listen_hosts() == config(kv_host=("[::1]",)).kv_listen_hosts() == ("::1",)


def test_kv_host_may_name_an_interface() -> None:
    cards = config(kv_host=("lo", "10.1.2.3"))
    assert cards.reachable_kv_hosts() == cards.lane_sources == ("127.0.0.1", "10.1.2.3")


def test_an_interface_may_have_addresses_of_ipv6_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    of_link = SimpleNamespace(family=socket.AF_INET6, address="fe80::1%net9")
    routed = SimpleNamespace(family=socket.AF_INET6, address="fd00::1")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"net9": [of_link, routed]})
    assert config(kv_host=("net9",)).reachable_kv_hosts() == ("fd00::1",)


@pytest.mark.parametrize(
    ("address", "message"), [("fd00::1", None), ("::1", "only the loopback address ::1")]
)
def test_all_addresses_of_a_host_that_has_ipv6_alone(
    address: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 0, 0, 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: found)
    if message is None:
        assert config(host="::").reachable_host() == address
    else:
        with pytest.raises(ValueError, match=message):
            config(host="::").reachable_host()


def test_kv_host_may_not_name_an_interface_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"net9": []})
    with pytest.raises(ValueError, match=r"--advanced\.kv-host: the interface net9 has no IP address"):
        config(kv_host=("net9",))
