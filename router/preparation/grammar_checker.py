"""Compiles the grammar of a request before workers get it, so that an invalid one is refused at once.

The compiler is the workers' (llguidance), over an alphabet of single bytes, with tighter limits than theirs.
A grammar from a client may hang or crash it. Therefore it runs in a child process (`grammar_child`).
"""

import hashlib
from collections import OrderedDict

from baton.router.api.structured import MAX_LENGTH, Structure
from baton.router.child_pool import ChildPool, ForkServer
from baton.router.errors import InvalidRequest
from baton.router.preparation.demand import Demand

_CACHED = 64
"""Valid demands that are remembered, the newest ones."""


_CHILDREN = 3
"""One of them stays free for keys with grammars that compile quickly, and one key has two at most."""


class GrammarChecker:
    """Has child processes, and remembers which demands were valid."""

    def __init__(self, server: ForkServer) -> None:
        self._valid: OrderedDict[bytes, Structure | None] = OrderedDict()
        self._children = ChildPool(server, "grammars", _CHILDREN)

    async def check(self, demand: Demand, key: str) -> Structure | None:
        """Returns what workers enforce, as they read it; None: nothing. `key` names the client's API key.

        Raises InvalidRequest and Unsupported naming the field, and ApiError when the child cannot start.
        """
        answer = demand.answer
        if answer is not None and not 0 < len(answer.text) <= MAX_LENGTH:
            text = f"{answer.field}: must have 1 to {MAX_LENGTH} characters, not {len(answer.text)}"
            raise InvalidRequest(text, param=answer.field)
        name = hashlib.blake2b(demand.text).digest()
        if name not in self._valid:
            too_much = InvalidRequest(f"{demand.param}: too much to compile", param=demand.param)
            structure, _ = await self._children.ask(key, demand.text, too_much=too_much)
            self._valid[name] = structure and Structure(**structure)
            if len(self._valid) > _CACHED:
                self._valid.popitem(last=False)
        return self._valid[name]

    async def close(self) -> None:
        await self._children.close()
