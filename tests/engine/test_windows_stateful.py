"""Arrays with windows under random operations: no token reads what did not come and was not computed.

Each place of such an array has a key of the tokens up to its position. What comes from other workers is only
what the next token reads. If these arrays have blocks of their own, places are in these.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import pytest

from baton.engine.api.pools import Pool
from baton.engine.api.request import EngineRequest
from baton.engine.api.sampling_params import SamplingParams
from baton.engine.core.elastic import Move
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.prefix_exchange import Import
from baton.engine.core.window_blocks import WindowBlocks, WindowSpan
from baton.kv_names import CHUNK_TOKENS, cache_kinds
from baton.kv_names.cache_kinds import Window, first_read
from tests.engine.scheduling import make, step
from tests.engine.test_scheduler_stateful import DRAFTS, FIRST_TOKEN, OPERATIONS, Operations

Key = tuple[int, int, int]
"""Of a place: the family of the request, how many tokens are of its prompt, and the position."""
SEEDS = 3


class WithWindows(Operations):
    def __init__(self, seed: int, windows: Sequence[Window], **options: Any) -> None:
        self.windows = windows
        self.kept: dict[int, Key] = {}
        self.families: dict[Import, int] = {}
        super().__init__(seed, windows=windows, **options)
        if (budget := self.scheduler.lives.budget) is not None:
            budget.move = self.move

    def move(self, moves: Sequence[Move]) -> None:
        """Memory comes with nothing in it, and no step may use what goes."""
        for cells, unit, present in moves:
            self.done["moves"] += 1
            places = range(2 * unit, 2 * unit + 2)
            if cells is Pool.BLOCKS:
                used = set[int]().union(*(flight.blocks(self.block) for flight in self.flights))
            else:
                for at in range(places.start * self.block, places.stop * self.block):
                    self.kept.pop(at, None)
                used = {slot // self.block for flight in self.flights for slot in flight.step.window_slots}
            assert present or used.isdisjoint(places)

    def first_read(self, position: int) -> int:
        return first_read(self.windows, position)

    def place(self, table: Sequence[int], position: int) -> int:
        block = table[position // self.block]
        if (windows := self.scheduler.lives.pool.windows) is not None:
            block = int(windows.of[block])
        return block * self.block + position % self.block

    def write(self, table: Sequence[int], positions: Iterable[int], family: int, prompt: int) -> None:
        for position in positions:
            place = self.place(table, position)
            assert place >= self.block or self.scheduler.lives.pool.windows is None, "a token without a slot"
            self.kept[place] = family, min(prompt, position + 1), position

    def check(self, table: Sequence[int], positions: Iterable[int], family: int, prompt: int) -> None:
        for position in positions:
            key = family, min(prompt, position + 1), position
            assert self.kept.get(self.place(table, position)) == key, "a position is missing"

    def of(self, live: LiveRequest) -> tuple[Sequence[int], int, int]:
        """The table of a request, its family, and the length of its prompt."""
        prompt = live.request.prompt_ids
        return live.blocks, prompt[0] // FIRST_TOKEN - 1, len(prompt)

    def launch(self, chunk_limit: int | None) -> None:
        before = len(self.flights)
        super().launch(chunk_limit)
        if (budget := self.scheduler.lives.budget) is not None:
            budget.go_on(0.0)
        for flight in self.flights[before:]:
            for live, chunk in flight.schedule.chunks.items():
                table, family, prompt = self.of(live)
                # Drafts, and those of the step before, whose end is not known yet.
                stop = min(chunk.stop + live.slack, len(table) * self.block)
                self.write(table, range(chunk.start, stop), family, prompt)
                self.check(table, range(self.first_read(chunk.start), chunk.stop), family, prompt)

    def join(self, live: LiveRequest) -> None:
        stop, (table, *of) = len(live.token_ids), self.of(live)
        for position in range(live.num_cached, self.first_read(stop)):
            self.kept.pop(self.place(table, position), None)  # of a request before
        self.write(table, range(max(live.num_cached, self.first_read(stop)), stop), *of)
        super().join(live)

    def start_part(self, cuts: list[int], family: int) -> None:
        before = {*self.unverified}
        super().start_part(cuts, family)
        for live in [live for live in self.scheduler.lives if live.id in self.unverified - before]:
            table, *of = self.of(live)
            own = [at for each in live.shared.ranges for at in each]
            for each in live.shared.ranges:
                read = range(max(live.num_cached, self.first_read(each.start)), each.start)
                self.write(table, [at for at in read if at not in own], *of)

    def verify(self, live: LiveRequest) -> None:
        (table, *of), ranges = self.of(live), self.of_parts[live.id]
        for position in live.shared.read_at:
            read = range(self.first_read(position), position)
            self.check(table, [at for at in read if any(at in each for each in ranges)], *of)
            self.done["parts"] += 1
        super().verify(live)

    def start_import(self, length: int, family: int, most: int) -> None:
        before = len(self.importing)
        super().start_import(length, family, most)
        for started in self.importing[before:]:
            self.families[started] = family

    def end_import(self, ended: Import, chunks: int) -> None:
        start = ended.missing.first_chunk * CHUNK_TOKENS
        count = min(chunks, len(ended.missing.chunks))
        if ended.state_slot is not None and count < len(ended.missing.chunks):
            count = 0
        stop = start + count * CHUNK_TOKENS
        family = self.families.pop(ended)
        windows, come = self.scheduler.lives.pool.windows, range(max(start, self.first_read(stop)), stop)
        has_window = [windows is None or ended.table[at // self.block] in windows for at in come]
        self.write(ended.table, compress(come, has_window), family, stop)
        super().end_import(ended, chunks)

    def pin(self, length: int, family: int) -> None:
        """Another worker reads a prefix, or a store one chunk that has all positions."""
        exchange, cache = self.scheduler.lives.prefix_exchange, self.scheduler.lives.cache
        assert exchange is not None
        assert cache is not None
        request: EngineRequest = self.request(length, family)
        names, prompt = cache.names(request), len(request.prompt_ids)
        names.extend(request.prompt_ids, prompt)
        if (pin := exchange.pin_prefix(names.chunks, 0)) is not None:
            stop = pin.num_chunks * CHUNK_TOKENS
            self.check(pin.table, range(self.first_read(stop), stop), family, prompt)
            self.pinned.append(pin)
            self.done["pins"] += 1
        for chunk, name in enumerate(names.chunks):
            if exchange.cache.is_whole(name) and (pin := exchange.pin([name], chunk)) is not None:
                positions = range(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)
                self.check(pin.table, positions, family, prompt)
                pin.end()

    def accounts_are_right(self) -> None:
        super().accounts_are_right()
        cache = self.scheduler.lives.cache
        assert cache is not None
        cache.settle()
        self.done["thin"] += bool(cache._thin)
        pool = self.scheduler.lives.pool
        for block in range(pool.num_blocks):
            name = pool.cell(block).name
            if name is not None and pool.lookup([name]) and not cache._is_thin_here(name):
                keys = [self.kept.get(self.place([block], at), (-1, -1, -1)) for at in range(self.block)]
                first = keys[0][2]
                assert not first % self.block
                assert [key[2] for key in keys] == [*range(first, first + self.block)], "it is thin"
                assert len({key[0] for key in keys}) == 1


PLAIN = [(1, None, ""), (8, None, ""), (32, None, ""), (1, 1, ""), (8, 5, ""), (32, 5, "")]


@pytest.mark.cases(1)
@pytest.mark.parametrize(("scale", "spare", "elastic"), [*PLAIN, (1, 1, "elastic"), (32, 5, "elastic")])
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize("windows", [[Window(7), Window(3)], [Window(10, chunked=True)]], ids=["", "chunked"])
def test_no_token_reads_what_is_not_there(
    windows: Sequence[Window],
    drafts: bool,
    scale: int,
    spare: int | None,
    elastic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`spare`: window blocks beyond those that one request and a step need. None: all blocks have windows.
    `elastic`: they share memory with the blocks."""
    monkeypatch.setattr(cache_kinds, "AHEAD_TOKENS", 3 * (1 + DRAFTS))
    done = Counter[str]()
    for seed in range(SEEDS):
        done += life(seed, windows, drafts=drafts, scale=scale, spare=spare, elastic=bool(elastic))
    travels = {"imports", "pins"} if scale == 32 else set()
    assert {"steps", "thin"} | travels | ({"moves"} if elastic else set()) <= done.keys(), done


def life(
    seed: int, windows: Sequence[Window], *, drafts: bool, scale: int, spare: int | None, elastic: bool
) -> Counter[str]:
    """Runs random operations, and checks all after each of them. Returns how often which one was done."""
    scaled = [Window(window.length * scale, window.chunked, 2) for window in windows]
    count = None if spare is None else 1 + 3 + cache_kinds.window_blocks(scaled, 4 * scale) + spare
    operations = WithWindows(
        seed, scaled, states=False, cache=True, drafts=drafts, scale=scale, window_blocks=count,
        elastic=elastic,
    )  # fmt: skip
    for _ in range(OPERATIONS):
        operations.operate()
        operations.accounts_are_right()
    operations.end()
    return operations.done


@pytest.mark.parametrize(("seed", "spare", "elastic"), [(9, 1, True), (33, 1, False), (51, None, False)])
def test_an_answer_is_no_prompt_of_another_request(
    seed: int, spare: int | None, elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In these lives a request answers a prompt of 7 tokens, and the prompts of its family are longer. If
    one of these had the token of the answer there, it would begin with that block, and rightly so."""
    monkeypatch.setattr(cache_kinds, "AHEAD_TOKENS", 3 * (1 + DRAFTS))
    life(seed, [Window(7), Window(3)], drafts=False, scale=1, spare=spare, elastic=elastic)


@pytest.mark.parametrize(
    ("scale", "window", "lengths", "cached"),
    [
        (1, 7, (0, 29, 17), 8),  # in blocks of 4: those from position 24 on are whole
        (1, 7, (0, 29, 29), 20),
        (32, 3, (0, 8, 7), 128),
        (32, 2, (5, 7, 7), 128),  # no remnant: of the block of 128 positions from 160 on came
    ],
)
def test_what_follows_begins_with(
    scale: int, window: int, lengths: tuple[int, int, int], cached: int
) -> None:
    """The first prompt is computed here. The next two come from another worker. The last one is computed."""
    windows = [Window(window * scale, tile=2)]
    operations = WithWindows(0, windows, states=False, cache=True, drafts=False, scale=scale)
    lives, found = operations.scheduler.lives, 0

    def run() -> None:
        while not all(live.decodes for live in lives):
            operations.launch(None)
            operations.land(0)
        operations.launch(None)
        operations.land(0)
        for live in list(lives):
            lives.drop(live)

    if lengths[0]:
        operations.start(lengths[0], 0, alone=False)
        run()
    for length in lengths[1:]:
        operations.reserve(length, 0)
        [live] = lives
        found = live.num_cached
        operations.join(live)
        run()
    assert found == cached
    operations.start(lengths[2] + 1, 0, alone=False)
    run()
    operations.end()


def test_a_chunk_takes_no_window_block_that_was_promised() -> None:
    windows, tables = WindowBlocks(40, 21, 4, [Window(4, tile=4)], 8), (range(20), range(20, 40))
    first, second = WindowSpan(), WindowSpan()
    assert (windows.most, windows.grantable) == (9, 18)
    for span, table in zip((first, second), tables, strict=True):
        windows.promise(span, 9)
        windows.begin(span, table, 0, 0)
    assert windows.reachable(first) == 11, "two for a step of 8 tokens"
    windows.reach(first, tables[0], 11)
    assert windows.reachable(second) == 9
    windows.reach(second, tables[1], 9)
    assert windows.reachable(first) == 11
    windows.pass_to(first, tables[0], 23)
    assert (first.first, windows.reachable(first)) == (5, 16)
    windows.reach(first, tables[0], 14)
    assert [*windows.lost] == [0, 1, 2], "those that were read first"
    for span, table in zip((first, second), tables, strict=True):
        windows.close(span, table)
    windows.assert_whole()


def test_a_part_that_decodes_here_gives_back_what_windows_read_no_more() -> None:
    """As long as other workers may read it, it keeps what they read where their ranges begin."""
    scheduler = make(
        num_blocks=32, block_size=4, windows=[Window(4, tile=4)], window_blocks=24, prefix_cache=True
    )
    lives, prompt = scheduler.lives, list(range(60))
    request, ranges = (
        EngineRequest(b"a", prompt, [], SamplingParams(max_tokens=36)),
        [range(20), range(40, 60)],
    )
    live = lives.start_part(request, ranges, read_at=[20])
    windows = lives.pool.windows
    assert live is not None
    assert windows is not None
    for _ in ranges:
        assert {index for index, block in enumerate(live.blocks) if block in windows} >= {4, 9}
        lives.begin_range(live)
        step(scheduler)
    while live.phase is not Phase.HELD:
        step(scheduler)
    assert [(span.first, span.stop) for span in live.window_spans] == [(14, 15), (4, 5)]
    lives.verified(live)
    assert lives.resume(live, b"b")
    assert [(span.first, span.stop) for span in live.window_spans] == [(14, 15)]
    lives.drop(live)
    lives.assert_whole()


def test_drafts_take_no_window_block_that_was_promised() -> None:
    scheduler = make(
        num_blocks=32, block_size=4, windows=[Window(4, tile=4)], window_blocks=24, prefix_cache=True
    )
    lives, windows = scheduler.lives, scheduler.lives.pool.windows
    assert windows is not None
    live = lives.start(EngineRequest(b"a", list(range(60)), [], SamplingParams(max_tokens=36)))
    assert live is not None
    other = WindowSpan()
    windows.promise(other, windows.unowed)
    assert not lives.memory.has_room_for(live, 0), "its last blocks are beyond its window"
    assert windows.unowed == 0
    windows.promise(other, 0)
    assert lives.memory.has_room_for(live, 0)
    lives.drop(live)
    lives.assert_whole()
