"""Admission on small pools, compared with a search through all moves of memory."""

import random
from itertools import product

import pytest

from baton.engine.api.request import EngineRequest
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.cells import Cells
from baton.engine.core.elastic import Budget
from baton.engine.core.request_lives import RequestLives
from baton.engine.core.request_memory import Verdict, Wants
from baton.engine.core.units import Units

BLOCKS, SLOTS, UNIT = 12, 8, 2
BLOCK_PAGES, SLOT_PAGES = 3, 2


def lives_of(rng: random.Random, *, elastic: bool) -> RequestLives:
    """With some cached blocks, and some that are held."""
    if not elastic:
        pool, states = BlockPool(BLOCKS, 4), Cells[bytes](Units.fixed(SLOTS))
    else:
        present = rng.randint(1, BLOCKS // UNIT), rng.randint(1, SLOTS // UNIT)
        pool = BlockPool(BLOCKS, 4, units=Units(0, BLOCKS, UNIT, present[0], keeps_first=True))
        states = Cells[bytes](Units(0, SLOTS, UNIT, present[1], keeps_first=True))
    budget = None
    if elastic:
        budget = Budget(
            pool, states, None, block_pages=BLOCK_PAGES, place_pages=SLOT_PAGES, page_bytes=1,
            free_pages=rng.randrange(6),
        )  # fmt: skip
    for number, block in enumerate(pool.allocate(rng.randint(0, pool.free))):
        if rng.random() < 0.6:
            pool.publish(block, bytes([number]))
        if rng.random() < 0.6:
            pool.release([block])
    for slot in states.take(rng.randint(0, states.free)):
        if rng.random() < 0.3:
            states.end(slot)
    return RequestLives(pool, max_num_seqs=SLOTS, states=states, budget=budget)


def can_be_had(lives: RequestLives, wants: Wants, hits: list[int]) -> bool:
    """Tries all numbers of units that could go and come."""
    pool, states, budget = lives.pool, lives.states, lives.budget
    assert states is not None
    blocks = -(-wants.tokens // pool.block_size) - len(hits) + pool.unreferenced(hits) + wants.kept
    if budget is None:
        return blocks <= pool.free and wants.slots <= states.free
    idle_blocks = [unit for unit in pool.units.idle if not {*hits} & {*pool.units.places(unit)}]
    changes = (
        range(-len(idle_blocks), len(pool.units.absent) + 1),
        range(-len(states.units.idle), len(states.units.absent) + 1),
    )
    return any(
        budget.free_pages >= BLOCK_PAGES * of_blocks + SLOT_PAGES * of_slots
        and blocks <= pool.free + UNIT * of_blocks
        and wants.slots <= states.free + UNIT * of_slots
        for of_blocks, of_slots in product(*changes)
    )


@pytest.mark.parametrize("elastic", [False, True], ids=["fixed", "elastic"])
def test_a_request_is_admitted_if_and_only_if_its_memory_can_be_had(elastic: bool) -> None:
    rng, verdicts = random.Random(3), list[tuple[Verdict, bool]]()
    for _ in range(1500):
        lives = lives_of(rng, elastic=elastic)
        pool, states, memory = lives.pool, lives.states, lives.memory
        assert states is not None
        cached = [block for block in range(BLOCKS) if pool.has_cached(range(block, block + 1))]
        hits = rng.sample(cached, rng.randint(0, min(3, len(cached))))
        tokens = rng.randint(max(1, 4 * len(hits)), 4 * BLOCKS)
        wants = Wants(tokens, hits, rng.randint(0, 2), rng.randint(1, 3), 0)
        answer = memory.admit(wants)
        choices = [hits, []] if elastic else [hits]
        possible = [each for each in choices if can_be_had(lives, wants, each)]
        assert (answer.verdict is Verdict.TAKE) is bool(possible)
        verdicts.append((answer.verdict, bool(answer.hits)))
        if not possible:
            continue
        assert [*answer.hits] == possible[0], "it begins with what is cached if it can"
        live = lives._new(EngineRequest(b"r", [1] * tokens), None)
        memory.take(live, tokens, answer.hits)
        assert live.states is not None
        assert [*live.blocks[: len(answer.hits)]] == [*answer.hits]
        pool.assert_consistent()
        memory.free(live)
        pool.assert_consistent()
    assert len({*verdicts}) == 3
