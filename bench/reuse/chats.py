"""Chats from a trace in Mooncake's format (FAST 2025). Prompts continue the real answers. Pure.

Such a trace has a time, two lengths and the ids of the prompt's blocks for each request. It does not say
which request continues which. A request counts as the next turn of a chat if it begins with all full blocks
of the chat's last prompt, and has room for the answer to it. Its prompt then consists of that prompt, the
real answer, and new tokens. Otherwise a block has the tokens that its id stands for.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.bench.load.traffic.datasets import MOONCAKE_BLOCK, TraceLine

TOKENS = range(1000, 40_000)
"""Token ids of prompts, which all models of the bench have."""
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 4, 2
MESSAGE, ANSWER = (500, 4000), (150, 600)
"""Median and most tokens, log-normal with `SIGMA`."""
SIGMA = 0.7
MEAN_TURNS = 5.0
THINK_MS = 2000.0
"""Mean time from one turn to the next."""
REQUESTS_PER_S = 15.0
CACHE_BLOCK = 16
"""Tokens of a block of the infinite cache. No worker has smaller ones by default."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request.

    Attributes:
        at: seconds from the start of the trace.
        answer: tokens of the answer, at least one.
        blocks: ids of the prompt's blocks.
        before: number of the request that it continues; None if it begins a chat.
    """

    at: float
    length: int
    answer: int
    blocks: tuple[int, ...]
    before: int | None


def synthetic(requests: int, seed: int) -> list[TraceLine]:
    """A trace of chats. Each has one of few system prompts, and a geometric number of turns."""
    rng = random.Random(seed)
    ids: defaultdict[tuple[str, int, int], int] = defaultdict(itertools.count().__next__)
    lines: list[TraceLine] = []
    start = 0.0
    for chat in itertools.count():
        start += rng.expovariate(REQUESTS_PER_S / MEAN_TURNS / 1e3)
        if len(lines) >= requests and start > sorted(line.timestamp for line in lines)[requests - 1]:
            break
        system, at, length = rng.randrange(SYSTEM_PROMPTS), start, SYSTEM_BLOCKS * MOONCAKE_BLOCK
        for turn in itertools.count():
            length += _length(rng, *MESSAGE)
            names = [
                ("system", system, i) if i < SYSTEM_BLOCKS else ("chat", chat, i)
                for i in range(length // MOONCAKE_BLOCK)
            ]
            names += [("end", chat, turn)] * (length % MOONCAKE_BLOCK > 0)
            answer = _length(rng, *ANSWER)
            lines.append(TraceLine(round(at), length, answer, [ids[name] for name in names]))
            if rng.random() < 1 / MEAN_TURNS:
                break
            length += answer
            at += rng.expovariate(1 / THINK_MS)
    return sorted(lines, key=lambda line: line.timestamp)[:requests]


def _length(rng: random.Random, median: int, most: int) -> int:
    return min(most, max(1, round(median * rng.lognormvariate(0, SIGMA))))


def asked_of(lines: Sequence[TraceLine], *, length_scale: float, time_scale: float) -> list[Asked]:
    """The requests of a trace, in order of time. `length_scale` scales blocks, prompts and answers alike."""
    followers: defaultdict[int, set[int]] = defaultdict(set)
    for line in lines:
        for block, following in itertools.pairwise(_whole(line)):
            followers[block].add(following)
    chat_of: dict[int, int] = {}  # block → chat that had it first
    last: dict[int, int] = {}  # chat → number of its last request
    asked: list[Asked] = []
    for number, line in enumerate(lines):
        *_, shared = (None, *itertools.takewhile(chat_of.__contains__, line.hash_ids))
        before = None if shared is None else last[chat_of[shared]]
        if before is not None and not _continues(line, lines[before], followers):
            before = None
        chat = number if before is None or shared is None else chat_of[shared]
        last[chat] = number
        for block in line.hash_ids:
            chat_of.setdefault(block, chat)
        asked.append(
            Asked(
                (line.timestamp - lines[0].timestamp) / 1e3 / time_scale,
                max(1, round(line.input_length * length_scale)),
                max(1, round(line.output_length * length_scale)),
                tuple(line.hash_ids),
                before,
            )
        )
    return asked


def distinct_tokens(asked: Sequence[Asked], *, length_scale: float) -> int:
    """About how many tokens the prompts and answers have, without the beginnings that came before."""
    block, seen, total = max(1, round(MOONCAKE_BLOCK * length_scale)), set[int](), 0
    for one in asked:
        if one.before is not None:
            before = asked[one.before].length + asked[one.before].answer
        else:
            before = block * sum(1 for _ in itertools.takewhile(seen.__contains__, one.blocks))
        total += max(0, one.length - before) + one.answer
        seen.update(one.blocks)
    return total


def _continues(line: TraceLine, before: TraceLine, followers: dict[int, set[int]]) -> bool:
    """Not if prompts differ after the last full block of the one before: many chats may begin with it."""
    whole = _whole(before)
    room = line.input_length > before.input_length + max(1, before.output_length)
    return bool(whole) and room and line.hash_ids[: len(whole)] == whole and len(followers[whole[-1]]) <= 1


def _whole(line: TraceLine) -> list[int]:
    return line.hash_ids[: line.input_length // MOONCAKE_BLOCK]


class Prompts:
    """The prompts of one run. Other seeds give other tokens, so that runs have no prefix in common."""

    def __init__(self, asked: Sequence[Asked], *, length_scale: float, seed: int) -> None:
        self._asked = asked
        self._block = max(1, round(MOONCAKE_BLOCK * length_scale))
        self._seed = seed
        self._blocks: dict[int, list[int]] = {}  # full blocks of prompts that are written
        self._texts: dict[int, list[int]] = {}  # prompt and answer, by request

    def write(self, number: int) -> list[int]:
        """The prompt of a request, after `answered` for the request that it continues."""
        asked = self._asked[number]
        tokens = [] if asked.before is None else list(self._texts[asked.before])
        for index, block in enumerate(asked.blocks):
            have = len(tokens) - index * self._block
            if have < self._block:
                tokens += (self._blocks.get(block) or self._random(block, self._block))[have:]
        del tokens[asked.length :]
        tokens += self._random(-1 - number, asked.length - len(tokens))  # the trace names too few blocks
        for index, block in enumerate(asked.blocks[: len(tokens) // self._block]):
            self._blocks.setdefault(block, tokens[index * self._block : (index + 1) * self._block])
        return tokens

    def answered(self, number: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._texts[number] = [*prompt, *answer]

    def _random(self, name: int, count: int) -> list[int]:
        return random.Random(f"{self._seed} {name}").choices(TOKENS, k=count)


class InfiniteCache:
    """Keeps everything that any worker had, in small blocks. So it bounds what a cluster can find."""

    def __init__(self) -> None:
        self._known: set[int] = set()

    def find(self, prompt: Sequence[int]) -> int:
        """Tokens of the prompt that are known. The last one is computed in any case."""
        found = sum(1 for _ in itertools.takewhile(self._known.__contains__, _names(prompt[:-1])))
        return found * CACHE_BLOCK

    def add(self, text: Sequence[int]) -> None:
        self._known.update(_names(text))


def _names(text: Sequence[int]) -> Iterator[int]:
    """Hashes of all tokens up to the end of each full block."""
    name = 0
    for end in range(CACHE_BLOCK, len(text) + 1, CACHE_BLOCK):
        name = hash((name, *text[end - CACHE_BLOCK : end]))
        yield name
