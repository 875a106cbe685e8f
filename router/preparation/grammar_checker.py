"""Compiles the grammar of a request before workers get it, so that an invalid one is refused at once.

The compiler is the workers' (llguidance), over an alphabet of single bytes, with tighter limits than theirs.
A grammar from a client may hang or crash it. Therefore it runs in a child process (`grammar_child`).
"""

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from baton.processes.sandbox.client import ForkServer
from baton.router.api.structured import Structure
from baton.router.child_pool import ChildPool
from baton.router.errors import InvalidRequest
from baton.router.preparation.demand import Question

_CACHED = 64
"""Valid demands that are remembered, the newest ones."""


_CHILDREN = 3
"""One of them stays free for keys with grammars that compile quickly, and one key has two at most."""


class Answer(NamedTuple):
    structure: Structure | None
    """What workers enforce, as they read it; None: nothing."""
    unenforced: tuple[str, ...] = ()
    """JSON pointers into the client's body: what is left to the model."""


decode = msgspec.msgpack.Decoder(Answer).decode


class GrammarChecker:
    """Has child processes, and remembers which demands were valid."""

    def __init__(self, server: ForkServer) -> None:
        self._valid: OrderedDict[bytes, Answer] = OrderedDict()
        self._children = ChildPool(server, "grammars", _CHILDREN, decode)

    async def check(self, question: Question, key: str) -> Answer:
        """`key` names the client's API key.

        Raises InvalidRequest and Unsupported naming the field, and ApiError when the child cannot start.
        """
        name = hashlib.blake2b(question.text).digest()
        if name not in self._valid:
            too_much = InvalidRequest.at(question.param, "too much to compile")
            self._valid[name], _ = await self._children.ask(key, question.text, too_much=too_much)
            if len(self._valid) > _CACHED:
                self._valid.popitem(last=False)
        return self._valid[name]

    async def close(self) -> None:
        await self._children.close()
