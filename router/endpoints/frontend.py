"""What the HTTP and the gRPC endpoint share: API keys, limits, and the preparation of a request."""

import asyncio
import hashlib
import math
import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import accumulate
from urllib.parse import quote

from baton.router.active_request import ActiveRequest
from baton.router.admission.entry import Deadline, Entry, entering
from baton.router.admission.key_counts import KeyCounts
from baton.router.admission.keys import ANY_CLIENT, Account, ApiKey, KeyRing
from baton.router.api.jobs import Job, Sender
from baton.router.api.sampling import MAX_TIMEOUT
from baton.router.api.sessions import session_name
from baton.router.api.structured import Structure
from baton.router.errors import InvalidRequest, ModelNotFound, ShuttingDown, TimedOut, about
from baton.router.generation.context import RequestContext, Services
from baton.router.preparation.child import Preparer, fork_server
from baton.router.preparation.demand import Answer, GrammarChecker
from baton.router.preparation.jobs import make_jobs
from baton.router.preparation.media import MediaFetcher
from baton.router.preparation.prepare import Converted, Generated, Kind, NeedsFiles, Prepared, Served
from baton.router.text.sealed import seal_key
from baton.rpc import worker_pb2 as pb
from baton.system.tracing import valid_traceparent

TOKEN_BYTES = 4
"""Bytes of a body for each prompt token, as an estimate before the prompt is tokenized."""
_MAX_HEADER = 4_000
_ENDING = "the router is shutting down"
_VALID_NAME = re.compile(r"[\x21-\x7e]{1,128}")


def request_name(sent: str | None) -> str:
    """Returns the id that the client sent, if it is safe in a header and in a log.

    Otherwise returns a new one.
    """
    return sent if sent and _VALID_NAME.fullmatch(sent) else os.urandom(16).hex()


def seconds_of(headers: Mapping[str, str], name: str) -> float | None:
    """Returns the seconds in a header; None if it is not there. Raises InvalidRequest."""
    header = headers.get(name)
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT:
        text = f"must be seconds above 0, at most {MAX_TIMEOUT:g}, not {header[:20]!r}"
        raise InvalidRequest.at(name, text)
    return seconds


def unenforced_header(pointers: Sequence[str]) -> str:
    """Returns the value of the header x-baton-unenforced: JSON pointers as fragments of a URI (RFC 6901),
    with a comma between them. If they are long, the last entry is `+N` for the N that are missing."""
    quoted = [quote(pointer, safe="/~$-._") for pointer in pointers]
    lengths = accumulate(len(each) + 1 for each in quoted)
    shown = sum(length <= _MAX_HEADER for length in lengths)
    return ",".join(quoted[:shown] + ([f"+{len(quoted) - shown}"] if shown < len(quoted) else []))


class Frontend:
    """Turns the bytes of a client into an `ActiveRequest`. Owns the child processes that help with it."""

    def __init__(self, services: Services) -> None:
        config = services.config
        self.draining = False  # connections that are open are served, and close
        self.ending = False  # new requests are refused
        self.metrics = services.metrics
        self._model_names = config.model_names
        self._seal_key = seal_key(config.secret)
        self._services = services
        self._forks = fork_server(config.process_title, services.tokenizer, config.forks_fd)
        self._checker = GrammarChecker(self._forks)
        self._preparer = Preparer(services.tokenizer, self._forks, config.processes)
        self._media = MediaFetcher(config.allowed_media_domains, config.max_body_bytes, config.client_timeout)
        self._counts = KeyCounts(config.keys_fd, config.processes, config.process_number or 0)
        self._accounts: dict[ApiKey, Account] = {}
        self.use_keys(config.api_keys)

    def use_keys(self, keys: tuple[ApiKey, ...]) -> None:
        """Accepts these keys from now on. Requests of other keys go on to their end.

        A key that stays the same keeps its account. Raises ValueError for too many keys, and changes nothing.
        """
        ring, all_keys, before = KeyRing(keys), (ANY_CLIENT, *keys), self._accounts
        self._counts.add(key.account for key in all_keys)
        self._accounts = {key: before.get(key) or Account(key, self._counts) for key in all_keys}
        self._keys = ring
        self._services.admission.shared = len(keys) > 1

    @property
    def key_names(self) -> set[str]:
        """The names of the keys; that of any client without keys."""
        return {key.name for key in self._accounts}

    @property
    def accounts(self) -> list[Account]:
        """Those of the keys; without keys that of any client."""
        accounts = list(self._accounts.values())
        return accounts[1:] or accounts

    def authorize(self, authorization: str) -> Account:
        """Returns the account for the value of the authorization header. Raises Unauthorized."""
        return self._accounts[self._keys.authorize(authorization)]

    def start(self) -> None:
        """Starts the process that forks children now. Otherwise the first large body or grammar starts it."""
        self._forks.start()

    async def close(self) -> None:
        await self._checker.close()
        await self._preparer.close()
        await self._media.close()
        await self._forks.close()

    @property
    def capacity(self) -> int:
        """Tokens that one request may have, prompt and output together."""
        of_model, smallest = self._services.tokenizer.max_model_len, self._services.pool.max_positions
        return of_model if smallest is None else min(of_model, smallest)

    @property
    def _served(self) -> Served:
        config, names = self._services.config, (*self._model_names, *self.adapters)
        return Served(names, self.capacity, config.max_images, self._seal_key)

    @property
    def adapters(self) -> dict[str, pb.Adapter]:
        """Those that clients can name as models, by name."""
        return self._services.pool.adapters.served

    def _adapter(self, model: str | None) -> pb.Adapter | None:
        """That of a request for `model`. None: the model itself computes it. Raises ModelNotFound."""
        if model is None or model in self._model_names:
            return None
        if (adapter := self.adapters.get(model)) is None:  # it was unloaded meanwhile
            raise ModelNotFound.of(model, self._served.model_names)
        return adapter

    @contextmanager
    def admit(self, account: Account, name: str = "") -> Iterator[Entry]:
        """Admits a request, before its body is read. Raises ShuttingDown and RateLimited."""
        self._refuse_at_the_end()
        with entering(self._services.admission, account, name) as entry:
            yield entry

    def refuse_while_draining(self) -> None:
        """For requests that come without a connection."""
        if self.draining:
            raise ShuttingDown(_ENDING, retry_after=1)

    def _refuse_at_the_end(self) -> None:
        if self.ending:
            raise ShuttingDown(_ENDING, retry_after=1)

    async def activate(
        self,
        kind: Generated,
        raw: bytes | bytearray,
        entry: Entry,
        headers: Mapping[str, str],
        *,
        history: bytes = b"",
        timeout: float | None = None,
    ) -> ActiveRequest:
        """Parses, validates and tokenizes the body `raw` of an admitted request, which counts its bytes.

        Args:
            headers: of HTTP, or the metadata of gRPC. They may name the client's conversation and its trace,
                how long it waits for its turn, and for the answer.
            history: the earlier inputs and outputs of a request to /v1/responses, as a JSON array of inputs.
            timeout: seconds until the deadline of a gRPC call. Headers and body may have a lower limit.

        Raises ApiError.
        """
        began = time.monotonic()
        self._refuse_at_the_end()
        entry.receive(len(history))
        limits = timeout, seconds_of(headers, "x-request-timeout"), self._services.config.request_timeout
        limit = min(each for each in limits if each is not None)
        max_wait = seconds_of(headers, "x-max-wait")
        entry.max_wait = limit if max_wait is None else min(limit, max_wait)
        expected = max(1, min((len(raw) + len(history)) // TOKEN_BYTES, self.capacity))
        entry.expect(expected)
        with self._services.active.counting():
            entry.deadline = Deadline(began, limit)
            async with _until(entry.deadline):
                prepared = await self._prepared(kind, raw, entry, history)
            assert isinstance(prepared, Prepared)
            if (tokens := sum(map(len, prepared.prompts))) > expected:
                entry.expect(tokens)  # before there are lists of them
            entry.receive(sum(len(image.pixels) for images in prepared.images for image in images))
            options, adapter = prepared.options, self._adapter(prepared.options.model)
            limit = min(limit, math.inf if options.timeout is None else options.timeout)
            entry.deadline, entry.max_wait = Deadline(began, limit), min(entry.max_wait, limit)
            async with _until(entry.deadline):
                structure, unenforced = Answer(None)
                if (question := prepared.question) is not None:
                    structure, unenforced = await self._checker.check(question, entry.account.key.name)
            sender = Sender(
                session=session_name(headers, options.session, options.user),
                priority=entry.among_keys(options.priority),
                cache_salt=_salt(entry.account.key.cache_salt, options.cache_salt),
                tenant=entry.account.key.tenant,
                adapter=b"" if adapter is None else adapter.fingerprint,
                pair=None if (sent := headers.get("x-handover")) is None else self._pair(sent),
            )
            jobs = await self._jobs(prepared, sender, structure)
        self.metrics.preparation.observe(time.monotonic() - entry.began_at)
        return ActiveRequest(
            RequestContext(self._services, entry),
            prepared,
            jobs,
            model=self._services.config.model_name if adapter is None else adapter.name,
            unenforced=(*prepared.unenforced, *unenforced),
            traceparent=valid_traceparent(headers.get("traceparent")),
        )

    async def _prepared(
        self, kind: Kind, raw: bytes | bytearray, entry: Entry, history: bytes
    ) -> Prepared | bytes:
        """Fetches the images that the body names by URL, if there are any."""
        run = partial(self._preparer.run, kind, raw, self._served, entry.account.key, history)
        try:
            return await run()
        except NeedsFiles as missing:
            with about(missing.field):
                files = await self._media.fetch(entry.account.key.name, missing.urls, entry.receive)
        return await run(files)

    async def _jobs(self, prepared: Prepared, sender: Sender, structure: Structure | None) -> list[Job]:
        """`structure`: what workers enforce. Raises InvalidRequest."""
        services, jobs = self._services, list[Job]()
        for choice_jobs in make_jobs(
            prepared,
            sender,
            structure,
            self._reasoning(prepared, structure),
            context=self.capacity,
            vocab_size=services.tokenizer.vocab_size,
            content_root=services.pool.content_root,
            defaults=services.defaults,
        ):
            jobs += choice_jobs
            await asyncio.sleep(0)  # other tasks run between the prompts, which may be long
        return jobs

    def _pair(self, sent: str) -> tuple[str, str]:
        """Returns the two workers that a header names. Raises InvalidRequest."""
        listed = self._services.pool.listed
        match sent.split():
            case [prefill, decode] if prefill != decode and {prefill, decode} <= listed.keys():
                return prefill, decode
        text = f"must be the addresses of two workers, as /status shows them, not {sent[:80]!r}"
        raise InvalidRequest.at("x-handover", text)

    async def convert(
        self, kind: Converted, raw: bytes | bytearray, entry: Entry, history: bytes = b""
    ) -> bytes:
        """Returns the response to an endpoint that only counts or converts, or to a peek. Raises ApiError."""
        entry.receive(len(history))
        async with _until(Deadline(time.monotonic(), self._services.config.request_timeout)):
            response = await self._prepared(kind, raw, entry, history)
        assert isinstance(response, bytes)
        return response

    def _reasoning(self, prepared: Prepared, structure: Structure | None) -> pb.Reasoning | None:
        """Returns what workers must know of the reasoning. None: nothing."""
        budget, tokenizer = prepared.options.reasoning_budget, self._services.tokenizer
        way = tokenizer.reasoning
        if (
            way is None
            or way.in_messages
            or prepared.beginning == "answer"
            or (structure is None and budget is None)
        ):
            return None
        start = tokenizer.token_id(way.start) if prepared.beginning == "either" else None
        return pb.Reasoning(end_id=tokenizer.token_id(way.end), start_id=start, budget=budget)


def _salt(of_key: bytes, sent: str | None) -> bytes:
    """Returns the salt of a request: that of its API key, and behind its 16 bytes one derived from it and the
    client's field. So a store can remove all KV of a key."""
    if sent is None:
        return of_key
    of_field = hashlib.blake2b(sent.encode(errors="replace"), key=of_key, digest_size=48).digest()
    return of_key.ljust(16, b"\0") + of_field


@asynccontextmanager
async def _until(deadline: Deadline) -> AsyncIterator[None]:
    """Raises TimedOut then."""
    try:
        async with asyncio.timeout(deadline.seconds_left):
            yield
    except TimeoutError:
        raise TimedOut(f"the request was not prepared within {deadline.seconds:g} s") from None
