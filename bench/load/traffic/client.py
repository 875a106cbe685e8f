"""Sends a share of the load and reads the answers, in one event loop of one client process.

Client `i` of `n` sends the sessions i, i+n, i+2n, …. In an open loop it sends them at their scheduled times.
In a closed loop its share of the users sends them one after another.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import aiohttp
import msgspec

from baton.bench.load.target.answer import Answer, Failure, Record
from baton.bench.load.target.conversation import Conversation
from baton.bench.load.target.request import Target, exchange, new_http_session
from baton.bench.load.target.tokenization import Composer, Tokenization
from baton.bench.load.traffic.workload import Arrivals, Session, Workload
from baton.system.words import counted

# Timers of uvloop have a resolution of 1 ms. So sleep until shortly before, then poll.
_SPIN_SECONDS = 0.002
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 1.0
"""Seconds that a user of a closed loop waits after a request without an answer, doubled each time."""
_NO_ANSWER = (Failure.REFUSED, Failure.UNREACHABLE, Failure.DISCONNECTED, Failure.HTTP)


class ClientConfig(msgspec.Struct, frozen=True):
    """What one client does.

    Attributes:
        index, clients: this is client `index` of `clients`.
        seed: of lengths and times. `texts`: of the words of prompts.
        arrivals: None for a closed loop, or for the times of a trace.
        concurrency: the users of a closed loop, or the most requests in flight of an open one; 0: no limit.
        duration, timeout, drain: seconds.
    """

    index: int
    clients: int
    target: Target
    workload: Workload
    tokenization: Tokenization
    seed: int
    texts: int
    run_id: str
    arrivals: Arrivals | None
    concurrency: int
    duration: float | None
    sessions: int | None
    time_scale: float
    timeout: float
    drain: float

    @property
    def users(self) -> int:
        """This client's share of `concurrency`."""
        return len(range(self.index, self.concurrency, self.clients))


class Talk:
    """One session under way. `body` is the request of its next turn: that of the first one is made at once,
    before it is due, since composing thousands of tokens takes time."""

    def __init__(self, config: ClientConfig, composer: Composer, index: int, session: Session) -> None:
        self.session = session
        self._config, self._index = config, index
        self._bound = index if session.bound is None else session.bound
        self._name = f"{config.run_id}-{self._bound}" if config.workload.keeps_sessions else ""
        self._conversation = Conversation(config.target, composer)
        self.ask(0)

    def ask(self, number: int) -> None:
        target, turn = self._config.target, self.session.turns[number]
        prompt = self._conversation.ask(turn.segments, turn.messages)
        self._asked_input = turn.input_tokens if number == 0 else 0
        if target.form == "ids":
            assert isinstance(prompt, str)
            self._asked_input = prompt.count(",") + 1
        later = number + 1 < len(self.session.turns)
        self.body = target.body(
            prompt, turn.output_tokens, session=self._name, ids_back=later and target.form == "ids"
        )

    def record(self, number: int, due: float, lag: float) -> Record:
        """Of the turn that is sent next."""
        return Record(
            index=self._index,
            turn=number,
            session=self._name,
            bound=self._bound,
            client=self._config.index,
            intended=due,
            sent=due,
            lag=lag,
            asked_input=self._asked_input,
            asked_output=self.session.turns[number].output_tokens,
        )

    def heard(self, answer: Answer) -> None:
        self._conversation.heard(answer)


class Client:
    """`run` it once. `emit` gets every record once, when its request has ended."""

    def __init__(self, config: ClientConfig, emit: Callable[[Record], None]) -> None:
        self._live: dict[int, Record] = {}  # by id
        self._config = config
        self._composer = Composer(config.tokenization, config.texts)
        self._emit = emit
        self._cut = Failure.INTERRUPTED  # the failure of a cancelled request
        self._tasks: set[asyncio.Task[Any]] = set()
        self._start = 0.0
        self._last_due = 0.0  # of the later turns that are known
        limited = config.concurrency and not self._is_closed_loop
        self._slots = asyncio.Semaphore(config.users) if limited else contextlib.nullcontext()

    @property
    def in_flight(self) -> int:
        return len(self._live)

    @property
    def answering(self) -> int:
        """How many requests have had a token of their answer."""
        return sum(bool(record.arrivals) for record in self._live.values())

    async def run(self, start: float, stop: asyncio.Event) -> None:
        """From `start` (time.monotonic) until everything is answered, the drain time is over, or `stop` is
        set."""
        self._start = start
        async with new_http_session(self._config.timeout) as http:
            sending = asyncio.create_task(self._closed(http) if self._is_closed_loop else self._open(http))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({sending, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
                await self._drain(stopped)
            else:
                await _cancel([sending])
            await _cancel([*self._tasks, stopped])

    @property
    def _is_closed_loop(self) -> bool:
        return self._config.arrivals is None and self._config.workload.count is None

    def _now(self) -> float:
        return time.monotonic() - self._start

    def _mine(self) -> Iterator[int]:
        """Indices of this client's sessions, ascending."""
        limits = [n for n in (self._config.sessions, self._config.workload.count) if n is not None]
        first, step = self._config.index, self._config.clients
        return iter(range(first, min(limits), step)) if limits else itertools.count(first, step)

    async def _open(self, http: aiohttp.ClientSession) -> None:
        config = self._config
        times = None if config.arrivals is None else enumerate(config.arrivals.times(config.seed))
        for index in self._mine():
            session = config.workload.session(index)
            if times is None:
                due = session.at / config.time_scale
            else:
                due = next(at for i, at in times if i == index)
            if config.duration is not None and due >= config.duration:
                return
            talk = Talk(config, self._composer, index, session)
            await self._sleep_until(due)
            self._spawn(self._session(http, talk, due))

    async def _closed(self, http: aiohttp.ClientSession) -> None:
        """The users take sessions from one common sequence, so that no user runs out of sessions."""
        indices = self._mine()
        await self._sleep_until(0.0)
        users = [asyncio.create_task(self._user(http, indices)) for _ in range(self._config.users)]
        self._tasks.update(users)
        # Sending ends when the first user finds no more sessions, or at the end of the duration.
        if users:
            await asyncio.wait(users, timeout=self._config.duration, return_when=asyncio.FIRST_COMPLETED)

    async def _user(self, http: aiohttp.ClientSession, indices: Iterator[int]) -> None:
        """Sends sessions one after another. A server that does not answer gets fewer and fewer requests."""
        config, pause = self._config, _FIRST_PAUSE
        for index in indices:
            talk = Talk(config, self._composer, index, config.workload.session(index))
            due = self._now()
            if config.duration is not None and due >= config.duration:
                return
            if await self._session(http, talk, due) not in _NO_ANSWER:
                pause = _FIRST_PAUSE
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    async def _drain(self, stopped: asyncio.Task[bool]) -> None:
        """The drain time begins with the last request. Later turns of sessions are requests, too."""
        everything, sent = asyncio.gather(*self._tasks), time.monotonic()
        while not everything.done() and not stopped.done():
            seconds = max(sent, self._start + self._last_due) + self._config.drain - time.monotonic()
            if seconds <= 0:
                self._cut = Failure.UNFINISHED
                return
            await asyncio.wait({everything, stopped}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if everything.done():
            everything.result()

    async def _session(self, http: aiohttp.ClientSession, talk: Talk, due: float) -> Failure | None:
        """Sends all turns in order. Returns the failure of the last one.

        After a turn that the server refused for want of room the session goes on. Any other failure ends it,
        since the next turn needs the answer.
        """
        config, turns = self._config, talk.session.turns
        failure, pause = None, 0.0
        for number, turn in enumerate(turns):
            if number:
                due = self._now() + max(turn.think_seconds, pause)
                if config.duration is not None and due >= config.duration:
                    return failure
                self._last_due = max(self._last_due, due)
                talk.ask(number)
                await self._sleep_until(due)
            record = talk.record(number, due, max(0.0, self._now() - due))
            answer = Answer(record, keep=number + 1 < len(turns))
            await self._request(http, answer, talk.body)
            failure = record.failure
            ends = not (record.ok or record.refused)
            record.skipped_turns = len(turns) - number - 1 if ends else 0
            self._emit(record)
            if ends:
                return failure
            if record.ok:
                talk.heard(answer)
            pause = max(_LAST_PAUSE, answer.retry_after) if record.refused else 0.0
        return failure

    async def _request(self, http: aiohttp.ClientSession, answer: Answer, body: bytes) -> None:
        record = answer.record
        try:
            async with self._slots:
                self._live[id(record)] = record
                try:
                    await exchange(http, self._config.target, body, answer, self._now)
                finally:
                    del self._live[id(record)]
        except asyncio.CancelledError:
            answer.fail(self._cut, f"after {counted(len(record.arrivals), 'chunk')}")
            answer.close(self._now())
            self._emit(record)
            raise

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """Keeps tasks with an exception, so that `_drain` raises it."""
        if task.cancelled() or task.exception() is None:
            self._tasks.discard(task)

    async def _sleep_until(self, due: float) -> None:
        while (remaining := due - self._now()) > 0:  # noqa: ASYNC110 - waits for a time, not for an event
            await asyncio.sleep(remaining - _SPIN_SECONDS if remaining > _SPIN_SECONDS else 0)


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
