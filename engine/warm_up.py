"""The largest steps, once, on a GPU, before anybody waits: what memory they take; and kernels get compiled.

    measure_steps   on a small cache that is thrown away: how much the KV pool must leave free
    warm_up         on the real one, since kernels are compiled for its size too

Both are the same rehearsal. Requests that nobody sent go through the engine's own steps, so what is measured
and compiled is what will run: as many prompts as a step can sample for, all in one step that is full to its
token budget; then decodes of all of them, of half, of a quarter, …; then, beside the last decodes, prompts
that fill a step, and what had to be cut of them; at last, whatever needs other kernels.
"""

from collections import deque
from collections.abc import Callable, Iterator
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

PLAINER: list[tuple[int, dict[str, Any]]] = [(24, {"temperature": 1.0}), (48, {"temperature": 0.0})]
"""Sampling that has kernels of its own where all requests of a step ask for no more; and lengths of prompts
that matrix products have kernels of their own for, however few requests may decode."""

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
class Wave:
    """Requests that come when those before have so many tokens to go."""

    when: int
    prompts: list[tuple[int, int]]
    """(length, max_tokens)"""
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rehearsal:
    waves: list[Wave]

    def num_blocks(self, block_size: int) -> int:
        """That the cache must have so that nobody waits."""
        blocks = sum(-(-sum(prompt) // block_size) for wave in self.waves for prompt in wave.prompts)
        return blocks + blocks // 50 + 1  # the scheduler's watermark


def plan_rehearsal(config: EngineConfig, max_model_len: int) -> Rehearsal:
    """If the context is too short to fill a step with so many requests, its steps are as full as any."""
    seats, budget = config.max_num_seqs, config.max_num_batched_tokens
    prompts = []
    for number in range(seats):
        decodes = 3 + seats.bit_length() - number.bit_length() + (0 if number else LAST_DECODES - 1)
        prompts.append((max(1, min((budget + number) // seats, max_model_len - decodes)), decodes))
    longest = max(1, min(budget * 3 // 2, max_model_len - 1))
    long_prompts = [(longest, 1)] * min(budget // longest + 1, seats)
    plainer = [Wave(0, [(max(1, min(n, max_model_len - 2)), 2)], sampling) for n, sampling in PLAINER]
    return Rehearsal([Wave(0, prompts, HEAVIEST), Wave(LAST_DECODES, long_prompts, HEAVIEST), *plainer])


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
    waves = deque(enumerate(rehearsal.waves))
    total = left = sum(count for wave in rehearsal.waves for _, count in wave.prompts)
    to_come: dict[bytes, int] = {}  # tokens
    prefilling: set[bytes] = set()
    while waves or engine.has_work:
        if waves and sum(to_come.values()) <= waves[0][1].when:
            number, wave = waves.popleft()
            added = _add(engine, f"wave {number}", wave)
            to_come |= added
            prefilling |= added.keys()
        only_decodes = not prefilling
        result = engine.step()
        if result.failed:
            raise ValueError(f"before any request, in a step to warm up: {result.failed[0][1]}")
        for output in result.outputs:
            prefilling.discard(output.id)
            to_come[output.id] -= 1
            left -= 1
            if output.finish_reason:
                left -= to_come.pop(output.id)  # of a short context
        yield only_decodes, 1 - left / total


def _add(engine: Steppable, name: str, wave: Wave) -> dict[bytes, int]:
    """Returns how many tokens are to come, by request id."""
    to_come = {}
    for number, (length, max_tokens) in enumerate(wave.prompts):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **wave.sampling)
        request = EngineRequest(f"{name} {number}".encode(), [0] * length, [], sampling)
        engine.add(request)
        to_come[request.id] = max_tokens
    return to_come
