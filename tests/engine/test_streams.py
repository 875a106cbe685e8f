"""Side streams of the engine, over a GPU that is emulated: any of them may be late against the others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.engine.execution.graphs import Capture
from baton.engine.layers.linear import LinearMethod
from baton.engine.layers.mlp import MoE
from tests.device import DEVICE
from tests.kv_transfer import cuda_on_cpu

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has streams of its own")


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_on_cpu.use(monkeypatch)


def filled(value: float) -> torch.Tensor:
    """Memory that the current stream fills."""
    memory = torch.zeros(4)
    cuda_on_cpu.launch(lambda: memory.fill_(value))
    return memory


class AddsOne:
    """A shared expert."""

    input = LinearMethod()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4)
        cuda_on_cpu.launch(lambda: out.copy_(x + 1))
        return out


@pytest.mark.parametrize("late", [0, 1], ids=["the stream of the step", "that of the shared expert"])
def test_the_shared_expert_and_the_others_wait_for_each_other(late: int) -> None:
    layer: Any = MoE.__new__(MoE)
    layer.side, layer.shared_gate = torch.cuda.Stream(), None
    layer.experts = LinearMethod()
    cuda_on_cpu.be_late([late])
    x = filled(3.0)
    joined = MoE._shared(layer, x, x, AddsOne())  # type: ignore[arg-type]
    result, seen = joined(), torch.zeros(4)
    cuda_on_cpu.launch(lambda: seen.copy_(result))
    torch.cuda.current_stream().synchronize()
    assert seen.tolist() == [4.0] * 4


@pytest.mark.parametrize("late", [0, 1], ids=["the stream of the step", "that of the capture"])
def test_what_runs_before_a_capture_sees_the_memory_that_is_ready(late: int) -> None:
    """Kernels are chosen in this run, by what they compute."""
    capture, seen = Capture(), list[list[float]]()
    cuda_on_cpu.be_late([late])
    x = filled(3.0)

    def work(cut: Callable[[int], Any]) -> None:
        cuda_on_cpu.launch(lambda: seen.append(x.tolist()))
        cut(0)

    graphs = capture(work)
    assert seen == [[3.0] * 4], "the capture itself computes nothing"
    assert len(graphs) == 2
    graphs[0].replay()
    torch.cuda.synchronize()
    assert seen == [[3.0] * 4] * 2
