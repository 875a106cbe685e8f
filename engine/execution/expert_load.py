"""Counts the tokens of each expert on the device, and reads the counts, without a wait for the device.

begin_step ──▶ each layer counts the tokens of its experts ──▶ begin_step adds them to the totals

read: no copy under way, and the last is old ─▶ enqueue a copy …
read: the copy is over ─▶ new statistics        … else those of the copy before
"""

import time

import torch
from torch import Tensor

from baton.engine.api.stats import ExpertStats
from baton.engine.execution.events import Event, record
from baton.engine.execution.sampler import to_host
from baton.engine.model_config import ExpertsConfig

PERIOD = 1.0
"""Least seconds between two copies. Statistics are asked for more often."""


class ExpertLoad:
    """The load of all experts of a model. A step is added when the next one begins. The thread that runs the
    steps makes all calls."""

    def __init__(self, experts: ExpertsConfig, device: torch.device) -> None:
        shape = len(experts.layers), experts.num_experts
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
        """Of the newest step. They are zero when it begins."""
        self.totals = torch.zeros(2, *shape, dtype=torch.int64, device=device)
        """[2, layers, experts]: tokens of each expert, and steps in which it had any."""
        self.steps = torch.full((), -1, dtype=torch.int64, device=device)
        """Number of these steps; −1: no step has begun."""
        self._last_read = torch.zeros(self.totals.shape, dtype=torch.int64), 0
        self._copied_at = 0.0
        self._copy: tuple[Tensor, Tensor, Event] | None = None
        self._stats = ExpertStats([0] * experts.num_experts, 0.0, 0.0)

    def begin_step(self) -> None:
        tokens, reads = self.totals
        tokens += self.counts
        reads += self.counts > 0
        self.steps += 1
        self.counts.zero_()

    def clear(self) -> None:
        self.counts.zero_()
        self.totals.zero_()
        self.steps.fill_(-1)

    def read(self) -> ExpertStats:
        if self._copy is not None and self._copy[2].query():
            totals, steps, _ = self._copy
            self._copy = None
            self._update(totals, int(steps))
        if self._copy is None and time.monotonic() - self._copied_at >= PERIOD:
            self._copied_at = time.monotonic()
            totals, steps = (to_host(counts.clone()) for counts in (self.totals, self.steps))
            self._copy = totals, steps, record(self.totals.device)
        return self._stats

    def _update(self, totals: Tensor, steps: int) -> None:
        old_totals, old_steps = self._last_read
        tokens, reads = (totals - old_totals).double()
        if tokens.any():
            self._last_read = totals, steps
            self._stats = ExpertStats(
                totals[0].sum(dim=0).tolist(),
                imbalance=float((tokens.amax(dim=1) / tokens.mean(dim=1)).mean()),
                used=float(reads.sum(dim=1).mean()) / (steps - old_steps),
            )
