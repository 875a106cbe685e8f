"""Transfer processes and who they talk to: refusals, lanes, death."""

import os
import resource
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

import baton.kv_transfer as kv
from baton.kv_transfer.process.tcp import connecting
from baton.kv_transfer.spawn import WaitingTransfer
from baton.kv_transfer.wait import wait
from baton.system.addresses import url_host
from tests.kv_transfer.transfer_process import TransferProcess, logging_to
from tests.layouts import kv_layout
from tests.within import WITHIN


@pytest.fixture
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As workers start them."""
    monkeypatch.setattr(TransferProcess, "popen", subprocess.Popen)


# ---------------------------------------------------------------- peers that are not to be talked to


@pytest.mark.parametrize(
    ("config", "fetch", "reason", "named"),
    [
        ({"secret": b"another secret, not ours"}, {}, "secret", ""),
        (
            {"model_fingerprint": "another model"}, {}, "model",
            "model_fingerprint: decode 0 has 'another model', prefill 0 has 'model of the tests'",
        ),
        (
            {"layout": kv_layout(2, 2, 16, "float32")}, {}, "layout",
            "layout_fingerprint: decode 0 has 'kv12 layers=2 attention.kv=2x2x16', "
            "prefill 0 has 'kv12 layers=3 attention.kv=2x2x16'",
        ),
        (
            {"layout": kv_layout(3, 2, 16, "float16")}, {}, "dtype",
            "decode 0 has KV float16, prefill 0 has KV float32",
        ),
        ({}, {"incarnation": 12345}, "incarnation", "prefill 0 is now "),
    ],
)  # fmt: skip
def test_refused_at_hello(
    make_prefill: Any,
    bare_decode: Any,
    until: Any,
    tmp_path: Path,
    config: dict[str, Any],
    fetch: dict[str, Any],
    reason: str,
    named: str,
) -> None:
    """Between unequal groups, too. The log names what differs, with the values of both workers."""
    with logging_to(tmp_path / "log") as logged:
        prefill = make_prefill(ranks=2)
        decode = bare_decode(config)
        assert decode.failure(prefill, **fetch) == reason
        assert reason in decode.stats().refused
        until(lambda: named in logged(), f"the log to say {named!r}")
    if reason in ("model", "layout", "dtype"):  # proven peers: the other side knows why, too
        until(lambda: reason in prefill.stats().refused, "prefill to refuse, too")
    until(lambda: prefill.stats().lanes == 0, "the lanes to close")


def test_without_a_descriptor_for_a_connection_it_does_not_spin(make_prefill: Any, until: Any) -> None:
    prefill = make_prefill()
    assert prefill.stats().lanes == 0, "it is up"
    process = psutil.Process(prefill.process.pid)
    limits = cast("tuple[int, int]", process.rlimit(resource.RLIMIT_NOFILE))
    used = {int(path.name) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
    process.rlimit(resource.RLIMIT_NOFILE, (min({*range(999)} - used), limits[1]))
    prefill.clock.stop()
    waiting = socket.create_connection(("127.0.0.1", prefill.port))
    until(lambda: prefill.stats().refused.get("accept"), "it to try")
    for tries in range(1, 4):
        assert [prefill.stats().refused for _ in range(20)] == [{"accept": tries}] * 20
        prefill.later(1.0)
        until(lambda n=tries: prefill.stats().refused != {"accept": n}, "it to try again")
    process.rlimit(resource.RLIMIT_NOFILE, limits)
    until(lambda: prefill.later(1.0) or prefill.stats().lanes == 1, "the connection to be taken")
    waiting.close()


# ---------------------------------------------------------------- the process itself


@pytest.mark.usefixtures("fresh_processes")
def test_the_process_names_itself_and_has_no_torch(make_pair: Any) -> None:
    pair = make_pair()
    for worker, role in ((pair.prefill, b"prefill"), (pair.decode, b"decode")):
        assert worker.stats().lanes == 0, "it is up"
        proc = Path(f"/proc/{worker.process.pid}")
        assert proc.joinpath("cmdline").read_bytes().startswith(b"baton: %s 0 transfer" % role)
        assert b"libtorch" not in proc.joinpath("maps").read_bytes()
        assert b"a cluster secret" not in proc.joinpath("environ").read_bytes()


@pytest.mark.parametrize(
    ("host", "bind", "sources"),
    [
        ("127.0.0.1", (), {"127.0.0.1": 4}),
        ("127.0.0.1", ("127.0.0.2", "127.0.0.3"), {"127.0.0.2": 2, "127.0.0.3": 2}),
        ("127.0.0.1", ("lo", "127.0.0.9", "127.0.0.8"), {"127.0.0.1": 2, "127.0.0.9": 1, "127.0.0.8": 1}),
        ("::1", ("lo", "::1"), {"::1": 4}),
    ],
)
def test_lanes_take_the_given_ways_in_turn(
    make_pair: Any, host: str, bind: tuple[str, ...], sources: dict[str, int]
) -> None:
    pair = make_pair(prefill={"hosts": (host,)}, decode={"bind": bind})
    prefill_id = pair.prefill.hold(60)
    blocks = pair.prefill.held[prefill_id]
    address = f"{url_host(host)}:{pair.prefill.port}"
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 60, kv_address=address)
    assert isinstance(pair.event(decode_id), kv.Injected)
    pair.assert_same(blocks, decode_id, 0, 60)
    lanes = psutil.Process(pair.prefill.process.pid).net_connections()
    assert Counter(lane.raddr.ip for lane in lanes if lane.raddr) == sources


def test_a_lane_is_bound_to_its_interface() -> None:
    """Of the loopback one no other sign is seen: its lanes would go that way by themselves."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        connecting(listener.getsockname(), "lo") as bound,
        connecting(listener.getsockname(), None) as free,
    ):
        names = [s.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16) for s in (bound, free)]
    assert names == [b"lo\0", b""]


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent_and_on_sigterm(how: signal.Signals) -> None:
    """A parent that is killed cannot tell its children; the kernel does. SIGTERM goes to the child itself."""
    code = (
        "import resource, sys, time\nimport baton.kv_transfer as kv\nfrom tests.layouts import kv_layout\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (500, 2000))\n"
        "(a, b), (e, f) = kv.ArenaEnd.pair(4, 4096), kv.ArenaEnd.pair(4, 4096)\n"
        "c, d = kv.channel_pair()\n"
        "layout = kv_layout(1, 1, 8, 'float32')\n"
        "config = kv.TransferConfig(name='decode 0', incarnation=1, model_fingerprint='m',"
        " layout=layout, num_slots=4, slot_bytes=4096)\n"
        "child = kv.spawn_transfer(config, sending=b, receiving=f,"
        " heartbeat=kv.Heartbeat.create(), service=d, secret=b'x' * 16)\n"
        "c.recv(1000); print(child.pid, flush=True)\n"
        "sys.exit(child.wait() if 'wait' in sys.argv else time.sleep(60))"
    )
    waits = ["wait"] if how is signal.SIGTERM else []
    parent = subprocess.Popen([sys.executable, "-c", code, *waits], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    assert resource.prlimit(child, resource.RLIMIT_NOFILE) == (2000, 2000), "many peers have many lanes"
    os.kill(child if how is signal.SIGTERM else parent.pid, how)
    assert wait([watch], WITHIN), "the transfer process lives on"
    os.close(watch)
    assert parent.wait(WITHIN) == (0 if how is signal.SIGTERM else -signal.SIGKILL)


def test_one_that_waits_ends_when_it_is_not_needed() -> None:
    (_, sending), (_, receiving) = kv.ArenaEnd.pair(4, 4096), kv.ArenaEnd.pair(4, 4096)
    _, service = kv.channel_pair()
    waiting = WaitingTransfer(
        sending=sending, receiving=receiving, heartbeat=kv.Heartbeat.create(), service=service
    )
    assert waiting.process.poll() is None
    waiting.close()
    assert waiting.process.wait(WITHIN) == 0
