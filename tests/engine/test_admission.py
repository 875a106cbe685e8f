"""Admission on small pools, compared with a search through all moves of memory."""

import random
from itertools import product

import pytest

from baton.engine.api.request import EngineRequest
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.cells import Cells
from baton.engine.core.elastic import Amounts, Budget
from baton.engine.core.request_lives import RequestLives
from baton.engine.core.request_memory import Verdict, Wants
from baton.engine.core.state_copies import StateCopies
from baton.engine.core.units import Units
from baton.engine.core.window_blocks import WindowBlocks, WindowSpan
from baton.kv_names.cache_kinds import Window

BLOCKS, SLOTS, WINDOWS, UNIT = 12, 8, 20, 2
READ = 3
"""Blocks that a window reaches back to."""
PAGES = Amounts(blocks=3, slots=2, windows=1)


def units_of(rng: random.Random, places: int, *, elastic: bool, fewest: int = 1, first: int = 0) -> Units:
    if not elastic:
        return Units.fixed(places, first)
    return Units(first, places, UNIT, rng.randint(fewest, places // UNIT), keeps_first=not first)


def lives_of(rng: random.Random, *, elastic: bool, kinds: str) -> tuple[RequestLives, StateCopies | None]:
    """With blocks that are cached or held, some with window blocks. `kinds`: what requests need beside
    blocks, and copies of states."""
    windows = states = copies = budget = None
    if "windows" in kinds:
        units = units_of(rng, WINDOWS, elastic=elastic, fewest=6)
        windows = WindowBlocks(BLOCKS, WINDOWS, 4, [Window(4, tile=4)], 4, units)
        windows.promise(WindowSpan(), rng.randint(0, windows.grantable) if rng.random() < 0.5 else 0)
    pool = BlockPool(BLOCKS, 4, windows, units_of(rng, BLOCKS, elastic=elastic))
    if "states" in kinds:
        states = Cells[bytes](units_of(rng, SLOTS, elastic=elastic))
    if "copies" in kinds:
        copies = StateCopies(SLOTS, SLOTS, 4, 4, 4, units_of(rng, SLOTS, elastic=elastic, first=SLOTS))
        for number in range(rng.randint(0, copies.free)):
            if (slot := copies.allocate()) is not None and rng.random() < 0.7:
                copies.name(slot, bytes([number]))
    if elastic:
        budget = Budget(pool, states, copies, pages=PAGES, page_bytes=1, free_pages=rng.randrange(6))
    share, cached, spread = (rng.choice((each, rng.random())) for each in (0.0, 1.0, 1.0))
    apart: list[int] = []
    for number, block in enumerate(pool.hold(rng.randint(0, pool.free)).table):
        span, is_read = WindowSpan(), rng.random() < share
        if windows is not None and min(windows.grantable, windows.unowed) > 0 and rng.random() < cached:
            windows.promise(span, 1)
            windows.begin(span, [block], 0, 1)
            if not is_read:
                windows.close(span, [block])
            if windows.unused and windows.unowed > 0 and rng.random() < spread:
                apart += windows.take(1)[0]  # so the next one may be in another unit
        if rng.random() < cached:
            pool.publish(block, bytes([number]))
        if not is_read:
            pool.end(block)
    if windows is not None:
        windows.end(*apart)
    for slot in () if states is None else states.take(rng.randint(0, states.free))[0]:
        if states is not None and rng.random() < 0.3:
            states.end(slot)
    return RequestLives(pool, max_num_seqs=SLOTS, states=states, budget=budget), copies


def can_be_had(lives: RequestLives, copies: StateCopies | None, wants: Wants, hits: list[int]) -> bool:
    """Tries all numbers of units that could go and come."""
    pool, states, windows, budget = lives.pool, lives.states, lives.pool.windows, lives.budget
    blocks = -(-wants.tokens // pool.block_size) - len(hits) + pool.unreferenced(hits) + wants.kept
    wanted = [(blocks, pool.free)]
    pools: list[tuple[Units, int]] = [(pool.units, PAGES.blocks)]
    if states is not None:
        wanted.append((wants.slots, states.free))
        pools.append((states.units, PAGES.slots))
    if windows is not None:
        wanted.append((wants.windows + lives.memory.kept_windows, windows.grantable))
        pools.append((windows.units, PAGES.windows))
    if budget is None:
        return all(want <= free for want, free in wanted)
    idle = [[*units.idle] for units, _ in pools]
    idle[0] = [unit for unit in idle[0] if not {*hits} & {*pool.units.places(unit)}]
    if windows is not None:
        read = {int(windows.of[block]) for block in hits if block in windows}
        idle[-1] = [unit for unit in idle[-1] if not read & {*windows.units.places(unit)}]
    changes = [range(-len(of), len(units.absent) + 1) for of, (units, _) in zip(idle, pools, strict=True)]
    if copies is not None:  # the request may begin with one, and takes the memory of others
        pools.append((copies.units, PAGES.slots))
        changes.append(range(-max(0, len(copies.units.idle) - bool(hits)), 1))
        wanted.append((0, copies.free + UNIT * SLOTS))
    return any(
        budget.free_pages >= sum(pages * count for (_, pages), count in zip(pools, counts, strict=True))
        and all(want <= free + UNIT * count for (want, free), count in zip(wanted, counts, strict=True))
        for counts in product(*changes)
    )


@pytest.mark.parametrize(
    "kinds",
    ["states", "windows", "states and windows", "states and copies", "states and copies and windows"],
)
@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_request_is_admitted_if_and_only_if_its_memory_can_be_had(elastic: bool, kinds: str) -> None:
    rng, verdicts = random.Random(3), list[tuple[Verdict, bool]]()
    for _ in range(200):
        lives, copies = lives_of(rng, elastic=elastic, kinds=kinds)
        pool, memory = lives.pool, lives.memory
        cached = [block for block in range(BLOCKS) if pool.has_cached(range(block, block + 1))]
        if rng.random() < 0.5:  # a hit in each unit: their neighbours keep their memory, too
            cached = [*{block // UNIT: block for block in cached}.values()]
        hits = rng.sample(cached, rng.randint(0, len(cached)))
        hits.sort(key=pool.has_window)  # of layers with windows, a request reads the last ones
        while hits and not all(map(pool.has_window, hits[-READ:])):
            hits.pop()
        tokens = rng.choice((max(1, 4 * len(hits)), rng.randint(max(1, 4 * len(hits)), 4 * BLOCKS)))
        need = memory.window_need(tokens)
        for kept, slots in product(range(8), (1, rng.randint(1, SLOTS))):
            wants = Wants(tokens, hits, kept, slots, need)
            answer = memory.admit(wants)
            choices = [hits, []] if elastic else [hits]
            possible = [each for each in choices if can_be_had(lives, copies, wants, each)]
            assert (answer.verdict is Verdict.TAKE) is bool(possible)
            verdicts.append((answer.verdict, bool(answer.hits)))
            assert not possible or [*answer.hits] == possible[0], "it begins with what is cached if it can"
        answer = memory.admit(Wants(tokens, hits, 0, 1, need))
        if answer.verdict is not Verdict.TAKE:
            continue
        live = lives._new(EngineRequest(b"r", [1] * tokens), None)
        memory.take(live, tokens, answer.hits)
        assert (live.states is not None) is ("states" in kinds)
        assert [*live.blocks[: len(answer.hits)]] == [*answer.hits]
        pool.assert_consistent()
        memory.free(live)
        pool.assert_consistent()
    assert len({*verdicts}) == 3
