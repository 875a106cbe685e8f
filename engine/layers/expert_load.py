"""Counts the tokens of each expert on the device, so that no step waits for the host.

begin_step ──▶ each layer counts the tokens of its experts ──▶ begin_step adds them to the totals
"""

import torch
from torch import Tensor

from baton.engine.model_config import ExpertsConfig


class ExpertLoad:
    """The load of all experts of a model. A step is added when the next one begins."""

    def __init__(self, experts: ExpertsConfig, device: torch.device) -> None:
        shape = len(experts.layers), experts.num_experts
        self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self._layers = iter(self._counts)
        self.totals = torch.zeros(2, *shape, dtype=torch.int64, device=device)
        """[2, layers, experts]: tokens of each expert, and steps in which it had any."""
        self.steps = torch.full((), -1, dtype=torch.int64, device=device)
        """Number of these steps; −1: no step has begun."""
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        """Where the KV of each row of this step goes. −1: the row pads a graph, and has no expert."""

    def next_layer(self) -> Tensor:
        """The counts [experts] int32 of the next layer with experts. They are zero when a step begins."""
        return next(self._layers)

    def begin_step(self, slots: Tensor) -> None:
        """slots [tokens] of the step's rows."""
        self.slots = slots
        tokens, reads = self.totals
        tokens += self._counts
        reads += self._counts > 0
        self.steps += 1
        self._counts.zero_()

    def clear(self) -> None:
        """Forgets all steps."""
        self._counts.zero_()
        self.totals.zero_()
        self.steps.fill_(-1)
