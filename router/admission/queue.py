"""The queue in front of the workers: which generations wait in the router, and in which order they start.

A request is refused if its key has reached its limits (`Account`), if it would wait longer than it may
(`expected_wait`), or if the prompts that wait fill the memory. All other generations go through one queue
(`fairness`), in which keys take turns and short prompts of a key do not wait for long ones. A prompt is as
long as what no worker has cached of it. The first generation starts when three conditions hold:

1. Workers have less than a *window* of its key's prompt tokens without a first token.
2. A decode worker has free capacity for it.
3. With several keys: its key leaves a part of the decode workers' capacity to the other keys.

A generation that was interrupted waits in the same queue, before new ones. If the first generation finds no
capacity, those behind it wait too, except the only generation of another key.

Wait-for graph: a generation in the queue holds no decode slot and no decode memory; nor does one that is
`parked` without a reservation. It may have a prefill at a worker, which goes on without it. That prefill, and
each generation that workers have, ends or comes back to the queue without waiting for one in the queue: see
`router.generation.generation`. So the first of the queue always starts at some time.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from baton.router.admission.expected_wait import Ahead, ExpectedWait
from baton.router.admission.fairness import FairQueue, Ticket
from baton.router.admission.keys import MAX_RETRY_AFTER, Account, Clock
from baton.router.errors import Overloaded, RateLimited
from baton.router.policy.decode import FreeCapacity
from baton.router.policy.placement import PrefillWindow

KEY_SHARE = 8.0
"""With several keys, one key may use this many times what it leaves free: 8/9 if it is the only one. This
limits decode slots, KV positions, waiting tokens and bytes of bodies. Source: dynamic thresholds, Choudhury
and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches", 1998."""
OUTPUT_WEIGHT = 2.0
"""Cost of an output token relative to a prompt token, when keys take turns."""


class TurnResult(Enum):
    """What happened in a generation's turn."""

    SENT = auto()  # workers have it
    QUEUED = auto()  # a prefill worker has it, and no decode worker: it joins the queue again for that
    NO_CAPACITY = auto()  # decode workers have no capacity now: it stays first in the queue
    PARKED = auto()  # it waits for a worker or for retry budget, and joins the queue again after that


class Turn:
    """The place of one generation in the queue.

    admitted ─▶ waiting ─ its turn ─▶ running ─▶ ended
                   ▲                     └─ interrupted: waiting again, at its old place

    A prompt that queues at a prefill worker also waits again, when the worker starts to compute it.
    """

    def __init__(self, admission: "Admission", account: Account, priority: int, tokens: int) -> None:
        """`tokens`: length of the prompt."""
        self.account = account
        self.tokens = tokens
        self.computed = tokens  # of the prompt; the rest is cached
        self.expected = account.uncached_of(tokens)  # to be computed until its first token
        admission.count_uncached(account, self.expected)
        self.in_window = 0  # what its prompt takes of the window, if workers have it
        self._admission = admission
        self._priority = priority
        self._level = account.among_keys(priority) if admission.shared else priority
        self._ticket: Ticket | None = None  # its place in the queue, from the first wait on
        self._positions = tokens
        self.is_new = True  # no worker ever had it
        self._answered = False  # it has its first token
        self._running_since: float | None = None
        self._ended = False
        self._on_turn: Callable[[], TurnResult] | None = None

    def wait(self, on_turn: Callable[[], TurnResult]) -> None:
        """Joins the queue, which calls `on_turn`, perhaps at once. Does nothing if it waits already.

        `on_turn` sends the generation to workers, if possible.
        """
        admission = self._admission
        if self._ended or self.waits:
            return
        self._release()
        self._on_turn = on_turn
        self._ticket = admission.queue.push(
            self.account,
            self._rank,
            self,
            self._ticket,
            self._priority,
            tokens=self.computed,
            lane=self.is_new,
        )
        admission.dispatch()

    def take(self) -> bool:
        """Starts the generation, which the queue has popped. False: it is back in the queue."""
        queue, account = self._admission.queue, self.account
        assert self._on_turn is not None, "it waited"
        assert self._ticket is not None
        result = self._on_turn()
        if result is TurnResult.NO_CAPACITY:
            queue.put_back(account, self._rank, self, self._ticket, self._priority, lane=self.is_new)
            return False
        if result is TurnResult.PARKED or self._ended or self.waits:
            return True
        if result is TurnResult.SENT:
            self._running_since = self._admission.clock()
            self._admission.running += 1
            account.running += 1
            account.positions += self._positions
        if self.is_new:
            self.is_new = False
            queue.charge(account, self.computed)
            self._admission.sent(self)
        return True

    def computes(self, tokens: int) -> None:
        """Workers compute so many tokens of the prompt, as far as known. The key is charged for these, and
        before the first wait they say which prompts are short."""
        if not self.is_new:
            self._admission.queue.charge(self.account, tokens - self.computed)
        if not self._answered:
            self._admission.expects(self, max(1, tokens))  # the last one is computed in any case
        self.computed = tokens

    def generated(self) -> None:
        if not self._answered:
            self._first_token(drained=True)
            self._admission.dispatch()
        self._positions += 1
        self.account.positions += self._running_since is not None
        self._admission.queue.charge(self.account, OUTPUT_WEIGHT)
        self.account.spend(1)

    def end(self) -> None:
        """Leaves the queue and gives everything back. Idempotent.

        A prompt that no worker had costs its key nothing.
        """
        if self._ended:
            return
        self._ended = True
        if self.is_new:
            self.account.spend(-self.tokens)
        if self._ticket is not None:
            self._admission.queue.remove(self._ticket)
        self._release()
        self._first_token(drained=False)
        self._on_turn = None
        self._admission.dispatch()

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return self._ticket is not None and self._ticket in self._admission.queue

    @property
    def _rank(self) -> int:
        """Orders by priority among keys, then interrupted generations before new ones."""
        return 2 * self._level + self.is_new

    def _release(self) -> None:
        if self._running_since is not None:
            self._admission.freed(self._running_since)
            self._running_since = None
            self.account.running -= 1
            self.account.positions -= self._positions

    def _first_token(self, *, drained: bool) -> None:
        if not self._answered:
            self._answered = True
            self._admission.answered(self, drained=drained)


def _unlimited() -> FreeCapacity:
    return FreeCapacity(math.inf, math.inf)


@dataclass(eq=False, repr=False)
class Admission:
    """Owns the queue, and counts the bodies that arrive and the prompt tokens that wait.

    Attributes:
        body_bytes: bytes of bodies that are read or prepared.
        waiting_tokens: prompt tokens of generations without a first token, in the router and at workers. Only
            a single request that is larger than the bound exceeds it.
        uncached_tokens: the part of `waiting_tokens` that workers do not have in their caches. Until that is
            known of a prompt, it is the usual part.
        queue: generations that wait for their turn.
        running: generations that workers have.
    """

    max_waiting_tokens: int
    """Bound of `waiting_tokens`: what the memory holds."""
    window: Callable[[], PrefillWindow]
    """Returns the prompt tokens of one key that workers may have without a first token."""
    free_capacity: Callable[[], FreeCapacity] = _unlimited
    """Returns the free capacity of all decode workers."""
    max_body_bytes: float = math.inf
    """Bound of `body_bytes`."""
    max_wait: float = math.inf
    """Seconds that a new request may be expected to wait."""
    shared: bool = False
    """There are several keys. Each key has half of the window, and its prompts must fit into that."""
    paused: Callable[[], bool] = lambda: False
    """Whether no new generation may start. Each then waits outside the queue for the end of the pause."""
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self.body_bytes = self.waiting_tokens = self.uncached_tokens = self.running = 0
        self.queue: FairQueue[Account, Turn] = FairQueue()
        self._sent_tokens = 0  # the part of `uncached_tokens` that workers have
        self._wait = ExpectedWait(self.clock())
        self._keys_waiting = 0  # that have `uncached_tokens`
        self._dispatching = False
        self._window_full = False  # a generation waits for its key's window, as of the last dispatch

    @property
    def held_tokens(self) -> int:
        """The part of `uncached_tokens` that waits in the router for prefill workers."""
        return self.uncached_tokens - self._sent_tokens if self._window_full else 0

    @property
    def waiting_for_decode(self) -> int:
        """Generations in the queue that wait for decode workers. The others wait for prefill workers."""
        return 0 if self._window_full else len(self.queue)

    @property
    def expected_wait(self) -> float:
        """Seconds that a new request is expected to wait for its first token, less its own prefill."""
        ahead = Ahead(self.uncached_tokens, self.waiting_for_decode, self.running)
        return self._wait.seconds(ahead, self.window(), self.clock())

    def assert_whole(self) -> None:
        """That nothing is counted when no request waits or runs."""
        tokens = self.waiting_tokens, self.uncached_tokens, self._sent_tokens
        assert not any(tokens), tokens
        counts = self._keys_waiting, self.running, len(self.queue)
        assert not any(counts), counts

    def reserve(self, account: Account, tokens: int, max_wait: float = math.inf) -> None:
        """Counts prompt tokens as waiting, of a request that may wait so many seconds. Raises Overloaded and
        RateLimited."""
        self._check_wait(account, min(max_wait, self.max_wait))
        self._check_memory(account, tokens)
        account.spend(tokens)
        self._count(account, tokens)

    def release(self, account: Account, tokens: int) -> None:
        """Undoes `reserve`."""
        account.spend(-tokens)
        self._count(account, -tokens)

    def _count(self, account: Account, tokens: int) -> None:
        self.waiting_tokens += tokens
        account.waiting_tokens += tokens

    def count_uncached(self, account: Account, tokens: int) -> None:
        """Adds to `uncached_tokens`; a negative number gives them back. Called by entries and turns."""
        self._keys_waiting -= account.uncached_tokens > 0
        self.uncached_tokens += tokens
        account.uncached_tokens += tokens
        self._keys_waiting += account.uncached_tokens > 0

    def _check_wait(self, account: Account, max_wait: float) -> None:
        wait = self.expected_wait
        if self.shared and self.uncached_tokens:
            # Keys are served equally: of the others, no more comes before than this key itself has waiting.
            wait *= min(1.0, self._keys_waiting * account.uncached_tokens / self.uncached_tokens)
        if wait <= max_wait:
            return
        text = f"the request would wait about {wait:.3g} s, and may wait {max_wait:.3g} s"
        if self.shared:
            text = f"key {account.key.name!r} has {account.waiting_tokens} prompt tokens waiting: {text}"
            raise RateLimited(text, retry_after=_retry_after(wait))
        raise Overloaded(text, retry_after=_retry_after(wait))

    def _check_memory(self, account: Account, tokens: int) -> None:
        most = self.max_waiting_tokens
        room = most - self.waiting_tokens
        if self.shared and account.waiting_tokens and account.waiting_tokens + tokens > KEY_SHARE * room:
            raise RateLimited(
                f"key {account.key.name!r} has {account.waiting_tokens} prompt tokens waiting; the rest of "
                f"{most}, which fit into the memory, is kept for other keys",
                retry_after=_retry_after(self.expected_wait),
            )
        if self.waiting_tokens and tokens > room:
            raise Overloaded(
                f"{self.waiting_tokens} prompt tokens are waiting, and {most} fit into the memory",
                retry_after=_retry_after(self.expected_wait),
            )

    def dispatch(self) -> None:
        """Starts the generations whose conditions hold. Called whenever workers may have become less busy."""
        if self._dispatching:  # a generation that starts changes loads, and may end
            return
        self._dispatching = True
        try:
            full: set[Account] = set()  # the first generation of these keys found no capacity
            while len(self.queue) and (turn := self._next(full)) is not None:
                if not turn.take():
                    full.add(turn.account)
        finally:
            self._dispatching = False
            self._wait.queued(len(self.queue) > 0, self.clock())

    def _next(self, full: set[Account]) -> Turn | None:
        free = self.free_capacity() if self.shared else _unlimited()
        self._window_full = False

        paused = self.paused()

        def may_start(account: Account, turn: Turn) -> bool:
            if paused and turn.is_new:
                return True  # to park
            # Only a key without a running generation may overtake one that found no capacity.
            if full and (account in full or account.running):
                return False
            # Workers give keys equal shares of their steps, so each key has a window of its own.
            if turn.is_new and account.in_window:
                window = self.window()
                ahead = account.in_window + (window.counted(turn.tokens) if self.shared else 1)
                if ahead > window.tokens / (2 if self.shared else 1):
                    self._window_full = True
                    return False
            limit = KEY_SHARE * account.share
            return not account.running or (
                account.running < limit * free.slots and account.positions < limit * free.positions
            )

        return self.queue.pop(may_start)

    def expects(self, turn: Turn, tokens: int) -> None:
        """Workers are expected to compute so many tokens until its first token. Called by the turn."""
        more = tokens - turn.expected
        turn.expected = tokens
        self.count_uncached(turn.account, more)
        if not turn.is_new:
            self._sent_tokens += more

    def sent(self, turn: Turn) -> None:
        """Workers have its prompt, which takes a part of the window. Called by the turn."""
        self._sent_tokens += turn.expected
        turn.in_window = self.window().counted(turn.computed)
        turn.account.in_window += turn.in_window

    def answered(self, turn: Turn, *, drained: bool) -> None:
        """Its prompt no longer waits: its first token came (`drained`), or it ended. Called by the turn."""
        self._count(turn.account, -turn.tokens)
        self.count_uncached(turn.account, -turn.expected)
        if not turn.is_new:
            self._sent_tokens -= turn.expected
            turn.account.in_window -= turn.in_window
        if drained:
            now = self.clock()
            self._wait.answered(turn.expected, now)
            turn.account.uncached_share.add(turn.expected, turn.tokens, now)

    def freed(self, since: float) -> None:
        """A generation has left its worker, which had it from the time `since`. Called by its turn."""
        self.running -= 1
        now = self.clock()
        self._wait.freed(now - since, now)


def _retry_after(wait: float) -> int:
    """Clients try again when what waits now is done. Those of OpenAI ignore more than a minute."""
    return max(1, math.ceil(min(wait, MAX_RETRY_AFTER)))
