"""Credits: how many KV frames a session may carry. Pure accounting, no I/O.

One credit is one arena slot at the receiver, set aside until a frame of that session arrives in it. Totals
are cumulative over the session: a message says the same however late it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.protocol.messages import Credit


class CreditExceeded(Exception):
    """A frame came that was never granted: the session ends."""


@dataclass(slots=True, eq=False)
class Account:
    """The receiver's view of one session."""

    granted: int = 0
    arrived: int = 0
    want: int = 0  # credits that its open transfers could use now
    recalled: int | None = None  # `granted` when the recall that is not answered yet went out
    answered: int | None = None  # `granted` as an answer left it: what is outstanding of that is on its way
    last_grant: int = 0
    over: bool = False  # its session has ended, and frames of it may still be in its lanes

    @property
    def outstanding(self) -> int:
        return self.granted - self.arrived

    @property
    def idle(self) -> bool:
        """It may have credit that it does not use."""
        return self.outstanding > 0 and self.answered != self.granted


class CreditPool:
    """Shares a receiver's arena slots among its sessions.

    `free` counts slots that are neither in use nor promised. At any time
    ``free + promised (sum of outstanding) + in use == total``. It is below 0 only after a frame beyond its
    credit, while what was promised to others is more than there is.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.accounts: dict[int, Account] = {}
        self._grants = 0

    @property
    def promised(self) -> int:
        return sum(a.outstanding for a in self.accounts.values())

    def open(self, session: int) -> None:
        self.accounts[session] = Account()

    def end(self, session: int) -> None:
        """The session has ended: no more is granted, but frames may have arrived that are not told of yet."""
        account = self.accounts[session]
        account.over, account.want = True, 0

    def close(self, session: int) -> None:
        """All lanes of an ended session are closed: its unused credits are void."""
        assert self.accounts[session].over
        self.free += self.accounts.pop(session).outstanding

    def want(self, session: int, frames: int) -> None:
        self.accounts[session].want = frames

    def arrive(self, session: int) -> None:
        """A frame's header came: its slot is in use until `release`, also after CreditExceeded."""
        account = self.accounts.get(session, Account())  # none: it was never up, nor granted anything
        if account.outstanding == 0:
            self.free -= 1
            raise CreditExceeded(f"frame {account.arrived + 1} of {account.granted} granted")
        account.arrived += 1

    def release(self) -> None:
        """A slot in use is free again."""
        self.free += 1
        assert self.free <= self.total, "a slot was released twice"

    def returned(self, session: int, total: int, sent: int) -> None:
        """The sender answered the recall of `total`; ValueError if it could not have."""
        account = self.accounts[session]
        # If more was granted meanwhile, on top of what was unused, the answer changes nothing; and frames of
        # the later grant may have overtaken it on other lanes.
        void = account.granted > total
        if account.recalled != total or sent > total or (account.arrived > sent and not void):
            raise ValueError(f"answered recall of {account.recalled} with {total}, {sent} sent")
        account.recalled = None
        if not void:
            account.granted = account.answered = sent
            self.free += total - sent

    def ask_again(self) -> None:
        """To be called once in a while: what was said to be on its way may have been dropped since."""
        for account in self.accounts.values():
            account.answered = None

    def settle(self) -> list[tuple[int, Credit]]:
        """Grant what can be granted, recall what lies idle; the messages to send.

        No session is granted more than its share of the slots, and never more than half. Who has nothing
        comes first; if nothing is free for it, the largest holder is asked to return what it does not use.
        """
        out: list[tuple[int, Credit]] = []
        live = {key: account for key, account in self.accounts.items() if not account.over}
        hungry = [(key, a) for key, a in live.items() if a.want]
        share = max(1, self.total // max(2, len(hungry)))
        # While more than three quarters are still there: one larger grant later, instead of many small ones.
        takers = [(key, a) for key, a in hungry if a.outstanding * 4 <= 3 * min(a.want, share)]
        takers.sort(key=lambda item: (item[1].outstanding > 0, item[1].last_grant))
        for i, (key, account) in enumerate(takers[: max(0, self.free)]):
            room = min(account.want, share) - account.outstanding
            give = min(room, max(1, self.free // (len(takers) - i)))
            self._grants += 1
            account.granted += give
            account.last_grant = self._grants
            self.free -= give
            out.append((key, Credit(account.granted)))
        for key, account in live.items():
            if account.want == 0 and account.idle:
                self._recall(key, account, out)
        recalling = any(a.recalled is not None for a in live.values())
        if self.free <= 0 and not recalling and any(a.outstanding == 0 for _, a in hungry):
            holders = [(key, a) for key, a in live.items() if a.idle]
            if holders:
                key, account = max(holders, key=lambda item: (item[1].outstanding, -item[1].last_grant))
                self._recall(key, account, out)
        return out

    def _recall(self, key: int, account: Account, out: list[tuple[int, Credit]]) -> None:
        if account.recalled is None:
            account.recalled = account.granted
            out.append((key, Credit(account.granted, recall=True)))


class SenderCredits:
    """The sender's view of one session. A credit is taken before the arena slot that it will send."""

    def __init__(self) -> None:
        self.granted = 0
        self.used = 0

    @property
    def available(self) -> int:
        return max(0, self.granted - self.used)

    def grant(self, total: int) -> None:
        self.granted = max(self.granted, total)

    def take(self) -> None:
        assert self.available, "a slice was taken without credit"
        self.used += 1

    def drop(self) -> None:
        """A frame was taken but never sent (its transfer ended first): its credit is unused again."""
        self.used -= 1

    def recall(self) -> int:
        """Give up what is not used; the count of frames sent or about to be."""
        self.granted = self.used
        return self.used
