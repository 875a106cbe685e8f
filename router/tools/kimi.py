"""Calls of Kimi K2, whose ids name their functions."""

import json
import re
from collections.abc import Sequence

from baton.router.api.messages import Function
from baton.router.tools.offered import OfferedTools
from baton.router.tools.readers import NAME, NamedCallReader
from baton.router.tools.schema import resolved

_HEAD = re.compile(r"(?P<id>[^<>{}\"]+)(<\|tool_call_argument_begin\|>\s*+)?+")
_ID = re.compile(rf"(functions\.)?{NAME}:(?P<number>\d+)")
_PREFIX, _SUFFIX = re.compile(r"^(functions?|tools?)[._:/-]"), re.compile(r"[._:#-]?\d+$")


class KimiReader(NamedCallReader):
    """Reads functions.NAME:NUMBER, which is the id of the call, and its arguments.

    Behind ids of another kind in its history the model writes such ids. Most still have the name of the tool.
    If not, the tool is the only one that takes these arguments. A name of no tool stays as it is. Clients
    get an id of the model's own kind.
    """

    def __init__(self, opening: str, tools: OfferedTools, ends: Sequence[str]) -> None:
        super().__init__(_HEAD, opening, tools, ends)
        self._number: int | None = None  # of the call, as its id says

    def _name(self, head: re.Match[str]) -> None:
        call_id = head["id"].strip()
        id_match = _ID.fullmatch(call_id)
        if id_match and self._offered(id_match["name"]):
            self.name, self.call_id = id_match["name"], call_id
            return
        if number := re.search(r"\d+$", call_id):
            self._number = int(number[0])
        short = _PREFIX.sub("", call_id)
        names = call_id, short, _SUFFIX.sub("", call_id), _SUFFIX.sub("", short)
        unknown = id_match and id_match["name"]
        self._identify(next((name for name in names if self._offered(name)), unknown))

    def _identify(self, name: str | None) -> None:
        self.name = name
        if name is not None and self._number is not None:
            self.call_id = f"functions.{name}:{self._number}"

    def _new(self, arguments: str) -> str:
        if self.name is None and self._arguments is not None and self._arguments.done:
            self._identify(self._only_fit("".join([*self._early, arguments])))
        return super()._new(arguments)

    def _without_arguments(self, head: str) -> str:
        text = super()._without_arguments(head)
        if not text and self.name is None and _HEAD.fullmatch(head):
            self._identify(self._only_fit("{}"))
            self.begun = self.name is not None
        return "{}" if self.begun else ""

    def _only_fit(self, arguments: str) -> str | None:
        """Returns the only tool that takes these arguments."""
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        fits = [each.name for each in self._tools.functions.values() if _takes(each, values)]
        return fits[0] if len(fits) == 1 else None


def _takes(function: Function, arguments: dict[str, object]) -> bool:
    schema = resolved(function.parameters, function.parameters)
    schema = schema if isinstance(schema, dict) else {}
    properties, required = schema.get("properties"), schema.get("required")
    required_keys = required if isinstance(required, list) else []
    allowed = properties if isinstance(properties, dict) else arguments
    return all(key in arguments for key in required_keys) and all(key in allowed for key in arguments)
