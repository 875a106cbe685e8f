"""Prompts of models with states begin at copies of states, also in the simulator."""

from baton.engine.core.state_copies import Wanted
from baton.simulator.agents import agents
from baton.simulator.copies import Copies, CopyRoom
from baton.simulator.placement import simulate
from baton.simulator.steps import H200_8B, Machine

BLOCK, INTERVAL = 128, 2048
NAMES = range(1, 129)
TOKENS = 64 * len(NAMES)
FROM_START = Wanted(0)


def copies(device: int, host: int = 0) -> Copies:
    return Copies(CopyRoom(device, host, INTERVAL), BLOCK)


def test_a_prompt_begins_at_the_last_copy_and_leaves_one_at_its_end():
    kept = copies(16)
    assert kept.usable(NAMES, TOKENS) == 0, "its KV is cached, and no states"
    assert kept.cut(FROM_START, 100, 3000, 5000) == 2048, "a step ends where a copy is made"
    kept.made(NAMES, FROM_START, 0, 5000, 5000)
    assert [kept.usable(NAMES, position) for position in (5000, 4900, 4800, 2047)] == [4992, 4096, 4096, 0]
    other = range(1001, 1129)
    assert kept.usable([*NAMES[:48], *other[48:]], TOKENS) == 2048, "other prompts have other states"
    kept.made(other, FROM_START, 0, 4500, 4500)
    assert kept.usable(other, 4500) == 4096, "less than 512 tokens past a copy there is no other"
    kept.made(NAMES, Wanted(2048, branch=3072), 2048, 3400, 3400)
    assert kept.usable(NAMES, 3200) == 3072, "where it left what was cached"


def test_an_answer_leaves_its_last_copy_when_it_ends():
    kept = copies(4)
    assert (kept.next_of_answer(4990), kept.next_of_answer(4992)) == (4992, 5120)
    kept.reached(7, NAMES, 4992)
    kept.reached(7, NAMES, 5120)
    assert kept.usable(NAMES, TOKENS) == 0
    kept.end(7)
    assert kept.usable(NAMES, TOKENS) == 5120
    assert kept.usable(NAMES, 5119) == 0


def test_an_evicted_copy_lives_on_in_the_host_until_its_kv_is_gone():
    kept = copies(1, host=2)
    for position in (128, 256, 384):
        kept.begin(NAMES, position)
    assert kept.usable(NAMES, 300) == 256
    kept.begin(NAMES, 512)
    kept.begin(NAMES, 640)
    assert kept.usable(NAMES, 300) == 0, "the host has room for two"
    kept.begin(NAMES, 384)
    assert kept.usable(NAMES, 383) == 0
    kept.drop(NAMES[:6])
    assert kept.usable(NAMES, 511) == 0
    assert copies(1).usable(NAMES, TOKENS) == 0


def test_sessions_compute_again_what_has_no_copy():
    load = agents(4, 4)

    def cached(room: CopyRoom | None) -> float:
        machine = Machine(H200_8B.step, H200_8B.positions, H200_8B.doubles_at, copies=room)
        served = simulate(load, "policy", at_a_time=4, warm_up=0, machine=machine)
        return sum(a.cached for a in served.answers) / sum(a.prompt for a in served.answers)

    without_states, many, few = (
        cached(None),
        cached(CopyRoom(100, 0, INTERVAL)),
        cached(CopyRoom(4, 0, INTERVAL)),
    )
    assert without_states - 0.05 < many < without_states
    assert few < many - 0.2
    assert many - 0.05 < cached(CopyRoom(4, 100, INTERVAL))
