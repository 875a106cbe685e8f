"""The opposite of a schema, where keywords that the compiler knows can say it."""

from collections.abc import Callable
from typing import Any

from baton.router.schemas.disjoint import TYPES, same
from baton.router.schemas.places import Places

_OPPOSITE_BOUNDS = {
    "minimum": "exclusiveMaximum", "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum", "exclusiveMaximum": "minimum",
}  # fmt: skip
_OPPOSITE_COUNTS = {
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
}  # fmt: skip
_DEPTH = 8
_STEPS = 2_000
_MAX_OPTIONS = 64


def any_of(options: list[Any]) -> Any:
    return options[0] if len(options) == 1 else {"anyOf": options} if options else False


class Negation:
    """Negates schemas of keywords that the compiler knows, with a bound for all steps together."""

    def __init__(self, places: Places, target: Callable[[str], Any]) -> None:
        """`target` returns what a reference names, in the same form. None: it has none."""
        self._places = places
        self._target = target
        self._left = _STEPS

    def of(self, schema: Any, beside: Any, depth: int = _DEPTH) -> Any:
        """Returns the schema of all other values; None: it cannot be said.

        `beside`: a schema that holds as well. If that lists the values, the others can be listed."""
        self._left -= 1
        if isinstance(schema, dict) and schema.keys() == {"$ref"}:
            return self.of(self._target(schema["$ref"]), beside, depth - 1) if depth else None
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or not depth or self._left < 0:
            return None
        options: list[Any] = []
        for keyword, value in schema.items():
            if (parts := self._parts(keyword, value, beside, depth - 1)) is None:
                return None
            options += [part for part in parts if part is not False]
            if len(options) > _MAX_OPTIONS:
                return None
        return True if True in options else any_of(options)

    def _parts(self, keyword: str, value: Any, beside: Any, depth: int) -> list[Any] | None:
        """Returns schemas, of which values that break a keyword have one. None: it cannot be said."""
        match keyword, value:
            case ("const", _) | ("enum", list()):
                return self._unlisted([value] if keyword == "const" else value, beside)
            case "required", list():
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties", dict():
                return self._wrong_members(value, beside, depth)
            case (("anyOf" | "allOf"), list()):
                parts = [self.of(each, beside, depth) for each in value]
                if any(part is None for part in parts):
                    return None
                return parts if keyword == "allOf" else [{"allOf": parts}]
        return _of_number(keyword, value)

    def _unlisted(self, listed: list[Any], beside: Any) -> list[Any] | None:
        domain = self._places.values(beside)
        if domain is None or len(domain) * len(listed) > _STEPS:
            return None
        rest = [each for each in domain if not any(same(each, one) for one in listed)]
        return [{"enum": rest}] if rest else []

    def _wrong_members(self, members: dict[str, Any], beside: Any, depth: int) -> list[Any] | None:
        inside = self._places.resolved(beside)
        known = inside.get("properties") if isinstance(inside, dict) else None
        options = []
        for name, member in members.items():
            near = known.get(name) if isinstance(known, dict) else None
            if (other := self.of(member, near, depth)) is None:
                return None
            if other is not False:
                options.append({"type": "object", "properties": {name: other}, "required": [name]})
        return options


def _of_number(keyword: str, value: Any) -> list[Any] | None:
    """As `Negation._parts`, for types and bounds."""
    if keyword == "type" and isinstance(value, str | list):
        types = [value] if isinstance(value, str) else value
        if "integer" in types and "number" not in types:
            return None
        return [{"type": others}] if (others := [kind for kind in TYPES if kind not in types]) else []
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if keyword in _OPPOSITE_BOUNDS:
        return [{"type": "number", _OPPOSITE_BOUNDS[keyword]: value}]
    if keyword in _OPPOSITE_COUNTS and value == int(value):
        kind, opposite, step = _OPPOSITE_COUNTS[keyword]
        return [{"type": kind, opposite: int(value) + step}] if value + step >= 0 else []
    return None
