"""The choice among kernels by measurement."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine.kernels import fastest
from baton.engine.kernels.fastest import Choices, Kernel

KERNELS: dict[str, Kernel] = {"slow": lambda x: x + 1, "fast": lambda x: x + 2}


def choices(path: Path, measured: list[str]) -> Choices:
    def seconds(kernel: Kernel, x: Any) -> float:
        measured.append(next(kind for kind in KERNELS if KERNELS[kind] is kernel))
        return {"slow": 2.0, "fast": 1.0}[measured[-1]]

    return Choices(path, seconds)


def test_each_size_is_measured_once_also_by_the_next_engine(tmp_path: Path) -> None:
    """Sizes are powers of two. An engine that started at the same time keeps what the other one measured."""
    path, x, measured = tmp_path / "new" / "kernels.json", torch.ones(1), list[str]()
    first, second = choices(path, measured), choices(path, measured)
    assert first.among("a", 33, x, KERNELS) is KERNELS["fast"]
    assert first.among("a", 64, x, KERNELS) is KERNELS["fast"]
    assert measured == ["slow", "fast"]
    assert second.among("b", 33, x, KERNELS, measures=False) is KERNELS["slow"]
    second.among("b", 33, x, KERNELS)
    assert len(measured) == 4
    for product in ("a", "b"):
        assert choices(path, measured).among(product, 50, x, KERNELS) is KERNELS["fast"]
    assert len(measured) == 4


def test_a_file_that_is_cut_short_or_names_another_kernel_is_not_used(tmp_path: Path) -> None:
    path, x, measured = tmp_path / "kernels.json", torch.ones(1), list[str]()
    for content in ('{"a rows 1"', "[1]", '{"a rows 1": "older"}'):
        path.write_text(content)
        assert choices(path, measured).among("a", 1, x, KERNELS) is KERNELS["fast"]
    assert len(measured) == 6


def test_without_a_place_for_the_file_each_engine_measures(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    measured = list[str]()
    ours = choices(tmp_path / "file" / "kernels.json", measured)
    assert ours.among("a", 1, torch.ones(1), KERNELS) is KERNELS["fast"]
    assert ours.among("a", 1, torch.ones(1), KERNELS) is KERNELS["fast"]
    assert len(measured) == 2


def test_a_kernel_must_be_clearly_faster_than_the_first(tmp_path: Path) -> None:
    for share, chosen in ((0.97, "first"), (0.9, "other")):
        taken = {"first": 1.0, "other": share}
        kernels: dict[str, Kernel] = dict.fromkeys(taken, torch.neg)
        times = iter(taken.values())
        path = tmp_path / f"{share}.json"
        Choices(path, lambda kernel, x, times=times: next(times)).among("a", 1, torch.ones(1), kernels)
        assert f'"{chosen}"' in path.read_text()


class Device:
    """A GPU that runs what the host launches, in order. Times in microseconds."""

    def __init__(self) -> None:
        self.host = self.idle_from = 0.0

    def launch(self, on_host: float, on_device: float) -> None:
        self.host += on_host
        self.idle_from = max(self.idle_from, self.host) + on_device

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=0.0)

        def record() -> None:
            event.at = max(self.idle_from, self.host)

        def synchronize() -> None:
            self.host = max(self.host, event.at)

        event.record, event.synchronize = record, synchronize
        event.query = lambda: event.at <= self.host
        event.elapsed_time = lambda end: end.at - event.at
        return event


@pytest.mark.parametrize("launch", [20.0, 150.0, 2000.0])
def test_the_time_of_a_launch_by_the_host_is_not_that_of_the_kernel(
    launch: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host takes longer to launch this kernel than the device to run it."""
    device = Device()
    flushed = SimpleNamespace(zero_=lambda: device.launch(5.0, 16.0))
    cuda = SimpleNamespace(Event=device.event)
    monkeypatch.setattr(
        fastest, "torch", SimpleNamespace(empty=lambda *_, **__: flushed, cuda=cuda, uint8=None)
    )
    assert fastest.seconds_of(lambda x: device.launch(launch, 11.0), None) == 11.0  # type: ignore[arg-type]
