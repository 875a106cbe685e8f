"""Credits: no slot is lost or promised twice, whatever the order of events, and no session starves."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.kv_transfer.protocol.credits import CreditExceeded, ReceiverSlots, SenderAccount, SenderSlots
from baton.kv_transfer.protocol.messages import Credit

from .test_lifecycle import copies


def wanted(slots: int, frames: dict[int, int]) -> ReceiverSlots:
    """Slots of which each session wants so many."""
    pool = ReceiverSlots(slots)
    for session, count in frames.items():
        pool.open(session)
        pool.want(session, count)
    return pool


def test_a_frame_beyond_credit_is_an_error() -> None:
    """It takes a slot of another session's, which gets a new one."""
    pool = ReceiverSlots(8)
    for session in (1, 2):
        pool.open(session)
    pool.want(2, 2)
    assert pool.settle() == [(2, Credit(2))]
    assert pool.lay_out() == [0, 1]
    with pytest.raises(CreditExceeded):
        pool.arrive(1)
    assert (pool.free, pool.promised, pool.not_in_use) == (5, 2, 7)
    assert pool.lay_out() == [2]
    pool.want(1, 2)
    assert pool.settle() == [(1, Credit(2))]
    assert pool.lay_out() == [3, 4]
    pool.arrive(1)
    pool.arrive(1)
    with pytest.raises(CreditExceeded):
        pool.arrive(1)


def test_a_sender_has_a_slot_and_a_credit_for_each_frame() -> None:
    slots = SenderSlots(4)
    one, two = slots.account(1), slots.account(2)
    for account in (one, two):
        account.most = 2
        account.grant(3)
        account.grant(2)  # read late
    assert [slots.take(one), slots.take(two), slots.take(one)] == [0, 1, 2]
    assert (one.has_room, two.has_room) == (False, True), "the first has as many slots as it may"
    slots.give_back(0, unsent=False)
    assert slots.take(one) == 0, "the lowest free slot"
    slots.give_back(2, unsent=False)
    assert not one.has_room, "its credit is used"
    slots.give_back(0, unsent=True)
    assert one.has_room, "the credit of what did not leave is unused"
    slots.close(2)
    slots.give_back(1, unsent=False)
    assert slots.all_free


class Sender:
    """Of one session; all senders share an arena that has room for every frame."""

    def __init__(self, slots: SenderSlots, session: int) -> None:
        self.slots = slots
        self.account: SenderAccount = slots.account(session)
        self.account.most = slots.total
        self.out: list[int] = []

    def take(self) -> None:
        self.out.append(self.slots.take(self.account))

    def gone(self, *, unsent: bool) -> None:
        self.slots.give_back(self.out.pop(0), unsent=unsent)


def test_no_session_gets_more_than_half() -> None:
    pool = wanted(8, {1: 100})
    assert pool.settle() == [(1, Credit(4))]
    for session in (2, 3):
        pool.open(session)
        pool.want(session, 100)
    assert pool.settle() == [(2, Credit(2)), (3, Credit(2))]


def test_what_is_not_wanted_any_more_is_recalled() -> None:
    pool = wanted(8, {1: 4})
    pool.settle()
    pool.lay_out()
    pool.arrive(1)
    pool.want(1, 0)
    assert pool.settle() == [(1, Credit(4, recall=True))]
    assert pool.settle() == [], "one recall at a time"
    pool.returned(1, 4, 2)  # one arrived, one is on its way
    assert (pool.free, pool.promised) == (6, 1)
    with pytest.raises(ValueError):
        pool.returned(1, 4, 2)


def test_what_is_said_to_be_on_its_way_is_not_asked_for_all_the_time() -> None:
    """On a slow line, that would be a message for each turn of the loop."""
    pool = wanted(2, {1: 1, 2: 1, 3: 1})
    assert pool.settle() == [(1, Credit(1)), (2, Credit(1)), (1, Credit(1, recall=True))]
    pool.returned(1, 1, 1)  # on its way
    assert pool.settle() == [(2, Credit(1, recall=True))], "who may have some that it does not use"
    pool.returned(2, 1, 1)
    assert pool.settle() == []
    pool.ask_again()
    assert pool.settle() == [(1, Credit(1, recall=True))], "frames may be dropped before they leave"
    pool.returned(1, 1, 0)
    assert pool.settle() == [(3, Credit(1)), (2, Credit(1, recall=True))], "now the first has none"


@pytest.mark.parametrize(("total", "sent"), [(5, 0), (4, 5), (4, 0)])
def test_an_impossible_answer_to_a_recall(total: int, sent: int) -> None:
    pool = wanted(8, {1: 4})
    pool.settle()
    pool.lay_out()
    pool.arrive(1)
    pool.want(1, 0)
    pool.settle()
    with pytest.raises(ValueError):
        pool.returned(1, total, sent)


class Sessions:
    """The transfers of some sessions, each of as many frames, through a pool of few slots; every message and
    frame is on its way for any length of time. No transfer has to compute, nor to be cancelled, ever."""

    def __init__(self, frames: tuple[int, ...], slots: int = 2, *, ends: bool = False) -> None:
        """`ends`: sessions may end."""
        self.pool = ReceiverSlots(slots)
        sending = SenderSlots(sum(frames))
        self.senders = [Sender(sending, session) for session in range(len(frames))]
        self.frames = list(frames)
        self.computed = [0] * len(frames)
        self.flying = [0] * len(frames)
        self.laid_out: list[int] = []
        self.in_use: list[int] = []
        self.to_sender: list[list[Credit]] = [[] for _ in frames]
        self.to_pool: list[list[tuple[int, int]]] = [[] for _ in frames]
        self.up = [*range(len(frames))]
        self.ends = ends
        self.ended: list[int] = []  # their lanes are not closed yet
        for session, count in enumerate(frames):
            self.pool.open(session)
            self.pool.want(session, count)
        self.settle()

    def settle(self) -> None:
        for session, credit in self.pool.settle():
            self.to_sender[session].append(credit)
        self.laid_out += self.pool.lay_out()

    def check(self) -> None:
        pool, accounts = self.pool, self.pool.accounts
        assert pool.free >= 0
        assert pool.free + pool.promised + len(self.in_use) == pool.total, "a slot is in one place"
        assert pool.promised == sum(account.outstanding for account in accounts.values())
        assert pool.promised <= len(self.laid_out), "each credit finds a slot"
        assert not set(self.laid_out) & set(self.in_use)
        for session in self.up:
            assert self.senders[session].account.granted <= accounts[session].granted, "credit from nowhere"

    @property
    def served(self) -> bool:
        """Each session that has something to send has sent it."""
        return all(self.computed[s] <= self.pool.accounts[s].arrived for s in self.up)

    def moves(self) -> list[tuple[str, int]]:
        """What happens by itself, sooner or later."""
        moves = [("slot_free", 0)] if self.in_use else []
        if any(a.outstanding and not a.idle for a in self.pool.accounts.values()):
            moves.append(("tick", 0))
        for session in self.up:
            if self.to_sender[session]:
                moves.append(("credit_comes", session))
            if self.to_pool[session]:
                moves.append(("answer_comes", session))
            account = self.senders[session].account
            if account.has_room and self.computed[session] > account.used:
                moves.append(("send", session))
        moves += [("frame_comes", s) for s in (*self.up, *self.ended) if self.flying[s]]
        return moves + [("lanes_closed", s) for s in self.ended]

    def choices(self) -> list[tuple[str, int]]:
        """What may happen, or never."""
        return (
            [("compute", s) for s in self.up if self.computed[s] < self.frames[s]]
            + [("cancel", s) for s in self.up if self.frames[s] > self.computed[s]]
            + [("drop", s) for s in self.up if self.flying[s]]
            + [("end", s) for s in self.up if self.ends]
        )

    def compute(self, session: int) -> None:
        self.computed[session] += 1

    def cancel(self, session: int) -> None:
        """What is computed still goes out, as frames do that are on their way when their transfer ends."""
        self.frames[session] = self.computed[session]
        self.wanted(session)

    def drop(self, session: int) -> None:
        """A frame of what ended, before it leaves."""
        self.flying[session] -= 1
        self.computed[session] -= 1
        self.frames[session] -= 1
        self.senders[session].gone(unsent=True)
        self.wanted(session)

    def end(self, session: int) -> None:
        self.pool.end(session)
        self.up.remove(session)
        self.ended.append(session)
        self.settle()

    def lanes_closed(self, session: int) -> None:
        """What was on its way is lost."""
        self.ended.remove(session)
        self.pool.close(session)
        self.settle()

    def tick(self, _: int) -> None:
        self.pool.ask_again()
        self.settle()

    def wanted(self, session: int) -> None:
        if session in self.up:
            self.pool.want(session, max(0, self.frames[session] - self.pool.accounts[session].arrived))
        self.settle()

    def send(self, session: int) -> None:
        self.senders[session].take()
        self.flying[session] += 1

    def frame_comes(self, session: int) -> None:
        self.flying[session] -= 1
        self.senders[session].gone(unsent=False)
        self.pool.arrive(session)
        self.in_use.append(self.laid_out.pop(0))
        self.wanted(session)

    def slot_free(self, _: int) -> None:
        self.pool.release(self.in_use.pop())
        self.settle()

    def credit_comes(self, session: int) -> None:
        credit = self.to_sender[session].pop(0)
        if credit.recall:
            self.to_pool[session].append((credit.total, self.senders[session].account.recall()))
        else:
            self.senders[session].account.grant(credit.total)

    def answer_comes(self, session: int) -> None:
        self.pool.returned(session, *self.to_pool[session].pop(0))
        self.settle()

    def key(self) -> tuple[object, ...]:
        """Two states that differ in nothing but how late it is are one."""
        grants = sorted(a.last_grant for a in self.pool.accounts.values())
        return (
            self.pool.free, len(self.in_use), tuple(self.frames), tuple(self.computed), tuple(self.flying),
            tuple(
                (a.granted, a.arrived, a.want, a.recalled, a.idle, grants.index(a.last_grant))
                for a in self.pool.accounts.values()
            ),
            tuple((s.account.granted, s.account.used) for s in self.senders),
            tuple((c.total, c.recall) for mail in self.to_sender for c in (*mail, Credit(-1))),
            tuple(answer for mail in self.to_pool for answer in (*mail, (-1, -1))),
        )  # fmt: skip


@pytest.mark.all
@pytest.mark.parametrize("frames", [(2, 2), (1, 1, 1)])
def test_every_order_of_events_can_end_with_all_served(frames: tuple[int, ...]) -> None:
    """All states. From each, what happens by itself ends with all frames sent, although other sessions hold
    credits that they may never use. Three sessions share two slots, too."""
    worlds = [Sessions(frames)]
    number = {worlds[0].key(): 0}
    before: list[set[int]] = [set()]  # state → those that become it by themselves
    good: set[int] = set()
    for at, world in enumerate(worlds):  # grows
        world.check()
        if world.served:
            good.add(at)
        by_themselves = world.moves()
        events = by_themselves + world.choices()
        for (name, session), after in zip(events, copies(world, len(events)), strict=True):
            getattr(after, name)(session)
            reached = number.setdefault(after.key(), len(worlds))
            if reached == len(worlds):
                worlds.append(after)
                before.append(set())
            if (name, session) in by_themselves:
                before[reached].add(at)
    edge = list(good)
    while edge:
        edge = [at for reached in edge for at in before[reached] if at not in good and not good.add(at)]
    assert len(good) == len(worlds), "a session starves"
    assert len(worlds) > 1000, "the exploration became trivial"


class Credits(RuleBasedStateMachine):
    """More slots and frames, and sessions that end."""

    def __init__(self) -> None:
        super().__init__()
        self.world = Sessions((9, 7, 5, 3), slots=7, ends=True)

    @rule(pick=st.integers(0, 1 << 16))
    def something_happens(self, pick: int) -> None:
        if events := self.world.moves() + self.world.choices():
            name, session = events[pick % len(events)]
            getattr(self.world, name)(session)

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """Whatever state this is: what happens by itself serves each session."""
        for step in range(1000):
            if moves := self.world.moves():
                name, session = moves[step % len(moves)]
                getattr(self.world, name)(session)
        assert self.world.served, "a session starves"


TestCredits = Credits.TestCase
TestCredits.settings = settings(max_examples=60, stateful_step_count=60)
