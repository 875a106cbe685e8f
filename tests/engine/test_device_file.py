"""Weights in the GPU memory of a trainer. On CPUs the driver's calls are those of `Driver`; a GPU has a
trainer in another process, and CUDA IPC."""

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.layers.ranks import Shard, unsharded
from baton.engine.loader import device_file
from baton.system import cuda_driver
from baton.system.cuda_driver import CudaError
from baton.weights import Checkpoint
from tests.device import DEVICE
from tests.engine.checkpoints import load
from tests.engine.random_checkpoints import save_random
from tests.engine.test_live_weights import answers, trained

FILE = "model-00001-of-00001.cuda.json"


class Driver:
    """Its device memory is one allocation, as the segments of torch's allocator are: tensors lie in it."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        # A tensor begins where its elements are aligned, and not at the start of the allocation.
        places, end = {}, 512
        for name, tensor in state.items():
            places[name], end = end, end + -(-tensor.nbytes // 512) * 512
        self._segment = torch.empty(end, dtype=torch.uint8)
        self.opened = 0
        self.largest = 0
        """Bytes of a copy."""
        self.state: dict[str, torch.Tensor] = {}
        for name, start in places.items():
            tensor = state[name]
            flat = self._segment[start : start + tensor.nbytes].view(tensor.dtype)
            self.state[name] = flat.view(tensor.shape).copy_(tensor)

    def call(self, name: str, *args: Any) -> None:
        getattr(self, name)(*args)

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> None:
        start, length = self._segment.data_ptr(), len(self._segment)
        if not start <= address < start + length:
            raise CudaError("cuMemGetAddressRange_v2: CUDA_ERROR_NOT_FOUND")
        base._obj.value, size._obj.value = start, length

    def cuIpcGetMemHandle(self, handle: Any, address: int) -> None:
        assert address == self._segment.data_ptr(), "CUDA has handles of whole allocations"
        ctypes.memset(ctypes.addressof(handle._obj), 7, 64)

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> None:
        if bytes(handle) != bytes([7]) * 64:
            raise CudaError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE")
        address._obj.value = self._segment.data_ptr()
        self.opened += 1

    def cuIpcCloseMemHandle(self, address: int) -> None:
        self.opened -= 1

    def cuMemcpyAsync(self, to: int, source: int, size: int, stream: int) -> None:
        assert self._segment.data_ptr() <= source <= self._segment.data_ptr() + len(self._segment) - size
        ctypes.memmove(to, source, size)
        self.largest = max(self.largest, size)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, torch.Tensor]], Driver]:
    def use(state: Mapping[str, torch.Tensor]) -> Driver:
        found = Driver(state)
        stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
        monkeypatch.setattr(cuda_driver, "call", found.call)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
        monkeypatch.setattr(device_file, "check_device", lambda path, device: device)
        return found

    return use


@pytest.mark.skipif(DEVICE != "cpu", reason="the trainer of a GPU is another process")
def test_weights_of_a_trainer_stay_where_they_are(
    tmp_path: Path,
    one_form: None,
    driver: Callable[[Mapping[str, torch.Tensor]], Driver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.engine.layers.pieces.PIECE", 2000)
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, "Qwen3Moe", tie_word_embeddings=True)
    after = trained(before, tmp_path)
    fresh, engine = load(after, num_blocks=16), load(before, num_blocks=16)
    gpu = driver(load_file(after / "model.safetensors"))
    state = gpu.state | {"lm_head.weight": gpu.state["model.embed_tokens.weight"]}
    checkpoint = Checkpoint(tmp_path / "update", before, "cuda")
    for shard in (0, 1):
        some = list(gpu.state)[shard::2] + ([] if shard else ["lm_head.weight"])
        checkpoint.write({name: state[name] for name in some}, shard, 2)
    staged = engine.stage_weights(str(checkpoint.directory))
    assert gpu.opened == 0, "the trainer may have its memory"
    assert gpu.largest <= 2000, "a worker needs room for a piece"
    waits = list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        keep = Checkpoint._to_host
        with monkeypatch.context() as copying:

            def to_host(*args: Any) -> None:
                keep(*args)
                assert any(checkpoint.directory.glob("*.cuda.json")), "half of the copy is there"

            copying.setattr(Checkpoint, "_to_host", to_host)
            checkpoint.keep("memfd")

    monkeypatch.setattr(device_file.time, "sleep", wait)
    late = load(checkpoint.directory, num_blocks=16)
    assert waits == [device_file.COPY_CHECK], "a trainer would change its tensors while the engine starts"
    for tensor in gpu.state.values():
        tensor.zero_()
    engine.replace_weights(staged, "1")
    wanted = answers(fresh)
    assert answers(engine) == wanted
    assert answers(late) == wanted
    monkeypatch.setattr(cuda_driver, "call", None)
    engine.replace_weights(engine.stage_weights(str(checkpoint.directory)), "2")
    assert answers(engine) == wanted, "it is in memory of the host"
    checkpoint.remove()


COPYING = """
import sys
from pathlib import Path
from baton.engine import trainer_files
trainer_files.write(Path(sys.argv[1]), "{}")
print(flush=True)
sys.stdin.read()
"""


def test_an_engine_does_not_wait_for_a_trainer_that_has_died(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COPYING, str(tmp_path / FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        waits = list[str]()

        def progress(stage: str, _: float) -> None:
            waits.append(stage)
            trainer.kill()
            trainer.wait()

        with pytest.raises(ValueError, match=f"{FILE}: the trainer has ended before it copied its tensors"):
            device_file.wait_for_copy(tmp_path, progress)
    assert waits == ["waiting for the trainer's copy of the weights"]
    (tmp_path / FILE).unlink()
    device_file.wait_for_copy(tmp_path, progress)
    assert len(waits) == 1


def no_such_allocation(found: dict[str, Any]) -> None:
    found["tensors"]["b"]["memory"] = 1


@pytest.mark.skipif(DEVICE != "cpu", reason="the trainer of a GPU is another process")
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda found: found.pop("memory"), "must have a list of memory"),
        (lambda found: found.update(tensors=[]), "and tensors by name"),
        (lambda found: found["memory"].__setitem__(0, "00" * 64), "cannot be opened: cuIpcOpenMemHandle_v2"),
        (lambda found: found["memory"].__setitem__(0, "07"), "cannot be opened: Buffer size too small"),
        (lambda found: found["memory"].__setitem__(0, "zz"), "cannot be opened: non-hexadecimal"),
        (lambda found: found["memory"].__setitem__(0, 7), "cannot be opened: fromhex"),
        (no_such_allocation, "tensor b ends at byte .* of memory 1, which has 0"),
        (lambda found: found["tensors"].update(b=[]), "tensor b: dtype, shape, memory or offset"),
        (lambda found: found["tensors"]["b"].update(offset=-4), "tensor b: dtype"),
        (lambda found: found["tensors"]["b"].update(offset=True), "tensor b: dtype"),
        (lambda found: found["tensors"]["b"].update(offset=1025), "b begins at byte 1025, amid an element"),
        (lambda found: found["tensors"]["b"].update(shape=[1 << 40, 3]), r"ends at byte \d+ of memory 0"),
        (lambda found: found["tensors"]["b"].update(shape=[1] * 9), "tensor b: dtype"),
        (lambda found: found["tensors"]["b"].update(dtype="os.system"), "tensor b: dtype"),
    ],
)  # fmt: skip
def test_a_file_that_lies_is_refused_and_opens_nothing(
    edit: Any, message: str, tmp_path: Path, driver: Callable[[Mapping[str, torch.Tensor]], Driver]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    gpu = driver(
        {"a": torch.ones(3), "b": torch.ones(5, 3), "none": torch.ones(0, 3), "scale": torch.tensor(2.0)}
    )
    checkpoint = Checkpoint(tmp_path / "update", tmp_path, "cuda")
    checkpoint.write(gpu.state)
    path = checkpoint.directory / FILE
    found = device_file.DeviceFile(path, torch.device("cpu"))
    for name, tensor in gpu.state.items():
        assert found.read(name, [unsharded(size) for size in tensor.shape]).equal(tensor)
    assert found.read("b", [Shard(1, 4, 5), Shard(2, 3, 3)]).equal(gpu.state["b"][1:4, 2:])
    del found
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        device_file.DeviceFile(path, torch.device("cpu"))
    del caught
    assert gpu.opened == 0


def test_memory_without_a_handle_and_workers_without_a_gpu_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path / "update", tmp_path, "cuda")
    with pytest.raises(
        ValueError, match=r"a is on cpu, in memory that no other process can open .*use memory='s"
    ):
        checkpoint.write({"a": torch.ones(3)})
    with pytest.raises(ValueError, match="the worker has no GPU: give them in memory of the host"):
        device_file.check_device(tmp_path / FILE, torch.device("cpu"))


TRAINER = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from baton.weights import Checkpoint
source, like, directory = map(Path, sys.argv[1:])
checkpoint = Checkpoint(directory, like, "cuda")
checkpoint.write(load_file(source / "model.safetensors", device="cuda"))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_weights_of_a_trainer_come_by_cuda_ipc(kind: str, tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    save_random(before, kind)
    after = trained(before, tmp_path)
    fresh = load(after, device="cuda", num_blocks=16)
    engine = load(before, device="cuda", num_blocks=16)
    old, update = answers(engine), tmp_path / "update"
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, after, before, update],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        staged = engine.stage_weights(str(update))
        assert answers(engine) == old
        trainer.kill()
        trainer.wait()
        with pytest.raises(ValueError, match="the memory of the trainer cannot be opened"):
            engine.stage_weights(str(update))
        engine.replace_weights(staged, "1")
        assert answers(engine) == answers(fresh)
    finally:
        trainer.kill()
        trainer.communicate()
