"""The door that every face of the router shares: who may come in, under which name, and with what."""

import hashlib
import hmac
import os
import re

from router.api import Body, ChatBody, CompletionBody
from router.config import RouterConfig
from router.errors import ModelNotFound, ShuttingDown, Unauthorized
from router.jobs import chat_prompt, completion_prompts, make_jobs
from router.serving import Answer, Services

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
        self._keys = [hashlib.sha256(key.encode()).digest() for key in config.api_keys]

    def authorize(self, authorization: str) -> None:
        """Takes the value of that header. Raises Unauthorized."""
        if not self._keys:
            return
        scheme, _, key = authorization.partition(" ")
        sent = hashlib.sha256(key.strip().encode(errors="replace")).digest()
        # Every key is compared, so that the time says nothing about which.
        matches = [hmac.compare_digest(sent, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized("send a valid API key as `Authorization: Bearer KEY`")

    @property
    def capacity(self) -> int:
        """Positions that one request may have, prompt and output together."""
        own, smallest = self._services.tokenizer.max_model_len, self._services.pool.capacity
        return own if smallest is None else min(own, smallest)

    def check_model(self, body: Body) -> None:
        """Raises ModelNotFound."""
        if body.model not in (None, self._model_name):
            raise ModelNotFound(f"there is no model {body.model!r} here", param="model")

    async def answer(self, body: ChatBody | CompletionBody, name: str, session: str | None) -> Answer:
        """`name` is the request's id as its client knows it, `session` what it calls its conversation.

        Raises ApiError.
        """
        if self.draining:
            raise ShuttingDown("the router is shutting down", retry_after=1)
        self.check_model(body)
        tokenizer = self._services.tokenizer
        if isinstance(body, ChatBody):
            field, prompts = "messages", [await chat_prompt(tokenizer, body)]
        else:
            field, prompts = "prompt", await completion_prompts(tokenizer, body)
        jobs = make_jobs(
            body,
            prompts,
            field=field,
            capacity=self.capacity,
            vocab_size=tokenizer.vocab_size,
            session=session,
        )
        return Answer(self._services, body, prompts, jobs, name)
