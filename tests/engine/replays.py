"""Graphs on a CPU: a replay runs again what a capture ran, on the same memory.

So tests see which memory graphs read and write, and what their padding does.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from baton.engine import Engine
from baton.engine.execution import graphs
from baton.engine.execution.inputs import Inputs
from baton.engine.kernels import Kernels
from baton.engine.kernels.attention.paged import AttentionMetadata

Work = Callable[[graphs.LayerDone], None]


class _Replay:
    def __init__(self, work: Work) -> None:
        self._work = work
        self.count = 0

    @torch.inference_mode()
    def replay(self) -> None:
        self.count += 1
        self._work(lambda _: None)


class _Capture:
    def __call__(self, work: Work) -> list[_Replay]:
        work(lambda _: None)
        return [_Replay(work)]


def capture_on_cpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, graphs replay steps of the engine that only decode."""
    monkeypatch.setattr(graphs, "Capture", _Capture)
    monkeypatch.setattr(
        graphs, "Inputs", lambda _, **sizes: Inputs(partial(torch.zeros, dtype=torch.uint8), **sizes)
    )
    monkeypatch.setattr(graphs, "chunk_sizes", lambda most: [])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    _accept_padding(monkeypatch)
    runner = engine._runner
    runner.table_width = -(-engine.model_config.max_model_len // engine.block_size)
    runner.capture(64, lambda done: None)
    if (drafter := runner.drafter) is not None:
        # A real graph does not keep the memory that it reads and writes.
        for graph in (*drafter._of_rows.values(), *drafter._of_guesses.values()):
            cells = cast(Any, graph)._work.func.__closure__
            tensors = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Tensor)]
            assert all(tensor is drafter._hidden for tensor in tensors)


def replayed(engine: Engine) -> int:
    """How many guesses of a draft head graphs have made."""
    drafter = engine._runner.drafter
    assert drafter is not None
    return sum(cast(_Replay, graph).count * each for (_, each), graph in drafter._of_guesses.items())


def _accept_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels for CPUs then write nothing for rows with slot −1. Rows without a context attend to
    something."""
    write, write_latent, plan = Kernels.rope_and_write, Kernels.write_latent, Kernels.plan
    plan_latent = Kernels.plan_latent

    def rope_and_write(
        self: Kernels, qkv: Tensor, rotary: Tensor, norm: Any, kv: Any, slots: Tensor
    ) -> Tensor:
        used = slots >= 0
        written = write(self, qkv[used], rotary[used], norm, kv, slots[used])
        q = qkv.new_zeros((len(qkv), *written.shape[1:]))
        q[used] = written
        return q

    def latent(
        q: Tensor, latent: Tensor, shared: Tensor, norm: Any, rotary: Tensor, kv: Any, slots: Tensor
    ) -> None:
        used = slots >= 0
        of_used = q[used]
        write_latent(of_used, latent[used], shared[used], norm, rotary[used], kv, slots[used])
        q[used] = of_used

    def seen(metadata: AttentionMetadata) -> AttentionMetadata:
        return replace(metadata, contexts=metadata.contexts.clamp_min(1))

    monkeypatch.setattr(Kernels, "rope_and_write", rope_and_write)
    monkeypatch.setattr(Kernels, "write_latent", staticmethod(latent))
    monkeypatch.setattr(Kernels, "plan", lambda self, metadata, *of: plan(self, seen(metadata), *of))
    monkeypatch.setattr(
        Kernels,
        "plan_latent",
        lambda self, metadata, *of, **how: plan_latent(self, seen(metadata), *of, **how),
    )
