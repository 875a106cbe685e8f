"""The tools that a model may call, by name."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from baton.router.api.messages import Function, Tool
from baton.router.tools.schema import Schema, Types, resolved, types_of


class OfferedTools:
    """The tools of one request. What a call looks up takes no longer with many tools or large schemas: each
    schema is looked at once."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = tools
        self._types: dict[str | None, dict[int, Types]] = {}  # of schemas by id, for each function
        self._sorted_keys: dict[str | None, list[str]] = {}  # of each function

    @cached_property
    def functions(self) -> dict[str | None, Function]:
        """By name. Of two with one name the first counts."""
        return {tool.function.name: tool.function for tool in reversed(self._tools)}

    def __contains__(self, name: object) -> bool:
        return name in self.functions

    def properties(self, name: str | None) -> Mapping[str, Any]:
        """The schemas of a function's parameters, as far as its schema names them."""
        parameters = self._parameters(name)
        schema = resolved(parameters, parameters)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return properties if isinstance(properties, Mapping) else {}

    def types(self, name: str | None, key: str) -> Types:
        """The JSON types that a parameter of a function may have."""
        memo = self._types.setdefault(name, {})
        return types_of(self.properties(name).get(key), self._parameters(name), memo)

    def keys(self, name: str | None, without: Iterable[str]) -> "Keys":
        """Those of a function's parameters that are not in `without`."""
        if name not in self._sorted_keys:
            self._sorted_keys[name] = sorted(self.properties(name))
        keys = Keys(self._sorted_keys[name])
        for key in without:
            keys.remove(key)
        return keys

    def _parameters(self, name: str | None) -> Schema:
        function = self.functions.get(name)
        return None if function is None else function.parameters


class Keys:
    """Keys of parameters, of which some are taken out."""

    def __init__(self, keys: Sequence[str]) -> None:
        """`keys`: sorted."""
        self._keys = list(keys)

    def __contains__(self, key: str) -> bool:
        at = bisect_left(self._keys, key)
        return at < len(self._keys) and self._keys[at] == key

    def remove(self, key: str) -> None:
        """Does nothing if it is not there."""
        at = bisect_left(self._keys, key)
        if at < len(self._keys) and self._keys[at] == key:
            del self._keys[at]

    def begins(self, text: str) -> bool:
        """Whether one of the keys begins with the text."""
        at = bisect_left(self._keys, text)
        return at < len(self._keys) and self._keys[at].startswith(text)
