"""The door that every face of the router shares: who may come in, under which name, and with what."""

import math
import os
import re
import time

from router.admission.gate import Account
from router.admission.keys import ANYBODY, KeyRing
from router.api.bodies import Body, ChatBody, CompletionBody
from router.api.jobs import chat_prompt, completion_prompts, make_jobs
from router.api.structured import MAX_LENGTH, Checker, Structure
from router.config import RouterConfig
from router.errors import InvalidRequest, ModelNotFound, ShuttingDown, Unsupported
from router.faces.serving import Answer, Services
from rpc.tracing import valid_traceparent

_NAMEABLE = re.compile(r"[\x21-\x7e]{1,128}")


def request_name(sent: str | None) -> str:
    """The client's own id for its request where it can stand in a header and in a log, else a new one."""
    return sent if sent and _NAMEABLE.fullmatch(sent) else os.urandom(16).hex()


class Intake:
    """From a validated body to an answer that is ready to run.

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
        self._keys = KeyRing(config.api_keys)
        self._accounts = {key: Account(key, 1 / config.processes) for key in (ANYBODY, *config.api_keys)}

    def authorize(self, authorization: str) -> Account:
        """Takes the value of that header. Raises Unauthorized."""
        return self._accounts[self._keys.authorize(authorization)]

    async def close(self) -> None:
        await self._checker.close()

    @property
    def capacity(self) -> int:
        """Positions that one request may have, prompt and output together."""
        own, smallest = self._services.tokenizer.max_model_len, self._services.pool.capacity
        return own if smallest is None else min(own, smallest)

    def check_model(self, body: Body) -> None:
        """Raises ModelNotFound."""
        if body.model not in (None, self._model_name):
            raise ModelNotFound(f"there is no model {body.model!r} here", param="model")

    async def answer(
        self,
        body: ChatBody | CompletionBody,
        account: Account,
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
        if self.draining:
            raise ShuttingDown("the router is shutting down", retry_after=1)
        self.check_model(body)
        tokenizer = self._services.tokenizer
        if isinstance(body, ChatBody):
            field, prompts = "messages", [await chat_prompt(tokenizer, body, body.messages)]
        else:
            field, prompts = "prompt", await completion_prompts(tokenizer, body)
        jobs = make_jobs(
            body,
            prompts,
            field=field,
            capacity=self.capacity,
            sliding_window=self._services.pool.sliding_window,
            vocab_size=tokenizer.vocab_size,
            session=session,
            cache_salt=account.key.cache_salt,
            structure=await self._structure(body, account.key.name),
        )
        wanted = (seconds for seconds in (body.timeout, timeout) if seconds is not None)
        deadline = began + min(self._services.request_timeout, *wanted, math.inf)
        return Answer(
            self._services,
            body,
            prompts,
            jobs,
            account,
            name=name,
            deadline=deadline,
            traceparent=valid_traceparent(traceparent),
        )

    async def _structure(self, body: ChatBody | CompletionBody, key: str) -> Structure | None:
        """What workers are to enforce. Raises InvalidRequest."""
        if not isinstance(body, ChatBody) or not body.offered_tools:
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
