"""The largest steps, once, on a GPU, before anybody waits: what memory they take; and kernels get compiled.

    measure_steps   on a small cache that is thrown away: how much the KV pool must leave free
    warm_up         on the real one, since kernels are compiled for its size too

Both are the same rehearsal. Requests that nobody sent go through the engine's own steps, so what is measured
and compiled is what will run: as many prompts as a step can sample for, all in one step that is full to its
token budget; then decodes of all of them, of half, of a quarter, …; then, beside the last decodes, prompts
that fill a step, and what had to be cut of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.config import EngineConfig
from engine.request import EngineRequest, StepResult
from engine.sampling_params import SamplingParams

HEAVIEST: dict[str, Any] = {
    "temperature": 2.0,
    "top_p": 0.999,
    "min_p": 1e-9,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "logprobs": 20,
}
"""Sampling that takes the most memory."""

LAST_DECODES = 3
"""Tokens that the last of the first prompts still decodes when the long ones come."""


class Steppable(Protocol):
    """What a rehearsal needs of an engine."""

    def add(self, request: EngineRequest) -> None: ...

    def step(self) -> StepResult: ...

    @property
    def has_work(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that a step allocates beside weights and KV, at its peak."""

    any: int
    decode: int
    """Of one that only decodes, for as many requests as there can be: what captured graphs will need."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    prompts: list[tuple[int, int]]
    """(length, max_tokens) of those that come first."""
    long_prompts: list[int]
    """Lengths of those that come last."""

    def num_blocks(self, block_size: int) -> int:
        """That the cache must have so that nobody waits."""
        tokens = [sum(prompt) for prompt in self.prompts] + [length + 1 for length in self.long_prompts]
        blocks = sum(-(-count // block_size) for count in tokens)
        return blocks + blocks // 50 + 1  # the scheduler's watermark


def plan_rehearsal(config: EngineConfig, max_model_len: int) -> Rehearsal:
    """If the context is too short to fill a step with so many requests, its steps are as full as any."""
    seats, budget = config.max_num_seqs, config.max_num_batched_tokens
    prompts = []
    for number in range(seats):
        decodes = 3 + seats.bit_length() - number.bit_length() + (0 if number else LAST_DECODES - 1)
        prompts.append((max(1, min((budget + number) // seats, max_model_len - decodes)), decodes))
    longest = max(1, min(budget * 3 // 2, max_model_len - 1))
    return Rehearsal(prompts, [longest] * min(budget // longest + 1, seats))


def measure_steps(
    engine: Steppable, rehearsal: Rehearsal, device: torch.device, progress: Callable[[str, float], None]
) -> StepMemory:
    """Raises `ValueError` if what the model computes are no numbers."""
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    most, decode = 0, 0
    torch.cuda.reset_peak_memory_stats(device)
    for only_decodes, done in _rehearse(engine, rehearsal):
        progress("measuring memory", done)
        peak = torch.cuda.max_memory_allocated(device) - allocated
        most = max(most, peak, torch.cuda.max_memory_reserved(device) - reserved)
        decode = max(decode, peak) if only_decodes else decode
        torch.cuda.reset_peak_memory_stats(device)
    return StepMemory(most, decode)


def warm_up(engine: Steppable, rehearsal: Rehearsal, progress: Callable[[str, float], None]) -> None:
    """Raises `ValueError` if what the model computes are no numbers."""
    for _, done in _rehearse(engine, rehearsal):
        progress("warming up", done)


def _rehearse(engine: Steppable, rehearsal: Rehearsal) -> Iterator[tuple[bool, float]]:
    """Yields after each step whether it only decoded, and the share that is done."""
    long_prompts = [(length, 1) for length in rehearsal.long_prompts]
    total = sum(count for _, count in rehearsal.prompts + long_prompts)
    to_come = _add(engine, "short", rehearsal.prompts)
    prefilling = set(to_come)
    while engine.has_work:
        only_decodes = not prefilling
        result = engine.step()
        if result.failed:
            raise ValueError(f"before any request, in a step to warm up: {result.failed[0][1]}")
        for output in result.outputs:
            prefilling.discard(output.id)
            to_come[output.id] -= 1
            if output.finish_reason:
                del to_come[output.id]
        yield only_decodes, 1 - (sum(to_come.values()) + len(long_prompts)) / total
        if long_prompts and sum(to_come.values()) <= LAST_DECODES:
            added = _add(engine, "long", long_prompts)
            to_come |= added
            prefilling |= added.keys()
            long_prompts = []


def _add(engine: Steppable, name: str, prompts: Sequence[tuple[int, int]]) -> dict[bytes, int]:
    """Returns how many tokens are to come, by request id."""
    ids = [f"{name} {number}".encode() for number in range(len(prompts))]
    for request_id, (length, max_tokens) in zip(ids, prompts, strict=True):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **HEAVIEST)
        engine.add(EngineRequest(request_id, [0] * length, [], sampling))
    return dict(zip(ids, (max_tokens for _, max_tokens in prompts), strict=True))
