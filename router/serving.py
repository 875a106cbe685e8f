"""Answers one generation request: admitted, generated, written whole or as a stream of events."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from router.admission import Admission, Ticket
from router.answers import Format, usage
from router.api import GenerationBody
from router.choice import Choice, Delta
from router.errors import ApiError
from router.generation import Generation
from router.jobs import Job
from router.metrics import Metrics
from router.outbox import Outbox
from router.pool import WorkerPool
from router.tokenizer import ModelTokenizer

KEEPALIVE_SECONDS = 5.0
_KEEPALIVE = b": waiting\n\n"
_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class Services:
    """What requests share."""

    tokenizer: ModelTokenizer
    pool: WorkerPool
    admission: Admission
    metrics: Metrics
    request_timeout: float
    worker_wait: float
    active: "ActiveAnswers" = field(default_factory=lambda: ActiveAnswers())


class ActiveAnswers:
    """The requests that are being answered."""

    def __init__(self) -> None:
        self._answers: set[Answer] = set()
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, answer: "Answer") -> None:
        self._answers.add(answer)
        self._none.clear()

    def discard(self, answer: "Answer") -> None:
        self._answers.discard(answer)
        if not self._answers:
            self._none.set()

    def abort(self, error: ApiError) -> None:
        for answer in self._answers:
            answer.abort(error)

    async def wait_for_none(self) -> None:
        await self._none.wait()


class Answer:
    """One HTTP request's generations, until the last of them ended or the client went.

    However it ends, `run` leaves no generation behind.
    """

    def __init__(
        self, services: Services, body: GenerationBody, jobs: list[Job], answer_format: Format, name: str
    ) -> None:
        self._services = services
        self._body = body
        self._jobs = jobs
        self._format = answer_format
        self._name = name
        self._outbox = Outbox()
        self._generations: list[Generation] = []
        self._choices = [
            Choice(
                services.tokenizer,
                stops=body.stop,
                stop_token_ids=frozenset(body.stop_token_ids or ()),
                min_tokens=body.min_tokens,
                skip_special_tokens=body.skip_special_tokens,
            )
            for _ in jobs
        ]

    async def run(self, request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
        """Raises ApiError as long as nothing was sent."""
        services, began = self._services, time.monotonic()
        sizes = [len(job.prompt_ids) for job in self._jobs]
        with services.admission.admit(sizes, services.pool.prefill_tokens_per_s) as ticket:
            services.active.add(self)
            try:
                self._generations = [
                    Generation(
                        job,
                        services.pool,
                        self._outbox,
                        services.metrics,
                        index=index,
                        name=self._name,
                        timeout=services.request_timeout,
                        worker_wait=services.worker_wait,
                    )
                    for index, job in enumerate(self._jobs)
                ]
                if self._body.stream:
                    return await self._stream(request, headers, ticket)
                return await self._whole(headers, ticket)
            finally:
                services.active.discard(self)
                self._close(time.monotonic() - began)

    def abort(self, error: ApiError) -> None:
        """From outside: what is not finished ends with this error."""
        for index, generation in enumerate(self._generations):
            if not generation.done:
                generation.cancel()
                self._outbox.put(index, error)

    async def _whole(self, headers: dict[str, str], ticket: Ticket) -> web.Response:
        while not self._finished:
            for index, item in await self._outbox.take(KEEPALIVE_SECONDS):
                if isinstance(item, ApiError):
                    raise item
                ticket.started(index)
                self._push(index, item)
        body = self._format.whole(self._choices, self._usage())
        return web.Response(body=_encode(body), content_type="application/json", headers=headers)

    async def _stream(
        self, request: web.Request, headers: dict[str, str], ticket: Ticket
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        while not self._finished:
            events: list[bytes] = []
            for index, item in await self._outbox.take(KEEPALIVE_SECONDS):
                if isinstance(item, ApiError):
                    if not response.prepared and not events:
                        raise item
                    await self._write(request, response, *events, _event(item.body), _DONE)
                    return response
                ticket.started(index)
                delta = self._push(index, item)
                if delta is not None:
                    events.append(self._event(index, delta))
            await self._write(request, response, *(events or [_KEEPALIVE]))
        options = self._body.stream_options
        last = [_event(self._format.usage_chunk(self._usage()))] if options and options.include_usage else []
        await self._write(request, response, *last, _DONE)
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, *events: bytes) -> None:
        if not response.prepared:
            await response.prepare(request)
        await response.write(b"".join(events))

    def _push(self, index: int, token: Any) -> Delta | None:
        """None for a token behind a stop string."""
        choice = self._choices[index]
        if choice.finish_reason:
            return None
        delta = choice.push(token)
        if delta.finish_reason:
            self._generations[index].cancel()
        return delta

    def _event(self, index: int, delta: Delta) -> bytes:
        chunk = self._format.chunk(index, self._choices[index], delta)
        options = self._body.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        return _event(chunk)

    @property
    def _finished(self) -> bool:
        return all(choice.finish_reason for choice in self._choices)

    def _usage(self) -> dict[str, Any]:
        prompts = self._jobs[:: self._body.n]
        return usage(
            sum(len(job.prompt_ids) for job in prompts),
            sum(choice.num_tokens for choice in self._choices),
            sum(generation.cached_tokens for generation in self._generations[:: self._body.n]),
        )

    def _close(self, seconds: float) -> None:
        metrics = self._services.metrics
        for generation, choice in zip(self._generations, self._choices, strict=False):
            cut = not generation.done
            generation.cancel()
            reason = choice.finish_reason or ("abort" if cut else "error")
            metrics.finished[reason].inc()
            metrics.e2e.observe(seconds)
            metrics.generation_tokens.inc(choice.num_tokens)
        if self._finished:
            metrics.prompt_tokens.inc(sum(len(job.prompt_ids) for job in self._jobs[:: self._body.n]))


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + _encode(payload) + b"\n\n"
