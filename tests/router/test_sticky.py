"""Prefill policies, checked over many sessions without a router."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_names import Tier
from baton.router.policy.prefill import PrefillRequest, round_robin, sticky
from baton.router.policy.prefill_loads import PrefillLoads, PrefillWork
from tests.router.test_prefill_loads import status

WORKERS = [f"10.0.0.{i}:7001" for i in range(8)]
SPEED = 1000.0
_RANDOM = random.Random(5)
KEYS = [_RANDOM.getrandbits(64) for _ in range(4000)]
PROMPT = [_RANDOM.getrandbits(64) for _ in range(10)]


def loads_of(
    workers: list[str], waiting: dict[str, int] | None = None
) -> tuple[PrefillLoads, dict[str, int]]:
    """Returns loads with the row of each worker."""
    loads = PrefillLoads()
    rows = {name: loads.join(name, block_size=16, now=0) for name in workers}
    for name, row in rows.items():
        tokens = (waiting or {}).get(name, 0)
        loads.reported(row, status(tokens, SPEED), 0)
    return loads, rows


def choose(loads: PrefillLoads, key: int, *, chunks: list[int] = [], avoid=(), tokens: int = 100) -> int:  # noqa: B006
    request = PrefillRequest(key=key, tokens=tokens, chunks=chunks)
    snapshot = loads.snapshot(request, 0, avoid)
    assert snapshot is not None
    return sticky(snapshot, request)


def homes(workers: list[str]) -> dict[int, str]:
    """Returns the worker of each session while all workers are idle."""
    loads, rows = loads_of(workers)
    names = {row: name for name, row in rows.items()}
    return {key: names[choose(loads, key)] for key in KEYS}


def test_the_same_session_goes_to_the_same_worker_in_every_router():
    assert homes(WORKERS) == homes(list(reversed(WORKERS)))


def test_sessions_spread_over_all_workers():
    counts = Counter(homes(WORKERS).values())
    assert set(counts) == set(WORKERS)
    assert max(counts.values()) < 1.3 * len(KEYS) / len(WORKERS)


@pytest.mark.parametrize("count", [2, 8, 64])
def test_a_worker_that_leaves_or_joins_moves_only_its_share(count: int):
    workers = [f"10.0.1.{i}:7001" for i in range(count)]
    before, after = homes(workers), homes(workers[1:])
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if before[key] == workers[0]}
    assert 0 < len(moved) / len(KEYS) <= 1.35 / count


def test_a_worker_that_comes_back_in_another_row_gets_its_sessions_back():
    loads, rows = loads_of(WORKERS)
    before = {key: choose(loads, key) for key in KEYS[:500]}
    names = {row: name for name, row in rows.items()}
    for name in WORKERS[:2]:
        loads.leave(rows[name])
    for name in reversed(WORKERS[:2]):
        names[loads.join(name, block_size=16, now=0)] = name
    old = {row: name for name, row in rows.items()}
    assert {key: names[choose(loads, key)] for key in before} == {k: old[row] for k, row in before.items()}


def test_a_session_with_a_busy_home_goes_to_the_next_worker_and_comes_back():
    loads, _ = loads_of(WORKERS, dict.fromkeys(WORKERS, 100))
    request = PrefillRequest(key=KEYS[0], tokens=10)
    snapshot = loads.snapshot(request, 0)
    assert snapshot is not None
    first, second, *_ = snapshot.ring.walk(request.key)
    loads.reported(first, status(1000, SPEED), 0)
    assert choose(loads, KEYS[0]) == second
    loads.reported(first, status(100, SPEED), 0)
    assert choose(loads, KEYS[0]) == first


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=200), st.integers(0, 2**64 - 1), st.integers(1, 8))
def test_no_worker_gets_work_beyond_its_bound(costs: list[int], key: int, workers: int):
    """The worst case is a single session. Its worker had at most the mean load."""
    loads, _ = loads_of(WORKERS[:workers])
    for cost in costs:
        request = PrefillRequest(key=key, tokens=cost)
        snapshot = loads.snapshot(request, 0)
        assert snapshot is not None
        row = sticky(snapshot, request)
        assert snapshot.wait[row] <= snapshot.wait.mean() * (1 + 1e-8)
        loads.sent(row, PrefillWork(cost), 0)


def test_a_request_goes_to_the_worker_that_has_its_prefix():
    loads, _ = loads_of(WORKERS)
    home = choose(loads, KEYS[0], chunks=PROMPT, tokens=700)
    other = next(row for row in range(8) if row != home)
    loads.index.add(other, PROMPT)
    assert choose(loads, KEYS[0], chunks=PROMPT, tokens=700) == other
    loads.index.add(home, PROMPT)
    assert choose(loads, KEYS[0], chunks=PROMPT, tokens=700) == home, "the other worker has not more"


def test_a_prefix_is_computed_again_if_waiting_costs_more():
    loads, _ = loads_of(WORKERS)
    home = choose(loads, KEYS[0])
    other = next(row for row in range(8) if row != home)
    loads.index.add(other, PROMPT)  # 640 tokens: 0.64 s to compute
    loads.reported(other, status(500, SPEED), 0)
    assert choose(loads, KEYS[0], chunks=PROMPT, tokens=700) == other
    loads.reported(other, status(2000, SPEED), 0)
    assert choose(loads, KEYS[0], chunks=PROMPT, tokens=700) == home


def after_prompts_of(tokens: int) -> PrefillLoads:
    """A prompt computed so many tokens lately."""
    loads, rows = loads_of(WORKERS)
    work = PrefillWork(tokens)
    loads.sent(rows[WORKERS[0]], work, -1)
    loads.ended(rows[WORKERS[0]], work, computed=True, now=0)
    return loads


def test_a_short_prefix_on_several_workers_does_not_move_a_session():
    loads = after_prompts_of(512)
    home = choose(loads, KEYS[0])
    others = [row for row in range(8) if row != home]
    for row in others[:2]:
        loads.index.add(row, PROMPT[:8])
    assert choose(loads, KEYS[0], chunks=PROMPT, tokens=700) == home
    loads.index.add(others[1], PROMPT)
    assert choose(loads, KEYS[0], chunks=PROMPT, tokens=700) == others[1], "it has the whole session"


def test_a_longer_prefix_may_be_on_more_workers_before_it_is_copied():
    loads = after_prompts_of(512)
    home = choose(loads, KEYS[0])
    document = list(range(3 * 512 // 64))
    for row in [row for row in range(8) if row != home][:3]:
        loads.index.add(row, document)
        assert choose(loads, KEYS[0], chunks=document, tokens=1600) != home
    loads.index.add(next(row for row in range(7, 0, -1) if row != home), document)
    assert choose(loads, KEYS[0], chunks=document, tokens=1600) == home


def test_avoided_workers_are_chosen_only_without_others():
    loads, rows = loads_of(WORKERS[:2])
    first = choose(loads, KEYS[0], chunks=PROMPT, tokens=700)
    loads.index.add(first, PROMPT)
    [second] = {*rows.values()} - {first}
    assert choose(loads, KEYS[0], chunks=PROMPT, tokens=700, avoid={first}) == second
    assert choose(loads, KEYS[0], chunks=PROMPT, tokens=700, avoid={first, second}) == first


def test_a_worker_that_drains_or_left_is_not_chosen():
    loads, rows = loads_of(WORKERS[:3])
    drains, left, stays = rows.values()
    loads.index.add(drains, PROMPT)
    loads.serve(drains, False)
    loads.leave(left)
    assert {choose(loads, key, chunks=PROMPT, tokens=700) for key in KEYS[:100]} == {stays}
    loads.serve(drains, True)
    assert {choose(loads, key, chunks=PROMPT, tokens=700) for key in KEYS[:100]} == {drains}
    loads.leave(drains)
    loads.leave(stays)
    assert loads.snapshot(PrefillRequest(key=1, tokens=1), 0) is None


def test_round_robin_chooses_each_in_turn():
    loads, rows = loads_of(WORKERS)
    loads.serve(rows[WORKERS[3]], False)
    chosen = []
    for arrival in range(14):
        request = PrefillRequest(key=7, tokens=1, arrival=arrival)
        snapshot = loads.snapshot(request, 0)
        assert snapshot is not None
        chosen.append(round_robin(snapshot, request))
    assert chosen == 2 * [row for name, row in rows.items() if name != WORKERS[3]]


def test_a_prefix_on_the_device_is_better_than_one_on_a_slow_disk() -> None:
    document = list(range(40))  # so long that several workers keep it
    loads, rows = loads_of(WORKERS)
    key = next(key for key in KEYS if choose(loads, key) not in (rows[WORKERS[0]], rows[WORKERS[1]]))
    on_device, on_disk = (rows[name] for name in WORKERS[:2])
    for row in (on_device, on_disk):
        loads.index.add(row, document)
    for slow, fast in ((on_device, on_disk), (on_disk, on_device)):
        loads.index.place(slow, document, Tier.DISK)
        loads.index.place(fast, document, Tier.DEVICE)
        loads.reported(slow, status(0, SPEED, disk_tokens_per_s=4 * SPEED), 0)
        assert choose(loads, key, chunks=document, tokens=2600) == fast
        snapshot = loads.snapshot(PrefillRequest(key=key, tokens=2600, chunks=document), 0)
        assert snapshot is not None
        assert (snapshot.load(fast), snapshot.load(slow)) == (0, 0.64)
    loads.reported(on_disk, status(0, SPEED, disk_tokens_per_s=1.0), 0)
    snapshot = loads.snapshot(PrefillRequest(key=key, tokens=2600, chunks=document), 0)
    assert snapshot is not None
    assert snapshot.load(on_disk) == 2.56, "it would compute them"


def test_sessions_spread_over_workers_that_cost_the_same() -> None:
    """Several routers know the same reports. All would choose the same one of equal workers."""
    loads, rows = loads_of(WORKERS, dict.fromkeys(WORKERS, 0))
    document = [_RANDOM.getrandbits(64) for _ in range(100)]
    holders = [rows[name] for name in WORKERS[:4]]
    for row in holders:
        loads.index.add(row, document)
    counts = Counter(choose(loads, key, chunks=document, tokens=6500) for key in KEYS)
    assert set(counts) == set(holders)
    assert max(counts.values()) < 1.5 * min(counts.values())
