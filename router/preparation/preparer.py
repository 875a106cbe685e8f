"""Prepares bodies: small ones at once, larger ones in child processes."""

import logging
import sys

from router.errors import ApiError, InvalidRequest
from router.preparation import child
from router.preparation.prepare import Kind, Prepared, Served, prepare
from router.preparation.wire import question_head, read_answer
from router.processes.children import ChildDied, Children
from router.text.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

SMALL_BYTES = 16 << 10
"""Takes some 10 ms at most. A child takes a fraction of a millisecond longer, so most requests stay here."""
LONG_BYTES = 256 << 10
"""May take half a second and more, up to the limit of a child."""
CHILDREN = 2
"""One for each kind: bodies above `LONG_BYTES`, and smaller ones, which may use both."""


class Preparer:
    """Owns the child processes."""

    def __init__(self, tokenizer: ModelTokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        command = [sys.executable, "-m", child.__name__, name]
        self._children = Children(command, CHILDREN, tokenizer.state, long_bytes=LONG_BYTES)

    async def prepare(self, kind: Kind, raw: bytes | bytearray, served: Served, key: str) -> Prepared | bytes:
        """As `prepare.prepare`; `key` names the client's key. Raises ApiError."""
        if len(raw) <= SMALL_BYTES:
            return prepare(kind, raw, self._tokenizer, served)
        try:
            return read_answer(await self._children.ask(key, question_head(kind, served), raw))
        except ChildDied as died:
            if died.blameless:
                raise ApiError(f"the router has no process to prepare this request: {died}") from died
            limits = f"{child.CPU_SECONDS} s or {child.MEMORY_BYTES >> 30} GiB"
            raise InvalidRequest(f"it takes more than {limits} to prepare this request") from died

    async def start(self) -> None:
        """Starts the children now, so that the first large request does not wait for it."""
        try:
            await self._children.start()
        except ChildDied as died:
            log.warning("a process that prepares large requests did not start: %s", died)

    async def close(self) -> None:
        await self._children.close()
