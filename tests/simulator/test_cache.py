"""The KV memory of a simulated worker, and sessions that find their history in it."""

import pytest

from baton.bench.lab.routing_sim.agents import TRACE, trace
from baton.kv_names import CHUNK_TOKENS
from baton.simulator.agents import agents
from baton.simulator.cache import KvMemory, Lease
from baton.simulator.placement import Kind, simulate


def fits(memory: KvMemory, *names: int, more: int = 0) -> Lease | None:
    """Of a request with these chunks, and `more` without names."""
    positions = (len(names) + more) * CHUNK_TOKENS
    return memory.take(names, positions, positions)


def take(memory: KvMemory, *names: int, more: int = 0) -> Lease:
    lease = fits(memory, *names, more=more)
    assert lease is not None
    return lease


def test_chunks_that_no_request_uses_are_evicted_the_end_of_a_prefix_first():
    memory = KvMemory(4)
    one = take(memory, 1, 2, 3)
    memory.publish(one, (1, 2, 3))
    other = take(memory, 1, 2, more=1)
    assert (one.cached, other.cached, memory.free) == (0, 2 * CHUNK_TOKENS, 0), "a shared chunk counts once"
    assert fits(memory, more=1) is None
    memory.release(one)
    memory.release(other)
    assert memory.free == 4
    assert memory.reported() == ([1, 2, 3], [])
    assert take(memory, more=3).cached == 0
    assert memory.reported() == ([], [3, 2])
    assert fits(memory, 1, more=1) is None, "a chunk that is found in the cache needs room, too"
    assert take(memory, 1).cached == CHUNK_TOKENS


def test_a_chunk_that_two_requests_compute_counts_once_when_both_have_it():
    memory = KvMemory(4)
    one, other = take(memory, 1), take(memory, 1)
    for lease in (one, other):
        memory.publish(lease, (1,))
    assert memory.free == 3
    assert memory.reported() == ([1], [])


def test_copies_are_evicted_first_until_no_other_worker_has_them():
    memory = KvMemory(4)
    for name in (1, 2, 3, 4):
        lease = take(memory, name)
        memory.publish(lease, (name,))
        memory.release(lease, handed_over=name > 2)
    memory.fetched([2])
    memory.only_here([3])
    memory.reported()
    for expected in ([4], [2], [1], [3]):
        take(memory, more=1)
        assert memory.reported() == ([], expected)


@pytest.mark.parametrize("kind", ["policy", "colocated"])
def test_a_session_finds_its_history(kind: Kind):
    """Every request is answered, and each later turn computes little more than its new tokens."""
    sessions = agents(4, 4, seed=1)
    found = simulate(sessions, kind, at_a_time=4, warm_up=0)
    assert len(found.answers) == 8 * 4
    assert all(answer.cached > 0.5 * answer.prompt for answer in found.answers if not answer.first)
    assert found.answers[0].cached == 0


def test_the_trace_has_the_requests_and_shared_blocks_of_the_first_150_seconds():
    sessions = trace(TRACE)
    assert len(sessions) == 449
    assert len({session.key for _, session in sessions}) < 449
    assert sessions == sorted(sessions, key=lambda each: each[0])
    assert sum(session.turns[0].tokens for _, session in sessions) / 449 == pytest.approx(14_409, abs=1)
