"""The door that every face of the router shares: who may come in, under which name, and with what."""

import asyncio
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from router.admission.gate import Account, Entry
from router.admission.keys import ANYBODY, ApiKey, KeyRing
from router.api.bodies import ChatOptions, CompletionOptions
from router.api.jobs import Context, make_jobs
from router.api.structured import MAX_LENGTH, Checker, Structure
from router.config import RouterConfig
from router.errors import InvalidRequest, ShuttingDown, TimedOut, Unsupported
from router.faces.serving import Answer, Services
from router.preparation.prepare import Kind, Prepared, Served
from router.preparation.preparer import Preparer
from rpc.tracing import valid_traceparent

TOKEN_BYTES = 4
"""Of a body, as an estimate before its prompt is tokenized."""
_NAMEABLE = re.compile(r"[\x21-\x7e]{1,128}")


def request_name(sent: str | None) -> str:
    """The client's own id for its request where it can stand in a header and in a log, else a new one."""
    return sent if sent and _NAMEABLE.fullmatch(sent) else os.urandom(16).hex()


class Intake:
    """From a client's bytes to an answer that is ready to run.

    Attributes:
        draining: nothing new is taken.
        metrics: of the router.
    """

    def __init__(self, config: RouterConfig, services: Services) -> None:
        self.draining = False
        self.metrics = services.metrics
        self._model_name = config.model_name
        self._services = services
        self._checker = Checker(f"{config.title}: router {config.index} grammars")
        self._preparer = Preparer(services.tokenizer, f"{config.title}: router {config.index} bodies")
        self._starting: asyncio.Task[None] | None = None
        self._keys = KeyRing(config.api_keys)
        self._accounts = {key: Account(key, 1 / config.processes) for key in (ANYBODY, *config.api_keys)}

    def authorize(self, authorization: str) -> Account:
        """Takes the value of that header. Raises Unauthorized."""
        return self._accounts[self._keys.authorize(authorization)]

    def start(self) -> None:
        """Starts the processes that prepare large bodies. Without it they start when the first one comes."""
        self._starting = asyncio.create_task(self._preparer.start())

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._checker.close()
        await self._preparer.close()

    @property
    def capacity(self) -> int:
        """Positions that one request may have, prompt and output together."""
        own, smallest = self._services.tokenizer.max_model_len, self._services.pool.capacity
        return own if smallest is None else min(own, smallest)

    @property
    def _served(self) -> Served:
        return Served(self._model_name, Context(self.capacity, self._services.pool.sliding_window))

    @contextmanager
    def admit(self, account: Account, size: int) -> Iterator[Entry]:
        """Lets a request to generate in, with a body of `size` bytes, of which nothing has been read yet.

        Raises ShuttingDown, Overloaded and RateLimited.
        """
        if self.draining:
            raise ShuttingDown("the router is shutting down", retry_after=1)
        estimate = max(1, min(size // TOKEN_BYTES, self.capacity))
        with self._services.admission.enter(account, estimate) as entry:
            yield entry

    async def answer(
        self,
        kind: Kind,
        raw: bytes | bytearray,
        entry: Entry,
        *,
        name: str,
        session: str | None,
        timeout: float | None,
        traceparent: str | None,
    ) -> Answer:
        """`name` is the request's id as its client knows it, `session` what it calls its conversation,
        `timeout` the seconds that it waits, where that is not in the body, `traceparent` the W3C header
        of its trace.

        Raises ApiError.
        """
        began = time.monotonic()
        with self._services.active.preparing():
            limit = min(self._services.request_timeout, math.inf if timeout is None else timeout)
            prepared = await self._prepare(kind, raw, entry.key, limit)
            assert isinstance(prepared, Prepared)
            body = prepared.options
            jobs = make_jobs(
                body,
                prepared.prompts,
                context=self._served.context,
                vocab_size=self._services.tokenizer.vocab_size,
                session=session,
                cache_salt=entry.key.cache_salt,
                tenant=entry.key.tenant,
                structure=await self._structure(body, entry.key.name),
            )
        deadline = began + min(limit, math.inf if body.timeout is None else body.timeout)
        return Answer(
            self._services,
            prepared,
            jobs,
            entry,
            name=name,
            deadline=deadline,
            traceparent=valid_traceparent(traceparent),
        )

    async def convert(
        self, kind: Literal["tokenize", "detokenize"], raw: bytes | bytearray, account: Account
    ) -> bytes:
        """The JSON answer. Raises ApiError."""
        account.enter()
        try:
            answer = await self._prepare(kind, raw, account.key, self._services.request_timeout)
        finally:
            account.leave()
        assert isinstance(answer, bytes)
        return answer

    async def _prepare(
        self, kind: Kind, raw: bytes | bytearray, key: ApiKey, timeout: float
    ) -> Prepared | bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._preparer.prepare(kind, raw, self._served, key.name)
        except TimeoutError:
            raise TimedOut(f"the request was not prepared within {timeout:g} s") from None

    async def _structure(self, body: ChatOptions | CompletionOptions, key: str) -> Structure | None:
        """What workers are to enforce. Raises InvalidRequest."""
        if not isinstance(body, ChatOptions) or not body.offered_tools:
            return body.structure and await self._checker.check(body.structure, key)
        tokenizer = self._services.tokenizer
        if tokenizer.tool_format is None:
            text = "tools is not supported: how this model writes calls is unknown, see --tool-call-parser"
            raise Unsupported(text, param="tools")
        if not body.must_call:
            return None
        for i, tool in enumerate(body.tools or ()):
            field = f"tools[{i}].function.parameters"
            await self._checker.check(Structure("json_schema", tool.schema_text, field), key)
        grammar = tokenizer.tool_format.grammar(
            body.callable_tools, many=body.many_calls, spell=tokenizer.lark
        )
        if len(grammar) > MAX_LENGTH:
            raise InvalidRequest(
                f"tools: {len(grammar)} characters are too many for tool_choice", param="tools"
            )
        return Structure("grammar", grammar, "tools")
