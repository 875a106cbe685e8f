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
from baton.bench.load.target.request import Target, exchange, new_http_session
from baton.bench.load.target.tokenization import Composer, Tokenization
from baton.bench.load.traffic.workload import Arrivals, Session, Turn, Workload

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


class Client:
    """`run` it once. `emit` gets every record once, when its request has ended."""

    def __init__(self, config: ClientConfig, emit: Callable[[Record], None]) -> None:
        self.in_flight = 0
        self._config = config
        self._composer = Composer(config.tokenization, config.texts)
        self._emit = emit
        self._cut = Failure.INTERRUPTED  # the failure of a cancelled request
        self._tasks: set[asyncio.Task[Any]] = set()
        self._start = 0.0
        limited = config.concurrency and not self._is_closed_loop
        self._slots = asyncio.Semaphore(config.users) if limited else contextlib.nullcontext()

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
            # Make the first body before it is due: composing 2,000 tokens takes time.
            body = self._body(session.turns[0], [])
            await self._sleep_until(due)
            self._spawn(self._session(http, index, session, due, body))

    async def _closed(self, http: aiohttp.ClientSession) -> None:
        """The users take sessions from one common sequence, so that no user runs out of sessions."""
        mine = self._mine()
        await self._sleep_until(0.0)
        users = [asyncio.create_task(self._user(http, mine)) for _ in range(self._config.users)]
        self._tasks.update(users)
        # Sending ends when the first user finds no more sessions, or at the end of the duration.
        if users:
            await asyncio.wait(users, timeout=self._config.duration, return_when=asyncio.FIRST_COMPLETED)

    async def _user(self, http: aiohttp.ClientSession, mine: Iterator[int]) -> None:
        """Sends sessions one after another. A server that does not answer gets fewer and fewer requests."""
        config, pause = self._config, _FIRST_PAUSE
        for index in mine:
            session = config.workload.session(index)
            body = self._body(session.turns[0], [])
            due = self._now()
            if config.duration is not None and due >= config.duration:
                return
            if await self._session(http, index, session, due, body) not in _NO_ANSWER:
                pause = _FIRST_PAUSE
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    async def _drain(self, stopped: asyncio.Task[bool]) -> None:
        if not self._tasks:
            return
        everything = asyncio.gather(*self._tasks)
        await asyncio.wait(
            {everything, stopped}, timeout=self._config.drain, return_when=asyncio.FIRST_COMPLETED
        )
        if everything.done():
            everything.result()
        elif not stopped.done():
            self._cut = Failure.UNFINISHED

    async def _session(
        self, http: aiohttp.ClientSession, index: int, session: Session, due: float, body: bytes
    ) -> Failure | None:
        """Sends all turns in order. Returns the failure that ended the session, since the next turn needs
        the answer."""
        config = self._config
        name = f"{config.run_id}-{index}" if config.workload.keeps_sessions else ""
        history: list[tuple[Turn, str]] = []
        for number, turn in enumerate(session.turns):
            if number:
                due = self._now() + turn.think_seconds
                if config.duration is not None and due >= config.duration:
                    return None
                body = self._body(turn, history)
                await self._sleep_until(due)
            record = Record(
                index=index,
                turn=number,
                session=name,
                client=config.index,
                intended=due,
                sent=due,
                lag=max(0.0, self._now() - due),
                asked_input=turn.input_tokens if number == 0 else 0,
                asked_output=turn.output_tokens,
            )
            answer = Answer(record, keep_text=number + 1 < len(session.turns))
            await self._request(http, answer, body)
            record.skipped_turns = 0 if record.ok else len(session.turns) - number - 1
            self._emit(record)
            if not record.ok:
                return record.failure
            history.append((turn, answer.text))
        return None

    async def _request(self, http: aiohttp.ClientSession, answer: Answer, body: bytes) -> None:
        try:
            async with self._slots:
                self.in_flight += 1
                try:
                    await exchange(http, self._config.target, body, answer, self._now)
                finally:
                    self.in_flight -= 1
        except asyncio.CancelledError:
            answer.fail(self._cut, f"after {len(answer.record.arrivals)} chunks")
            answer.close(self._now())
            self._emit(answer.record)
            raise

    def _body(self, turn: Turn, history: list[tuple[Turn, str]]) -> bytes:
        """The JSON of the request: the turn after its history."""
        target = self._config.target
        said = [(self._text(old, i), reply) for i, (old, reply) in enumerate(history)]
        last = self._text(turn, len(history))
        if target.api == "completions":
            return target.body("".join(f"{text}{reply}\n" for text, reply in said) + last, turn.output_tokens)
        messages = [m for text, reply in said for m in (_message("user", text), _message("assistant", reply))]
        return target.body([*messages, _message("user", last)], turn.output_tokens)

    def _text(self, turn: Turn, number: int) -> str:
        return self._composer.compose(turn.segments, first=number == 0)

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


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
