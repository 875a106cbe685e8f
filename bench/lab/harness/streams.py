"""Requests with one right answer each, continuous load of them, and the check of what clients read."""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from baton.bench.load.target.sse import SSEError, SSEParser
from baton.bench.load.target.tokenization import WORDS, Composer, Segment, Tokenization
from baton.bench.report import Report, Row

_TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "Water boils at a hundred degrees. Explain to a child, in simple words, why a pot sings first:",
    "A list of the planets of our solar system, from the nearest to the sun to the farthest:",
    "Dear Sir or Madam, I am writing to you about the bicycle that I bought in your shop last week.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "In 1969 two men walked on the moon for the first time. The story begins eight years earlier, when",
    "The recipe for a good bread needs only four things: flour, water, salt and",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A request with one right answer: it is greedy, or it has a seed."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    options: str = "{}"  # further fields of the request, as JSON

    def body(self, **more: Any) -> dict[str, Any]:
        fields = {
            "prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": self.temperature,
            "seed": self.seed, "stream": True, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        return fields | json.loads(self.options) | more


def greedy(prompt: Sequence[int], tokens: int, **fields: Any) -> Case:
    """A prompt of token ids. `fields`: more of the request."""
    return Case("", tokens, 0.0, seed=1, options=json.dumps({"prompt": [*prompt], **fields}))


def cases(count: int, max_tokens: int, *, repeat: int = 1) -> list[Case]:
    """Makes cases; every second one is greedy. `repeat` makes prompts longer."""
    return [
        Case(
            f"({i}) " + " ".join([_TEXTS[i % len(_TEXTS)]] * (1 + i % 3 * repeat)),
            max_tokens,
            temperature=0.0 if i % 2 == 0 else 0.8,
            seed=i + 1,
        )
        for i in range(count)
    ]


def worded(prompts: Iterable[Sequence[Segment]], max_tokens: int) -> list[Case]:
    """Makes cases for a shape of `write_shape`, whose tokens are words; every second one is greedy."""
    compose = Composer(Tokenization(WORDS, 1.0, 0, "one token a word")).compose
    return [
        Case(compose([*segments]), max_tokens, 0.8 * (i % 2), seed=i + 1)
        for i, segments in enumerate(prompts)
    ]


@dataclass(slots=True)
class Stream:
    """One answer as a client got it. Times are time.monotonic()."""

    case: Case
    started: float = 0.0
    ended: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)  # of each token, if asked for
    arrivals: list[float] = field(default_factory=list)  # of each token
    prompt_tokens: int = 0  # if the usage was asked for, as the next
    cached_tokens: int = 0  # of the prompt
    keepalives: int = 0
    status: int = 0
    error: str = ""
    late: bool = False  # no token came within the time of `read`
    cut: bool = False  # the connection ended before the answer, as when a router is killed
    finish_reason: str | None = None

    @property
    def failed(self) -> bool:
        return bool(self.error) or self.finish_reason is None

    @property
    def ttft(self) -> float:
        """Seconds."""
        return self.arrivals[0] - self.started

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [after - before for before, after in pairwise(self.arrivals)]

    def gap_around(self, moment: float) -> float | None:
        """Seconds without a token around `moment`; None if the stream did not run then."""
        if not self.started <= moment <= self.ended:
            return None
        before = max((t for t in self.arrivals if t <= moment), default=self.started)
        after = min((t for t in self.arrivals if t > moment), default=self.ended)
        return after - before


def new_session(key: str = "") -> aiohttp.ClientSession:
    """A session without limits on connections and time. `key`: the API key."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Authorization": f"Bearer {key}"} if key else None,
    )


async def read(
    http: aiohttp.ClientSession,
    url: str,
    case: Case,
    *,
    into: Stream | None = None,
    name: str = "",
    **more: Any,
) -> Stream:
    """Sends a completion and reads its answer to the end. Errors of the server are in the result.

    `into` is the stream to fill, if the caller wants to look at it before the end. `name`: the x-request-id.
    """
    stream = into or Stream(case)
    data, headers = json.dumps(case.body(**more)).encode(), {"x-request-id": name} if name else {}
    return await post(http, f"{url}/v1/completions", data, stream, headers)


async def greedy_tokens(url: str, prompts: Iterable[Sequence[int]], count: int) -> list[list[int]]:
    """The `count` token ids behind each prompt, all asked for at once. Raises RuntimeError if an answer
    fails."""
    async with new_session() as http:
        answers = await asyncio.gather(*(read(http, url, greedy(ids, count)) for ids in prompts))
    return [answer.token_ids for answer in with_ends(answers)]


def with_ends(answers: list[Stream]) -> list[Stream]:
    """Raises RuntimeError if one of them failed."""
    if failed := [answer for answer in answers if answer.failed]:
        why = failed[0].error[:500] or "the answer has no end"
        raise RuntimeError(f"{len(failed)} of {len(answers)} failed: status {failed[0].status}: {why}")
    return answers


async def post(
    http: aiohttp.ClientSession, url: str, data: bytes, stream: Stream, headers: Mapping[str, str] = {}
) -> Stream:
    """Sends a completion or a chat, as `read` does, and fills the stream."""
    stream.started = time.monotonic()
    try:
        headers = {"Content-Type": "application/json", **headers}
        async with http.post(url, data=data, headers=headers) as response:
            stream.status = response.status
            if response.status != 200:
                stream.error = await response.text()
                return stream
            parser = SSEParser()
            async for part in response.content.iter_any():
                for event in parser.feed(part):
                    _take(stream, event)
                stream.keepalives = parser.comments
    except SSEError as error:
        stream.error = stream.error or str(error)
    except aiohttp.ClientError as error:
        stream.error = stream.error or f"{type(error).__name__}: {error}"
        stream.cut = True
    finally:
        stream.ended = time.monotonic()
    return stream


def _take(stream: Stream, data: bytes) -> None:
    if data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        stream.error = json.dumps(event["error"])
        return
    if usage := event.get("usage"):
        stream.prompt_tokens = usage["prompt_tokens"]
        stream.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event["choices"]:
        stream.finish_reason = choice.get("finish_reason")
        if "delta" in choice:
            new, text = (), choice["delta"].get("content") or ""
        else:
            new, text = choice["token_ids"] or (), choice["text"]  # vLLM may say null
        stream.token_ids += new
        stream.text += text
        if choice.get("logprobs"):
            stream.logprobs += choice["logprobs"]["token_logprobs"]
        stream.arrivals += [time.monotonic()] * (len(new) or bool(text and "delta" in choice))


async def answers(url: str, cases: Sequence[Case], at_once: int) -> list[Stream]:
    """Reads the answer to each case, so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(http: aiohttp.ClientSession, case: Case) -> Stream:
        async with gate:
            return await read(http, url, case)

    async with new_session() as http:
        return await asyncio.gather(*(one(http, case) for case in cases))


async def expected(url: str, cases: Sequence[Case], at_once: int = 4) -> dict[Case, list[int]]:
    """The right answers, from a cluster without faults. Raises RuntimeError if a request fails."""
    streams = await answers(url, cases, at_once)
    for stream in streams:
        if stream.failed or len(stream.token_ids) != stream.case.max_tokens:
            said = stream.error or stream.token_ids
            raise RuntimeError(f"{stream.case} failed on a healthy cluster: {said}")
    return {stream.case: stream.token_ids for stream in streams}


LOOK_S = 0.005


async def until(holds: Callable[[], bool], running: Sequence[asyncio.Task[Any]]) -> None:
    """Looks at streams that tasks read until this holds. Raises what a task has raised, and RuntimeError if a
    task has read a stream that failed, or if all tasks have ended."""
    while not holds():
        ended = [task.result() for task in running if task.done()]
        failed = [each for each in ended if isinstance(each, Stream) and each.failed]
        if failed:
            raise RuntimeError(f"a stream failed: {failed[0].error or 'it ended early'}")
        if len(ended) == len(running):
            raise RuntimeError("all streams have ended")
        await asyncio.sleep(LOOK_S)


RECONNECT_S = 0.2


@dataclass(slots=True)
class Load:
    """Clients that send requests and keep every answer: each one after another, or all at a rate.

    A client that loses the connection to the router sends its request again.
    """

    url: str
    cases: Sequence[Case]
    rng: random.Random
    pause: float = 0.0
    """Seconds between an answer and the next request of a client."""
    streams: list[Stream] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def of(self, clients: int) -> AsyncIterator[None]:
        """A context in which so many clients send. At its end each reads its last answer to the end."""
        stop = asyncio.Event()
        async with new_session() as http:
            sending = asyncio.gather(*(self._client(http, stop) for _ in range(clients)))
            try:
                yield
            finally:
                stop.set()
                await sending

    @contextlib.asynccontextmanager
    async def at(self, rate: float) -> AsyncIterator[None]:
        """A context in which so many requests a second begin at random times (Poisson), however long answers
        take. At its end each answer is read to the end."""
        stop = asyncio.Event()

        async def begin(http: aiohttp.ClientSession, answers: asyncio.TaskGroup) -> None:
            while not stop.is_set():
                answers.create_task(self._ask(http))
                await asyncio.sleep(self.rng.expovariate(rate))

        async with new_session() as http, asyncio.TaskGroup() as answers:
            beginning = answers.create_task(begin(http, answers))
            try:
                yield
            finally:
                stop.set()
                await beginning

    async def _client(self, http: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._ask(http)
            await asyncio.sleep(self.pause)

    async def _ask(self, http: aiohttp.ClientSession) -> None:
        case = self.rng.choice(self.cases)
        while (stream := await read(http, self.url, case)).cut:
            if stream.status:  # else no router listened, and the request never began
                self.streams.append(stream)
            await asyncio.sleep(RECONNECT_S)
        self.streams.append(stream)


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault that happened. `back` is when the worker served again; equals `at` if it never stopped."""

    role: str
    fault: str
    at: float  # time.monotonic()
    back: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The comparison of all answers with the right ones."""

    requests: int
    tokens: int
    failed: int
    reconnected: int  # connections lost because a router was killed
    lost_or_repeated: int  # tokens by which answers are too short or too long
    different: int  # tokens that differ from a run without faults
    errors: tuple[str, ...]

    def add_to(self, report: Report, prefix: str, leaks: Mapping[str, int]) -> None:
        """Adds the rows that must be 0, and the number of requests. Prints what went wrong."""
        for line in (*self.errors[:10], *(f"{name}: {count}" for name, count in leaks.items())):
            print(line, file=sys.stderr)
        zeros(
            report, prefix, failed=(self.failed, "requests"),
            lost_or_repeated_tokens=(self.lost_or_repeated, "tokens"),
            different_tokens=(self.different, "tokens"), leaked_blocks=leaked(leaks),
        )  # fmt: skip
        report.add(Row(f"{prefix}.requests", self.requests, "requests"))


def zeros(report: Report, prefix: str, **counts: tuple[int, str]) -> None:
    """Adds rows whose values, of which each has a unit, must be 0."""
    for name, (value, unit) in counts.items():
        report.add(Row(f"{prefix}.{name}", value, unit, goal=0))


def leaked(leaks: Mapping[str, int]) -> tuple[int, str]:
    return sum(leaks.values()), "blocks, slots, attempts"


def judge(
    streams: Sequence[Stream], right: Mapping[Case, list[int]], routers_killed: Sequence[Happened] = ()
) -> Verdict:
    """A stream that was cut while its router was killed counts as reconnected, not as failed."""
    lost = different = reconnected = 0
    failures = []
    for stream in streams:
        if stream.cut and any(
            one.at <= stream.ended and stream.started <= one.back for one in routers_killed
        ):
            reconnected += 1
        elif stream.failed:
            failures.append(stream.error or "the stream ended early")
        expected = right[stream.case]
        if not stream.failed:
            lost += abs(len(expected) - len(stream.token_ids))
        # The tokens before a failure must be right, too.
        different += sum(a != b for a, b in zip(stream.token_ids, expected, strict=False))
    tokens = sum(len(stream.token_ids) for stream in streams)
    return Verdict(len(streams), tokens, len(failures), reconnected, lost, different, tuple(failures))
