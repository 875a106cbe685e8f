"""Raw device memory that peers read by CUDA IPC handle. Without torch.

Not from torch's allocator: its segments may be expandable, and those have no handle.
"""

from baton.kv_transfer.arena import MARK, TOKEN, exported_bytes
from baton.kv_transfer.peer_memory import Unreachable, check
from baton.kv_transfer.protocol.messages import Export
from baton.system import cuda_driver
from baton.system.cuda_driver import CudaError

_exported: dict[tuple[bytes, bytes], int] = {}
"""Token and handle → address, of this process: CUDA opens no handle in the process that made it. A process id
would not tell: in another container it may be that of another process."""


class Slots:
    """Addresses in memory with `num_slots` slots and their marks."""

    def __init__(self, address: int, num_slots: int, slot_bytes: int) -> None:
        self.address = address
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.marks = address + num_slots * slot_bytes
        self.marks_bytes = num_slots * MARK
        self.token = self.marks + self.marks_bytes

    def slot(self, index: int) -> int:
        return self.address + index * self.slot_bytes

    def mark(self, index: int) -> int:
        return self.marks + index * MARK


class ExportedMemory(Slots):
    """Lives as long as its process. CUDA forbids that it is freed while a peer has it open."""

    def __init__(self, num_slots: int, slot_bytes: int, token: bytes) -> None:
        """On the device of this thread."""
        self.size = exported_bytes(num_slots, slot_bytes)
        super().__init__(cuda_driver.allocate(self.size), num_slots, slot_bytes)
        cuda_driver.call("cuMemsetD8_v2", self.marks, 0, self.marks_bytes)
        cuda_driver.call("cuMemcpyHtoD_v2", self.token, token, TOKEN)
        handle = cuda_driver.export_handle(self.address)
        self.export = Export("cuda_ipc", (handle,), num_slots, slot_bytes, token)
        _exported[token, self.export.handles[0]] = self.address


class PeerDeviceMemory(Slots):
    """Implements PeerMemory. The memory lives as long as it is open, also if its owner dies."""

    def __init__(self, export: Export) -> None:
        """Raises Unreachable. The caller then does a test copy of the token."""
        check(export, "cuda_ipc")
        try:
            own_address = _exported.get((export.token, export.handles[0]))
            self._is_local = own_address is not None
            address = cuda_driver.open_handle(export.handles[0]) if own_address is None else own_address
        except (CudaError, OSError, ValueError) as e:
            raise Unreachable(f"the test copy failed: {e}") from None
        super().__init__(address, export.num_slots, export.slot_bytes)
        try:
            self._check_size(exported_bytes(export.num_slots, export.slot_bytes))
        except CudaError as e:
            self.close()
            raise Unreachable(f"the test copy failed: {e}") from None

    def _check_size(self, claimed: int) -> None:
        """A copy beyond the end would be an error that ends this process."""
        base, size = cuda_driver.allocation(self.address)
        mapped_bytes = base + size - self.address
        if mapped_bytes < claimed:
            raise CudaError(f"the memory has {mapped_bytes} bytes, and its owner says {claimed}")

    def close(self) -> None:
        if not self._is_local:
            cuda_driver.close_handle(self.address)
