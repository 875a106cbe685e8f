"""Device memory that another process exports: on its own GPU, or on the same one."""

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch

from baton.kv_transfer.protocol.messages import Export
from baton.system.cuda_driver import copy

pytestmark = pytest.mark.gpu
SLOTS, SLOT_BYTES = 4, 64 << 20
OWNER = f"""
import os, sys, msgspec, torch
from baton.kv_transfer.cuda_memory import ExportedMemory
from baton.system.cuda_driver import copy
numbers = torch.arange({SLOTS * SLOT_BYTES // 4}, dtype=torch.int32, device="cuda")
memory = ExportedMemory({SLOTS}, {SLOT_BYTES}, bytes(16))
copy(memory.address, numbers.data_ptr(), {SLOTS * SLOT_BYTES}, torch.cuda.current_stream().cuda_stream)
torch.cuda.synchronize()
os.write(1, msgspec.msgpack.encode(memory.export))
os.close(1)
sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[bytes], Export]]:
    """A process that sees one GPU only: another one than that of this process, if there is one."""
    other = {"CUDA_VISIBLE_DEVICES": "1"} if torch.cuda.device_count() > 1 else {}
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | other
    )
    assert process.stdout is not None
    yield process, msgspec.msgpack.decode(process.stdout.read(), type=Export)
    process.kill()
    process.communicate()


def test_the_owner_is_killed_while_its_memory_is_copied(
    owner: tuple[subprocess.Popen[bytes], Export],
) -> None:
    """The copies end, with the right bytes. Then nothing is left of the memory."""
    from baton.kv_transfer.cuda_memory import PeerDeviceMemory
    from baton.kv_transfer.peer_memory import Unreachable

    process, export = owner
    size = SLOTS * SLOT_BYTES
    here = torch.empty(size // 4, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    memory = PeerDeviceMemory(export)
    for _ in range(200):  # 130 ms over NVLink
        copy(here.data_ptr(), memory.address, size, stream)
    process.kill()
    process.wait()
    here.zero_()
    copy(here.data_ptr(), memory.address, size, stream)
    torch.cuda.synchronize()
    assert torch.equal(here, torch.arange(size // 4, dtype=torch.int32, device="cuda"))
    memory.close()
    with pytest.raises(Unreachable, match="the test copy failed: cuIpcOpenMemHandle"):
        PeerDeviceMemory(export)


def test_memory_that_is_smaller_than_its_owner_says(
    owner: tuple[subprocess.Popen[bytes], Export],
) -> None:
    from baton.kv_transfer.cuda_memory import PeerDeviceMemory
    from baton.kv_transfer.peer_memory import Unreachable

    torch.zeros(1, device="cuda")
    PeerDeviceMemory(owner[1]).close()
    with pytest.raises(Unreachable, match="its owner says"):
        PeerDeviceMemory(msgspec.structs.replace(owner[1], num_slots=2 * SLOTS))


def test_a_handle_that_names_nothing() -> None:
    from baton.kv_transfer.cuda_memory import PeerDeviceMemory
    from baton.kv_transfer.peer_memory import Unreachable

    torch.zeros(1, device="cuda")
    for handle in (bytes(64), b"short"):
        with pytest.raises(Unreachable):
            PeerDeviceMemory(Export("cuda_ipc", (handle,), SLOTS, SLOT_BYTES, bytes(16)))
