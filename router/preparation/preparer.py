"""Prepares bodies: small ones on the event loop, larger ones in child processes."""

import logging
import sys

from baton.router.admission.keys import ApiKey
from baton.router.child_pool import ChildDied, ChildPool
from baton.router.errors import ApiError, InvalidRequest
from baton.router.preparation import child
from baton.router.preparation.child import read_reply, request_head
from baton.router.preparation.prepare import Kind, Prepared, Served, prepare
from baton.router.text.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

SMALL_BYTES = 16 << 10
"""A body up to this size takes 10 ms at most. The event loop prepares it, which saves the way to a child."""
LONG_BYTES = 256 << 10
"""A body above this size may take half a second or more."""
CHILDREN = 2
"""At most one of them works on a body above `LONG_BYTES`, so the other stays free for smaller bodies."""


class Preparer:
    """Owns the child processes."""

    def __init__(self, tokenizer: ModelTokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        command = [sys.executable, "-m", child.__name__, name]
        self._children = ChildPool(command, CHILDREN, tokenizer.state, long_bytes=LONG_BYTES)

    async def prepare(
        self, kind: Kind, raw: bytes | bytearray, served: Served, key: ApiKey, history: bytes = b""
    ) -> Prepared | bytes:
        """Does the same as `prepare.prepare`. `key` is the client's. Raises ApiError."""
        if len(raw) + len(history) <= SMALL_BYTES:
            return prepare(kind, raw, self._tokenizer, served, history, key.cache_salt)
        head = request_head(kind, served, history, key.cache_salt)
        try:
            return read_reply(await self._children.call(key.name, head, raw))
        except ChildDied as died:
            if not died.caused_by_request:
                raise ApiError(f"the router has no process to prepare this request: {died}") from died
            limits = f"{child.CPU_SECONDS} s or {child.MEMORY_BYTES >> 30} GiB"
            raise InvalidRequest(f"the preparation of this request takes more than {limits}") from died

    async def start(self) -> None:
        """Starts the children, so that the first large body does not wait for it."""
        try:
            await self._children.start()
        except ChildDied as died:
            log.warning("a process that prepares large requests did not start: %s", died)

    async def close(self) -> None:
        await self._children.close()
