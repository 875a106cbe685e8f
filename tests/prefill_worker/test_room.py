from dataclasses import dataclass

from prefill_worker.room import prefills_to_drop


@dataclass
class Pool:
    blocks_free: int
    blocks_leaving: int = 0
    block_size: int = 10


@dataclass
class Prefill:
    tokens: int = 10
    rank: tuple[int, bool] = (0, True)
    held: bool = False
    closed: bool = False


def dropped(
    free: int, prefills: dict[bytes, Prefill], started: set[bytes], fetched: set[bytes], leaving: int = 0
) -> list[bytes]:
    return prefills_to_drop(Pool(free, leaving), prefills, started, fetched.__contains__)


HELD = {b"h1": Prefill(held=True), b"h2": Prefill(held=True), b"h3": Prefill(held=True)}


def test_nobody_is_dropped_while_there_is_room() -> None:
    assert dropped(1, {**HELD, b"w": Prefill()}, set(HELD), {b"w"}) == []


def test_the_oldest_unfetched_make_room_for_a_fetched_one() -> None:
    prefills = {**HELD, b"w": Prefill(tokens=11)}
    assert dropped(0, prefills, set(HELD), {b"w"}) == [b"h1", b"h2"]
    assert dropped(1, prefills, set(HELD), {b"w"}) == [b"h1"]


def test_a_fetched_prefill_is_never_dropped() -> None:
    assert dropped(0, {**HELD, b"w": Prefill()}, set(HELD), {b"w", b"h1"}) == [b"h2"]


def test_nobody_is_dropped_for_one_that_nobody_fetches() -> None:
    assert dropped(0, {**HELD, b"w": Prefill()}, set(HELD), set()) == []


def test_those_who_are_served_before_it_need_room_too() -> None:
    prefills = {**HELD, b"w1": Prefill(), b"w2": Prefill()}
    assert dropped(0, prefills, set(HELD), {b"w2"}) == [b"h1", b"h2"]
    for sooner in ((-1, True), (0, False)):
        prefills[b"w2"].rank = sooner
        assert dropped(0, prefills, set(HELD), {b"w2"}) == [b"h1"]


def test_blocks_on_their_way_back_are_not_asked_for_twice() -> None:
    prefills = {b"c": Prefill(held=True, closed=True), **HELD, b"w": Prefill()}
    assert dropped(0, prefills, {b"c", *HELD}, {b"w"}) == []
    del prefills[b"c"]
    assert dropped(0, prefills, set(HELD), {b"w"}, leaving=1) == []
    assert dropped(0, prefills, set(HELD), {b"w"}) == [b"h1"]


def test_a_running_prefill_is_left_alone() -> None:
    assert dropped(0, {b"r": Prefill(), b"w": Prefill()}, {b"r"}, {b"w"}) == []
