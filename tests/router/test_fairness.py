"""The fair queue: first priority, then the least served key, then what is due first. A pause gives no
advantage."""

import itertools
import pickle

from hypothesis import given
from hypothesis import strategies as st

from baton.router.admission.fairness import FairQueue, Ticket


def served(queue: FairQueue[str, tuple[str, int]], tokens: int) -> dict[str, int]:
    """Pops until `total` tokens are served. Returns the tokens of each key."""
    got: dict[str, int] = {}
    while tokens > 0 and (item := queue.pop()) is not None:
        key, size = item
        queue.charge(key, size)
        got[key] = got.get(key, 0) + size
        tokens -= size
    return got


def test_one_key_is_first_come_first_served():
    queue: FairQueue[str, int] = FairQueue()
    for i in range(5):
        queue.push("a", 0, i)
    assert [queue.pop() for _ in range(5)] == list(range(5))
    assert not len(queue)


def test_a_short_item_does_not_wait_for_long_ones_and_those_do_not_wait_for_ever():
    queue: FairQueue[str, str] = FairQueue()
    queue.push("a", 0, "long", tokens=300)
    came = [f"short {i}" for i in range(12)]
    went = list[str | None]()
    for name in came:  # each comes when the one before has gone
        queue.push("a", 0, name, tokens=100)
        went.append(queue.pop())
    # Served at the same time as these, the long one would be done before the ninth.
    assert went == [*came[:8], "long", *came[8:11]]


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=40))
def test_no_item_waits_longer_than_if_all_were_served_at_the_same_time(steps: list[tuple[int, bool]]):
    """Time is counted in tokens that were served. After an item with `goes` one item of the queue is next."""
    queue: FairQueue[str, int] = FairQueue()
    left: dict[int, float] = {}  # of items that are served at the same time
    now, done_at, done = 0, dict[int, int](), dict[int, float]()

    def pop() -> None:
        nonlocal now
        number = queue.pop()
        assert number is not None
        spent = 0.0
        tokens = steps[number][0]
        while left and spent < tokens - 1e-6:
            least = min(left.values())
            each = min(least, (tokens - spent) / len(left))
            spent += each * len(left)
            for other in [*left]:
                left[other] -= each
                if left[other] < 1e-6:
                    del left[other]
                    done[other] = now + spent
        now += tokens
        done_at[number] = now

    for number, (tokens, goes) in enumerate(steps):
        queue.push("a", 0, number, tokens=tokens)
        left[number] = tokens
        if goes:
            pop()
    while len(queue):
        pop()
    assert not left
    assert all(done_at[number] <= done[number] + 1e-3 for number in done)


def test_items_that_left_or_were_put_back_count_once():
    queue: FairQueue[str, str] = FairQueue()
    blocked = queue.push("a", 0, "blocked", tokens=100)
    gone = queue.push("a", 0, "gone", tokens=800)
    queue.push("a", 0, "long", tokens=1000)
    for _ in range(50):  # there is no room for it
        assert queue.pop() == "blocked"
        queue.put_back("a", 0, "blocked", blocked)
    queue.push("a", 0, "soon", tokens=90)
    queue.push("a", 0, "short", tokens=950)
    queue.remove(gone)
    queue.push("a", 0, "late", tokens=850)  # each of the others would have got more than 150 by now
    assert [queue.pop() for _ in range(5)] == ["soon", "blocked", "short", "long", "late"]


def test_priority_comes_before_all_else():
    queue: FairQueue[str, str] = FairQueue()
    queue.push("a", 5, "late")
    queue.push("b", 0, "normal")
    queue.push("a", -3, "urgent")
    queue.charge("a", 1e9)
    assert [queue.pop() for _ in range(3)] == ["urgent", "normal", "late"]


def test_order_counts_among_the_items_of_one_key():
    queue: FairQueue[str, str] = FairQueue()
    queue.push("a", 0, "a late", order=5)
    ticket = queue.push("b", 0, "b", order=7)
    queue.push("a", 0, "a urgent", order=-9)
    queue.push("a", 0, "a urgent, too", order=-9)
    queue.charge("a", 1)
    assert queue.pop() == "b"
    queue.put_back("b", 0, "b", ticket, 7)
    queue.remove(ticket)
    assert [queue.pop() for _ in range(3)] == ["a urgent", "a urgent, too", "a late"]


def test_a_pause_gives_a_key_no_advantage():
    queue: FairQueue[str, tuple[str, int]] = FairQueue()
    queue.push("away", 0, ("away", 1))
    served(queue, 1)
    for _ in range(200):
        queue.push("busy", 0, ("busy", 100))
    served(queue, 10_000)
    for _ in range(100):
        queue.push("away", 0, ("away", 100))
    got = served(queue, 2000)
    assert abs(got["away"] - got["busy"]) <= 100
    # An empty queue in between gives none either.
    served(queue, 10**9)
    for key in ("new", "busy"):
        for _ in range(30):
            queue.push(key, 0, (key, 100))
    got = served(queue, 2000)
    assert abs(got["new"] - got["busy"]) <= 200


def test_a_key_that_may_not_start_is_skipped():
    queue: FairQueue[str, str] = FairQueue()
    queue.push("a", 0, "first")
    queue.push("a", 1, "interrupted", lane=True)
    queue.push("a", 1, "later")
    queue.push("b", 1, "other")
    assert queue.pop(lambda key, item: key == "b") == "other"
    assert queue.pop(lambda key, item: item == "later") is None, "it does not overtake"
    assert queue.pop(lambda key, item: item != "first") == "interrupted"
    assert queue.pop() == "first"
    assert queue.pop() == "later"


def test_no_priority_makes_a_turn_look_at_more_items():
    """Also while the first item may not go, and after many items were removed."""
    queue: FairQueue[str, int] = FairQueue()
    asked = 0

    def may_go(key: str, item: int) -> bool:
        nonlocal asked
        asked += 1
        return item % 2 == 0

    tickets = [queue.push("a", rank, rank, order=rank) for rank in range(3000)]
    most = len(pickle.dumps(queue))
    for turn in range(0, 500, 2):
        assert queue.pop(may_go) == turn
        assert queue.pop(may_go) is None
        queue.remove(tickets[turn + 1])
    assert asked == 500
    for ticket in tickets[1000:]:
        queue.remove(ticket)
    assert len(pickle.dumps(queue)) < most / 3, "removed items take no memory"
    assert [queue.pop() for _ in range(500)] == list(range(500, 1000))


def test_an_item_that_waits_again_has_its_old_place():
    queue: FairQueue[str, str] = FairQueue()
    first = queue.push("a", 0, "first")
    queue.push("a", 0, "second")
    assert queue.pop() == "first"
    queue.charge("a", 100)
    queue.put_back("a", 0, "first", first)
    assert queue.pop() == "first"
    assert queue.push("a", 0, "first", first) == first
    assert [queue.pop() for _ in range(2)] == ["first", "second"]


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 99)), max_size=80))
def test_each_item_comes_exactly_once(steps: list[tuple[str, int]]):
    queue: FairQueue[str, int] = FairQueue()
    numbers = itertools.count()
    waiting: dict[Ticket, int] = {}
    gone: list[Ticket] = []
    for what, value in steps:
        if what == "push":
            item = next(numbers)
            waiting[
                queue.push("abc"[value % 3], value // 50, item, tokens=value % 7, lane=value % 2 == 0)
            ] = item
        elif what == "pop" and waiting:
            item = queue.pop()
            assert item is not None
            del waiting[next(ticket for ticket, held in waiting.items() if held == item)]
            queue.charge("abc"[value % 3], value)
        elif what == "remove":
            for ticket in [*list(waiting)[value : value + 1], *gone[-1:]]:
                queue.remove(ticket)
                gone.append(ticket)
                waiting.pop(ticket, None)
        assert len(queue) == len(waiting)
    rest = {queue.pop() for _ in range(len(queue))}
    assert rest == set(waiting.values())
    assert queue.pop() is None
    sharings = queue._sharing.values()
    assert all(due < sharing.passed + 1e-6 for sharing in sharings for due in sharing.dues), "all is served"
