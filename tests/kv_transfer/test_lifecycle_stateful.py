"""Both transfer state machines under whatever hypothesis thinks of, time included; it shrinks what it finds.

`test_lifecycle` explores every order of events to its end; here deadlines pass in between, at any moment.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kv_transfer.protocol.held import HoldState
from baton.kv_transfer.protocol.incoming import TransferState

from .test_lifecycle import World

_UNQUIET = ("fetch", "abort", "close", "lose_session")
_LONG = 1000.0  # seconds: beyond every deadline


class Lifecycle(RuleBasedStateMachine):
    """One prefill, transfers of it, and the network between."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @precondition(lambda self: self.world.moves())
    @rule(pick=st.integers(0, 1 << 16))
    def something_happens(self, pick: int) -> None:
        moves = self.world.moves()
        self.world.do(moves[pick % len(moves)])

    @rule(seconds=st.sampled_from([0.01, 1.0, 9.0, 29.0, 31.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        world = self.world
        world.now += seconds
        world.expire()
        world.check()

    @invariant()
    def a_transfer_is_open_on_one_side_at_most_once(self) -> None:
        world = self.world
        assert len(world.live) <= 1
        assert len(world.held.open) <= 1
        for held in world.held.open.values():
            assert held.state in (HoldState.STREAMING, HoldState.COMMITTED)

    @invariant()
    def what_is_complete_is_whole(self) -> None:
        for transfer in self.world.fetches.open.values():
            if transfer.incoming.state is TransferState.COMPLETE:
                assert transfer.incoming.frames == 2
                assert transfer.incoming.missing_frames == 0

    def teardown(self) -> None:
        """Whatever happened: in the end nothing is held, nothing waits, and it was released once."""
        world = self.world
        if not world.offered:
            world.do_offer()
        if not world.finished and not world.closed:
            world.do_finish()
        for wait in (0.0, _LONG, _LONG):  # for the transfer's deadline, then for the hold's
            world.now += wait
            world.expire()
            while moves := [m for m in world.moves() if m[0] not in _UNQUIET]:
                world.do(moves[0])
        assert not world.fetches.open
        assert not world.held.held
        assert not world.held.open
        assert not world.held.waiting
        assert len(world.released) == (0 if world.closed and not world.released else 1)


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=80, stateful_step_count=50)
