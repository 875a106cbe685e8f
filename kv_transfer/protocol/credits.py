"""The ledger of arena slots of each side, with the credits of its sessions. Pure accounting, no I/O.

One credit is one arena slot of the receiver, set aside until a frame of that session arrives in it. Messages
carry totals since the session began, so a message that is read late still means the same. Both ledgers hand
out the lowest free slot: so few slots are used again and again, and neighbouring slots are copied together.
"""

import heapq
from dataclasses import dataclass

from baton.kv_transfer.protocol.messages import Credit

_LEAST_LANES = 4  # a session with fewer lanes gets the credit of so many
# Slots that wait for frames: enough until the next grant is used. The memory of more would have left every
# cache before it is written to.
_CREDIT_PER_LANE = 4


def credit(missing_frames: int, lanes: int, *, exported: bool) -> int:
    """The credit that a session can use. One frame more per lane: slices need not have their full size."""
    wanted = missing_frames + lanes
    return wanted if exported else min(wanted, _CREDIT_PER_LANE * max(lanes, _LEAST_LANES))


class CreditExceeded(Exception):
    """A frame came without credit: its session ends."""


@dataclass(slots=True, eq=False)
class Account:
    """The receiver's view of one session."""

    granted: int = 0
    arrived: int = 0
    want: int = 0  # credits that its open transfers could use now
    recalled: int | None = None  # `granted` at the time of the recall that is not answered yet
    answered: int | None = None  # `granted` after the last answer: all frames outstanding then are under way
    last_grant: int = 0
    over: bool = False  # its session has ended, and frames of it may still be in its lanes

    @property
    def outstanding(self) -> int:
        return self.granted - self.arrived

    @property
    def idle(self) -> bool:
        """Whether it may have credit that it does not use."""
        return self.outstanding > 0 and self.answered != self.granted


class ReceiverSlots:
    """Shares a receiver's arena slots among its sessions.

    A free slot is kept here, or laid out: put into the pipe from which a lane takes a slot for a frame that
    begins. As many slots are laid out as are granted and not used, if there are that many. A slot in use is
    in neither place: its user gives it back.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.accounts: dict[int, Account] = {}
        self.promised = 0  # granted and not used, by all sessions: the sum of `outstanding`
        self._kept = list(range(total))  # a heap
        self._laid_out = 0  # also those that a lane has taken, until `arrive` reports it
        self._grants = 0

    @property
    def not_in_use(self) -> int:
        return len(self._kept) + self._laid_out

    @property
    def free(self) -> int:
        """Slots that are neither in use nor promised.

        Below 0 after a frame without credit: it took a slot that was promised to another session."""
        return self.not_in_use - self.promised

    def open(self, session: int) -> None:
        self.accounts[session] = Account()

    def end(self, session: int) -> None:
        """The session has ended. It gets no more credit, but frames of it may still be reported."""
        account = self.accounts[session]
        account.over, account.want = True, 0

    def close(self, session: int) -> None:
        """All lanes of an ended session are closed: its unused credits are void."""
        assert self.accounts[session].over
        self.promised -= self.accounts.pop(session).outstanding

    def want(self, session: int, frames: int) -> None:
        self.accounts[session].want = frames

    def arrive(self, session: int) -> None:
        """A frame began in a slot that was laid out. The slot is in use until `release`, also after
        CreditExceeded."""
        self._laid_out -= 1
        assert self._laid_out >= 0, "a frame began in a slot that was not laid out"
        account = self.accounts.get(session, Account())  # none: it was never up, nor granted anything
        if account.outstanding == 0:
            raise CreditExceeded(f"frame {account.arrived + 1} of {account.granted} granted")
        account.arrived += 1
        self.promised -= 1

    def release(self, slot: int) -> None:
        """A slot in use is free again."""
        heapq.heappush(self._kept, slot)
        assert self.not_in_use <= self.total, "a slot was released twice"

    def lay_out(self) -> list[int]:
        """The slots to lay out now, after `settle` and before its messages go out."""
        slots: list[int] = []
        while self._laid_out < self.promised and self._kept:
            slots.append(heapq.heappop(self._kept))
            self._laid_out += 1
        return slots

    def returned(self, session: int, total: int, sent: int) -> None:
        """The sender answered the recall of `total`. Raises ValueError for impossible numbers."""
        account = self.accounts[session]
        # If more was granted since the recall, the answer changes nothing. Frames of the later grant may then
        # have arrived before it, on other lanes.
        void = account.granted > total
        if account.recalled != total or sent > total or (account.arrived > sent and not void):
            raise ValueError(f"answered recall of {account.recalled} with {total}, {sent} sent")
        account.recalled = None
        if not void:
            account.granted = account.answered = sent
            self.promised -= total - sent

    def ask_again(self) -> None:
        """Allows new recalls. Call it now and then: frames that were under way may have been dropped."""
        for account in self.accounts.values():
            account.answered = None

    def settle(self) -> list[tuple[int, Credit]]:
        """Grants credits, and recalls those that are not used. Returns the messages to send.

        No session is granted more than its share of the slots, and never more than half. A session without
        credit comes first. If no slot is free for it, the session with most credit is asked to return what it
        does not use.
        """
        out: list[tuple[int, Credit]] = []
        free = self.free
        live = {key: account for key, account in self.accounts.items() if not account.over}
        hungry = [(key, a) for key, a in live.items() if a.want]
        share = max(1, self.total // max(2, len(hungry)))
        # A session that still has over three quarters waits: one larger grant instead of many small ones.
        takers = [(key, a) for key, a in hungry if a.outstanding * 4 <= 3 * min(a.want, share)]
        takers.sort(key=lambda item: (item[1].outstanding > 0, item[1].last_grant))
        for i, (key, account) in enumerate(takers[: max(0, free)]):
            room = min(account.want, share) - account.outstanding
            give = min(room, max(1, free // (len(takers) - i)))
            self._grants += 1
            account.granted += give
            account.last_grant = self._grants
            free -= give
            self.promised += give
            out.append((key, Credit(account.granted)))
        for key, account in live.items():
            if account.want == 0 and account.idle:
                self._recall(key, account, out)
        recalling = any(a.recalled is not None for a in live.values())
        if free <= 0 and not recalling and any(a.outstanding == 0 for _, a in hungry):
            holders = [(key, a) for key, a in live.items() if a.idle]
            if holders:
                key, account = max(holders, key=lambda item: (item[1].outstanding, -item[1].last_grant))
                self._recall(key, account, out)
        return out

    def _recall(self, key: int, account: Account, out: list[tuple[int, Credit]]) -> None:
        if account.recalled is None:
            account.recalled = account.granted
            out.append((key, Credit(account.granted, recall=True)))


@dataclass(slots=True, eq=False)
class SenderAccount:
    """The sender's view of one session."""

    granted: int = 0
    used: int = 0
    most: int = 1  # slots that its frames may have at once
    slots_out: int = 0
    reached: bool = False  # the peer reads exported slots

    @property
    def has_room(self) -> bool:
        """Whether it may send one more frame."""
        return self.used < self.granted and self.slots_out < self.most

    def grant(self, total: int) -> None:
        self.granted = max(self.granted, total)

    def recall(self) -> int:
        """Gives up the unused credit. Returns the number of frames that were sent, or are about to be."""
        self.granted = self.used
        return self.used


class SenderSlots:
    """Gives a sender's arena slots to the frames of its sessions, one credit with each.

    No session gets more than three quarters: a peer that stands still must not stop the others. Nor less: a
    peer that reads slots answers when its engine looks, after 2 ms, in which a link between GPUs carries
    700 MB, and on CPUs after a whole step."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._most = max(1, total * 3 // 4)
        self.free = list(range(total))  # a heap
        self._accounts: dict[int, SenderAccount] = {}  # by session
        self._used_by: dict[int, SenderAccount] = {}  # by slot

    @property
    def all_free(self) -> bool:
        """No slot is in use."""
        return len(self.free) == self.total

    @property
    def in_use(self) -> int:
        return len(self._used_by)

    def account(self, session: int) -> SenderAccount:
        return self._accounts.setdefault(session, SenderAccount(most=self._most))

    def close(self, session: int) -> None:
        """The session has ended. Slots with its frames still come back."""
        self._accounts.pop(session, None)

    def take(self, account: SenderAccount) -> int:
        """A slot for the next frame of a session that has room."""
        assert account.used < account.granted, "a slice was taken without credit"
        account.used += 1
        account.slots_out += 1
        slot = heapq.heappop(self.free)
        self._used_by[slot] = account
        return slot

    def give_back(self, slot: int, *, unsent: bool) -> None:
        """`unsent`: the transfer ended before the frame left, so its credit is unused again."""
        account = self._used_by.pop(slot)
        account.slots_out -= 1
        if unsent:
            account.used -= 1
        heapq.heappush(self.free, slot)
