"""The chats of `bench.reuse` for the simulator of placement."""

from __future__ import annotations

import xxhash

from baton.bench.load.traffic.datasets import MOONCAKE_BLOCK
from baton.bench.reuse.chats import SYSTEM_BLOCKS, asked_of, synthetic
from baton.content import CHUNK_TOKENS
from baton.simulator.trace import Arrival

_SYSTEM_CHUNKS = SYSTEM_BLOCKS * MOONCAKE_BLOCK // CHUNK_TOKENS


def chats(requests: int, seed: int, *, time_scale: float = 1.0) -> list[Arrival]:
    """`time_scale`: 2 is twice as fast."""
    turns: list[Arrival] = []
    firsts: list[int] = []  # of each request, the number of the first one in its chat
    asked = asked_of(synthetic(requests, seed), length_scale=1.0, time_scale=time_scale)
    for number, one in enumerate(asked):
        firsts.append(number if one.before is None else firsts[one.before])
        system, chat = f"system {one.blocks[0]}", f"chat {firsts[-1]}"
        chunks = (one.length + one.answer - 1) // CHUNK_TOKENS
        names = [_name(system if i < _SYSTEM_CHUNKS else chat, i) for i in range(chunks)]
        turns.append(Arrival(one.at, one.length, max(2, one.answer), firsts[-1], names, one.before))
    return turns


def _name(text: str, index: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{text} {index}".encode())
