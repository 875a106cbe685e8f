"""Memory that NIXL reads, of two workers in this process."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import psutil
import pytest

import baton.kv_transfer as kv
from baton.kv_transfer.config import EXPORTED_SLOT_BYTES, TransferConfig
from baton.kv_transfer.layout import Piece
from baton.kv_transfer.nixl import slots as nixl_slots
from baton.kv_transfer.nixl.memory import NixlMemory, listen_on
from baton.kv_transfer.protocol.encryption import Seal
from baton.kv_transfer.slices import Slice
from baton.system.cuda_driver import CudaError
from tests.stand_in import stand_in

from .conftest import until

OWNER, READER = 0xABCDEF, 6  # incarnations
SECRET = b"a cluster secret for tests"
NOT_SEALED = "the metadata: it is not sealed with this cluster's secret, or is of another worker"
SEAL, OWNER_NAME = Seal(SECRET, b"baton nixl metadata"), b"abcdef"


@pytest.fixture(scope="module")
def pair() -> tuple[NixlMemory, kv.Arena, NixlMemory, kv.Arena]:
    """The owner with its arena, the reader with its own."""
    arenas = [kv.Arena.create(4, 4096) for _ in range(4)]
    with patch.dict(os.environ):
        owner = opened_by(OWNER, arenas[0], arenas[1])
        return owner, arenas[0], opened_by(READER, arenas[2], arenas[3]), arenas[3]


def opened_by(
    incarnation: int, sending: kv.Arena, receiving: kv.Arena, device: str | None = None
) -> NixlMemory:
    config = stand_in(
        TransferConfig, incarnation=incarnation, hosts=("127.0.0.1",), reader_device=device,
        exported_slot_bytes=EXPORTED_SLOT_BYTES,
    )  # fmt: skip
    return NixlMemory(config, SECRET, sending, receiving, lambda: None)


def opened(reader: NixlMemory) -> list[tuple[int, str]]:
    return until(lambda: list(reader.opened()), "a token to be read")


def ended(reader: NixlMemory, slot: int) -> bool:
    """Whether the slot is right."""
    return until(reader.finished, "a read to end")[slot]


def test_slots_are_read_and_verified(pair: tuple[NixlMemory, kv.Arena, NixlMemory, kv.Arena]) -> None:
    owner, there, reader, here = pair
    assert reader.open(1, OWNER, owner.export) == ""
    assert opened(reader) == [(1, "")]
    payload = os.urandom(1000)
    there.slot(2)[:1000] = payload
    reader.read(
        1,
        [Slice(Piece(0, 0, 1, 0, 16), size=1000, there=2, slot=3, sum=reader.checksum(memoryview(payload)))],
    )
    assert ended(reader, 3)
    assert here.slot(3)[:1000] == payload
    reader.read(
        1,
        [
            Slice(
                Piece(0, 0, 1, 0, 16),
                size=1000,
                there=2,
                sum=reader.checksum(memoryview(b"what was there before")),
            )
        ],
    )
    reader.close(1)  # the session ends, the read goes on
    assert not ended(reader, 0)
    assert not reader.busy


def test_arenas_are_registered_where_memory_of_the_gpu_cannot_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise CudaError("no GPU")

    monkeypatch.setattr(nixl_slots, "enter_device", fail)
    arenas = [kv.Arena.create(4, 4096) for _ in range(2)]
    memory = opened_by(OWNER, arenas[0], arenas[1], "cuda:0")
    assert (memory.export.kind, memory.for_sender, memory.for_receiver) == ("nixl", None, None)
    assert "no GPU" in caplog.text


def test_devices_that_this_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx9_0:1")
    arenas = [kv.Arena.create(4, 4096) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"UCX does not start .*UCX_NET_DEVICES=mlx9_0:1"):
        opened_by(OWNER, arenas[0], arenas[1])


@pytest.mark.parametrize(
    ("host", "before", "devices"),
    [("127.0.0.1", None, "lo"), ("0.0.0.0", None, None), ("127.0.0.1", "mlx5_0:1", "mlx5_0:1")],
)
def test_the_interface_of_an_address(
    monkeypatch: pytest.MonkeyPatch, host: str, before: str | None, devices: str | None
) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: [])  # no RDMA device
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with patch.dict(os.environ, {"UCX_NET_DEVICES": before} if before else {}):
        listen_on(host)
        assert os.environ.get("UCX_NET_DEVICES") == devices


def test_it_listens_on_one_interface() -> None:
    """Of all sockets of this process, which other tests may have, too."""

    def listening() -> set[tuple[str, int]]:
        connections = psutil.Process().net_connections("tcp")
        return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}

    before = listening()
    kept = opened_by(OWNER, kv.Arena.create(4, 4096), kv.Arena.create(4, 4096))
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    del kept


def test_metadata_shows_nothing_without_the_secret(
    pair: tuple[NixlMemory, kv.Arena, NixlMemory, kv.Arena],
) -> None:
    """Lanes without --kv-encrypt can be read. The metadata says where UCX listens, and names the memory."""
    owner, _, reader, _ = pair
    plain = SEAL.open(owner.export.handles[0], OWNER_NAME)
    for told in (plain[:8], OWNER_NAME):
        assert told in plain
        assert told not in owner.export.handles[0]
    stranger = Seal(b"another secret of a test", b"baton nixl metadata")
    forged = msgspec.structs.replace(owner.export, handles=(stranger.seal(plain, OWNER_NAME),))
    assert reader.open(1, OWNER, forged) == NOT_SEALED


def test_the_metadata_names_no_memory_but_the_slots_that_peers_read(
    pair: tuple[NixlMemory, kv.Arena, NixlMemory, kv.Arena],
) -> None:
    owner, _, reader, _ = pair
    into = owner._local  # the slots that it reads into, which are registered, too
    plain = SEAL.open(owner.export.handles[0], OWNER_NAME)
    handle = SEAL.seal(into.address.to_bytes(8, "little") + plain[8:], OWNER_NAME)
    beside = msgspec.structs.replace(owner.export, handles=(handle,), token=into.arena.token)
    assert reader.open(1, OWNER, beside) == ""
    assert opened(reader) == [(1, "NIXL did not read the token")]
    reader.close(1)


def test_metadata_that_is_not_of_this_peer(pair: tuple[NixlMemory, kv.Arena, NixlMemory, kv.Arena]) -> None:
    """It is refused, and the next peer is read."""
    owner, _, reader, _ = pair
    assert reader.open(1, OWNER + 1, owner.export) == NOT_SEALED
    for size in (2, 8, 50):
        bad = msgspec.structs.replace(owner.export, handles=(owner.export.handles[0][:size],))
        assert reader.open(2, OWNER, bad) == NOT_SEALED
    plain = SEAL.open(owner.export.handles[0], OWNER_NAME)
    no_room_for_the_token = (2**64 - 4 * 4096 - 8).to_bytes(8, "little")
    for handle, why in (
        (b"", "NIXL: "),
        (plain[:50], "NIXL: "),
        (b"\xff" * 8 + plain[8:], "4 slots of 4096 bytes do not fit behind their address"),
        (no_room_for_the_token + plain[8:], "4 slots of 4096 bytes do not fit behind their address"),
    ):
        bad = msgspec.structs.replace(owner.export, handles=(SEAL.seal(handle, OWNER_NAME),))
        assert reader.open(2, OWNER, bad).startswith(why)
    wrong = msgspec.structs.replace(owner.export, token=bytes(16))
    assert reader.open(3, OWNER, wrong) == ""
    assert opened(reader) == [(3, "NIXL did not read the token")]
    reader.close(3)
    assert reader.open(4, OWNER, owner.export) == ""
    assert opened(reader) == [(4, "")]
    reader.close(4)
