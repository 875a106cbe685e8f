"""A request while it generates. The HTTP or gRPC endpoint that received it takes its deltas and sends them.

Life of a request here: `ActiveRequest` is made → `generating` opens: one `Generation` for each choice starts
→ `take` returns deltas until every choice has its last one → `generating` closes: what still runs is
cancelled.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from baton.router import access_log
from baton.router.api.jobs import Job
from baton.router.errors import ApiError, Overloaded, RateLimited, TooSlow
from baton.router.generation.context import RequestContext
from baton.router.generation.generation import Generation
from baton.router.generation.output import Choice, Delta, Item, TokenQueue
from baton.router.history import Ended
from baton.router.preparation.prepare import Prepared
from baton.router.text.detokenizer import StopStrings
from baton.system.tracing import Attributes

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_UNREAD_TOKENS = 2048
"""Tokens of one choice that wait for the endpoint. With more than this for each choice the request is cut
off."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request, as its client is told."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were found in a prefix cache."""
    image_tokens: int = 0
    """Prompt tokens of images."""
    accepted_drafts: int = 0
    """As in `Generation`."""
    rejected_drafts: int = 0
    numerics_changed: bool = False
    """As in `AttemptPair`."""
    weights: Mapping[str, Any] = field(default_factory=dict)
    """The field of `usage` with the versions of the weights. Empty if all are those of `--model`."""


@dataclass(eq=False, repr=False)
class ActiveRequest:
    """The generations of one request, until the last of them ends or the client disconnects.

    Attributes:
        services, entry: those of the context.
        options, prompts: the fields beside the prompts, and these.
        sampling: the sampling parameters of the first choice.
        choices: `options.n` for each prompt, in the order of the prompts.
    """

    context: RequestContext
    prepared: Prepared
    """The validated request."""
    jobs: list[Job]
    model: str
    """As the response names it: the model, or an adapter."""
    traceparent: str
    unenforced: tuple[str, ...] = ()
    """JSON pointers into the request: what of its schemas is left to the model."""

    def __post_init__(self) -> None:
        services = self.services = self.context.services
        options, self.entry = self.prepared.options, self.context.entry
        self.options = options
        self.prompts = [job.prompt_ids for job in self.jobs[:: options.n]]
        self.sampling = self.jobs[0].sampling
        images = (image for job in self.jobs[:: options.n] for image in job.images)
        self._image_tokens = sum(image.tokens for image in images)
        stops = StopStrings(options.stop)
        self.choices = [Choice(services.tokenizer, options, stops) for _ in self.jobs]
        most = MAX_UNREAD_TOKENS * len(self.jobs)
        self.context.tokens = TokenQueue(most, self._unread, services.consumers)
        self._generations: list[Generation] = []
        self._error: ApiError | None = None  # until `take` raises it
        self._failure = ""  # its message
        self._unfinished = len(self.choices)
        self._counter = None  # of tokens that are sent
        if options.max_tokens_wanted != 0:
            self._counter = services.metrics.generation_tokens

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Generates while it is open. When it closes, all generations have ended or are cancelled.

        Raises Overloaded and RateLimited.
        """
        sizes = [len(job.prompt_ids) for job in self.jobs]
        with self._traced(), self.services.active.counting(self.abort):
            turns = self.entry.turns(sizes, self.options.priority)
            try:
                self._generations = [
                    Generation(job, turn, index, self.context)
                    for index, (job, turn) in enumerate(zip(self.jobs, turns, strict=True))
                ]
                for generation in self._generations:
                    generation.advance()
                yield
            finally:
                self._close(time.monotonic() - self.entry.began_at)
                self.entry.end()

    @property
    def finished(self) -> bool:
        """Every choice has had its last delta."""
        return not self._unfinished

    @property
    def over(self) -> bool:
        """No delta follows. `take` raises the error if there was one."""
        return self._error is not None or not self._unfinished

    async def take(self, timeout: float) -> list[tuple[int, Delta]]:
        """Waits for deltas. Returns those since the last call, each with the index of its choice.

        The list is empty when none came for `timeout` seconds, and when `consume` had the last ones. Raises
        the ApiError that ended the request once, after all deltas before it were taken.
        """
        if self._error is None:
            deltas = self._deltas_of(await self.context.tokens.take(timeout))
            if deltas or self._error is None:
                return deltas
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error
        finally:
            del error  # it refers to this frame, and a cycle would be garbage

    def _deltas_of(self, items: Iterable[Item]) -> list[tuple[int, Delta]]:
        """One of them may be an error, which the frame of `take` must not refer to."""
        deltas: list[tuple[int, Delta]] = []
        for index, item in items:
            self._add(deltas, _numbered, index, item)
        return deltas

    def consume(
        self,
        make: Callable[[int, Delta], T],
        made: MutableSequence[T],
        flush: Callable[[float], bool],
    ) -> None:
        """From now on `made` gets at once what `make` makes of a delta that comes while the task waits in
        `take`. Then `flush` is called, with the time of the loop. The task goes on if it returns False.

        The task takes all deltas if the first ones have log probabilities of their prompts, which may be
        long."""
        if not any(job.scores_prompt for job in self.jobs):
            self.context.tokens.consume(partial(self._add, made, make), flush)

    def _add(
        self,
        made: MutableSequence[T],
        make: Callable[[int, Delta], T],
        index: int,
        item: Delta | ApiError,
    ) -> None:
        """Adds what its generation put to a choice. `made` gets what `make` makes of the delta with its text:
        nothing of an error, which `take` raises, and of a token after a stop string."""
        if isinstance(item, ApiError):
            if self._error is None:
                self._error, self._failure = item, item.message
            return
        choice = self.choices[index]
        if choice.finish_reason:
            return
        choice.push(item)
        if item.first:
            self._choice_began(index)
        if item.finish_reason:
            self._choice_ended(index, choice)
        if self._counter is not None:
            self._counter.count += 1
        made.append(make(index, item))

    def _choice_began(self, index: int) -> None:
        if index % self.options.n == 0:  # the choices of a prompt share it
            self.services.metrics.prompt_tokens.inc(len(self.jobs[index].prompt_ids))

    def _choice_ended(self, index: int, choice: Choice) -> None:
        self._unfinished -= 1
        names, cut = self.jobs[index].answer_names, choice.finish_reason == "length"
        self.services.pool.desk.answers.ended(names, choice.num_tokens, cut=cut)
        self._generations[index].cancel()

    @contextmanager
    def _traced(self) -> Iterator[None]:
        options, sampling = self.options, self.sampling
        attributes: Attributes = {
            "gen_ai.request.id": self.entry.name,
            "gen_ai.request.n": options.n,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.response.model": self.model,
        }
        span = self.services.tracer.begin("request", self.traceparent, attributes, "server")
        self.context.span = span
        error = ""
        try:
            yield
        except BaseException as raised:
            error = str(raised) or type(raised).__name__
            raise
        finally:
            used = self.usage()
            span.set(
                {
                    "gen_ai.usage.prompt_tokens": used.prompt_tokens,
                    "gen_ai.usage.completion_tokens": used.completion_tokens,
                    "gen_ai.usage.num_sequences": len(self.choices),
                    "gen_ai.latency.e2e": time.monotonic() - self.entry.began_at,
                    "baton.cached_tokens": used.cached_tokens,
                }
            )
            span.end(self._failure or error or ("" if self.finished else "aborted"))

    def usage(self) -> TokenCounts:
        first, last = self.context.first_weights, self.context.last_weights
        versions = {"first": first or None, "last": last or None}
        return TokenCounts(
            prompt_tokens=sum(map(len, self.prompts)),
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            cached_tokens=self._cached_tokens,
            image_tokens=self._image_tokens,
            accepted_drafts=sum(generation.accepted_drafts for generation in self._generations),
            rejected_drafts=sum(generation.rejected_drafts for generation in self._generations),
            numerics_changed=any(generation.pair.numerics_changed for generation in self._generations),
            weights={"weights_version": versions} if any(versions.values()) else {},
        )

    @property
    def _cached_tokens(self) -> int:
        """Of each prompt the least that a choice has found: a choice may find what another one has cached."""
        n, generations = self.options.n, self._generations
        found = (
            [each.cached_tokens for each in generations[i : i + n] if each.pair.output_ids]
            for i in range(0, len(generations), n)
        )
        return sum(min(of_prompt, default=0) for of_prompt in found)

    def timing(self) -> dict[str, float] | None:
        """Returns vLLM's field `metrics`, in milliseconds. None: there are several choices."""
        if len(self._generations) != 1:
            return None
        [generation], count = self._generations, self.choices[0].num_tokens
        first, later = generation.first_token_seconds, generation.later_seconds
        milliseconds = {
            "time_to_first_token_ms": 1e3 * first,
            "generation_time_ms": 1e3 * later,
            "queue_time_ms": 1e3 * generation.queue_seconds,
            "tokens_per_second": count / max(1e-9, first + later),
        }
        return milliseconds if count < 2 else milliseconds | {"mean_itl_ms": 1e3 * later / (count - 1)}

    def keep(self, size: int) -> None:
        """Counts bytes of the answer that wait for its end, like those of bodies. If there are too many of
        them, the request ends."""
        try:
            self.entry.receive(size)
        except (Overloaded, RateLimited) as error:
            kinds = "log probabilities count until they are sent, like events of the background"
            text = f"{error.message}; {kinds}"
            self.abort(type(error)(text, retry_after=error.retry_after))

    def abort(self, error: ApiError) -> None:
        """Ends every generation that has not finished with this error."""
        for index, generation in enumerate(self._generations):
            if not generation.done:
                generation.cancel()
                self.context.tokens.put(index, error)

    def _record(self, seconds: float) -> Ended:
        """What the router remembers of the request: of several choices the route of the first one."""
        used, first = self.usage(), self._generations[0]
        cut = "error" if self._failure else "abort"
        return Ended(
            id=self.entry.name,
            began_at=self.entry.began_at,
            seconds=seconds,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens,
            output_tokens=used.completion_tokens,
            queue_seconds=first.queue_seconds,
            first_token_seconds=first.first_token_seconds,
            finish_reason=self.choices[0].finish_reason or cut,
            error=self._failure,
            route=first.addresses,
            events=tuple(first.events),
            key=self.entry.account.key.name,
        )

    def _unread(self) -> None:
        self.abort(TooSlow("the client left too much of its response unread"))

    def _close(self, seconds: float) -> None:
        metrics = self.services.metrics
        self.context.tokens.close()
        if self._generations:
            record = self._record(seconds)
            metrics.history.ended(record)
            access_log.generated(record)
        for generation, choice in zip(self._generations, self.choices, strict=False):
            cut = not generation.done
            generation.cancel()
            reason = choice.finish_reason or ("abort" if cut else "error")
            metrics.finished[reason].inc()
            metrics.e2e.observe(seconds)


def _numbered(index: int, delta: Delta) -> tuple[int, Delta]:
    return index, delta
