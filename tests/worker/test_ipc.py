"""The local socket between service and engine process."""

import contextlib
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from baton.kv_transfer.wait import wait
from baton.worker import messages
from baton.worker.ipc import EngineLink, ServiceLink


async def test_messages_travel_both_ways_and_the_socket_file_is_removed(tmp_path: Path) -> None:
    service = EngineLink(str(tmp_path))
    try:
        (directory,) = tmp_path.iterdir()
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        engine = ServiceLink(service.address)
        engine.send(messages.Progress("loading", 0.5))
        assert await service.receive() == messages.Progress("loading", 0.5)
        service.remove_directory()
        assert list(tmp_path.iterdir()) == []
        work = [messages.FromRouter(1, bytes([i]) * 16) for i in range(100)]
        for message in work:
            await service.send(message)
        arrived: list[messages.ToEngine] = []
        while len(arrived) < len(work):
            # Sending clears the signal of a message that arrived meanwhile, so `has_messages` must find it.
            engine.send(messages.Progress("loading", 0.5))
            assert engine.has_messages or wait([engine.fileno()], 5), "neither signal nor has_messages"
            arrived += engine.receive_all()
        assert arrived == work
        assert engine.receive_all() == []
        engine.close()
    finally:
        service.close()
    assert list(tmp_path.iterdir()) == []


async def test_an_engine_whose_service_does_not_read_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.worker.ipc.SEND_TIMEOUT", 0.05)
    monkeypatch.setattr("baton.worker.ipc.MAX_QUEUED", 4)
    service = EngineLink(str(tmp_path))
    engine = ServiceLink(service.address)

    def flood() -> None:
        for _ in range(1000):
            engine.send(messages.Progress("x" * 100_000, 0.5))

    with pytest.raises(zmq.Again):
        flood()
    engine._socket.close(linger=0)
    engine.close()
    service.close()


async def test_a_missing_run_directory_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--advanced.run-dir .*missing: No such file"):
        EngineLink(str(tmp_path / "missing"))


async def test_a_process_without_a_free_descriptor_gets_a_start_error(tmp_path: Path) -> None:
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(ValueError, match="Too many open files"):
            EngineLink(str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", messages.encode(messages.Progress("stage", 0.5)), msgspec.msgpack.encode(["Detached"])],
)
def test_the_engine_decodes_only_messages_to_the_engine(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decode_to_engine(data)


@pytest.mark.cases(1)
@pytest.mark.parametrize("inodes", [2, 3])
def test_a_full_run_directory_keeps_no_worker_from_starting(tmp_path: Path, inodes: int) -> None:
    """There is room for no directory, or for a directory and no socket."""
    script = f"""
import os
from baton.worker.ipc import EngineLink
link = EngineLink({str(tmp_path)!r})
assert link.address.startswith("ipc:///dev/shm/baton-"), link.address
assert os.path.exists(link.address.removeprefix("ipc://"))
link.close()
assert not os.path.exists(os.path.dirname(link.address.removeprefix("ipc://")))
assert os.listdir({str(tmp_path)!r}) == ["a"]
"""
    full = f"mount -t tmpfs -o nr_inodes={inodes} none {tmp_path} && touch {tmp_path}/a"
    command = ["unshare", "-rm", "sh", "-c", f'{full} && exec "$@"', "sh", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
