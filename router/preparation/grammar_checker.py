"""Compiles the grammar of a request before workers get it, so that an invalid one is refused at once.

The compiler is the workers' (llguidance), over an alphabet of single bytes, with tighter limits than theirs.
A grammar from a client may hang or crash it. Therefore it runs in a child process (`grammar_child`).
"""

import json
from collections import OrderedDict

from baton.router.api.structured import MAX_LENGTH, Structure
from baton.router.child_pool import ChildDied, ChildPool, ForkServer
from baton.router.errors import ApiError, InvalidRequest

_CACHED = 64
"""Valid structures that are remembered, the newest ones."""


class GrammarChecker:
    """Has a child process, and remembers which structures were valid."""

    def __init__(self, server: ForkServer) -> None:
        self._valid: OrderedDict[Structure, Structure] = OrderedDict()
        self._children = ChildPool(server, "grammars", 1)

    async def check(self, given: Structure, key: str) -> Structure:
        """Returns the structure with its text as workers read it. `key` names the client's API key.

        Raises InvalidRequest naming the field, and ApiError when the child cannot start.
        """
        if not 0 < len(given.text) <= MAX_LENGTH:
            text = f"{given.field}: must have 1 to {MAX_LENGTH} characters, not {len(given.text)}"
            raise InvalidRequest(text, param=given.field)
        if (checked := self._valid.get(given)) is None:
            error, text = await self._compile(given, key)
            if error is not None:
                reason = " ".join(error.removesuffix("<non-verbose/>").split())
                if given.kind == "json_schema":
                    reason = f"invalid {given.field.rpartition('.')[2]!r} schema: {reason}"
                raise InvalidRequest(f"{given.field}: {reason}", param=given.field)
            if len(text) > MAX_LENGTH:  # the child makes some texts longer
                raise InvalidRequest(f"{given.field}: too much to compile", param=given.field)
            checked = self._valid[given] = Structure(given.kind, text, given.field)
            if len(self._valid) > _CACHED:
                self._valid.popitem(last=False)
        return checked

    async def close(self) -> None:
        await self._children.close()

    async def _compile(self, given: Structure, key: str) -> tuple[str | None, str]:
        """Returns the compiler's error or None, and the text as workers read it."""
        request = json.dumps([given.kind, given.text]).encode()
        try:
            return json.loads(await self._children.call(key, request))
        except ChildDied as died:
            if not died.caused_by_request:
                raise ApiError(f"the router has no process to compile this grammar: {died}") from died
            return "too much to compile", ""
