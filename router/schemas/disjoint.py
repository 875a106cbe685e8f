"""Proves that no value has two schemas at once, so that `oneOf` of them is the same as `anyOf`."""

import json
from collections.abc import Iterator
from typing import Any

from baton.router.schemas.places import Places

TYPES = ("null", "boolean", "string", "array", "object", "number")
_ALL = frozenset(TYPES)
_STEPS = 4_000
_DEPTH = 12
_BOUNDS = {
    "number": ("minimum", "maximum"), "string": ("minLength", "maxLength"), "array": ("minItems", "maxItems"),
}  # fmt: skip


class Proof:
    """Proofs for one schema, with a bound for all their steps together."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._left = _STEPS

    def disjoint(self, branches: list[Any], types: frozenset[str] = _ALL) -> bool:
        """Whether each two of the branches exclude each other, for values of these types. False: unknown."""
        pairs = ((a, b) for i, a in enumerate(branches) for b in branches[i + 1 :])
        return all(self._apart(a, b, types, _DEPTH) for a, b in pairs)

    def _apart(self, a: Any, b: Any, types: frozenset[str], depth: int) -> bool:
        self._left -= 1
        if self._left < 0 or not depth:
            return False
        if a is False or b is False:
            return True
        for one, other in ((a, b), (b, a)):
            for part in self._parts(one, _DEPTH):
                options = part.get("anyOf", part.get("oneOf"))
                if isinstance(options, list) and all(
                    self._apart(option, other, types, depth - 1) for option in options
                ):
                    return True
        return any(
            self._excludes(x, y, types, depth) for x in self._parts(a, _DEPTH) for y in self._parts(b, _DEPTH)
        )

    def _parts(self, schema: Any, depth: int) -> Iterator[dict[str, Any]]:
        """Yields schemas that all must hold."""
        if not isinstance(schema, dict) or not depth or self._left < 0:
            return
        self._left -= 1
        yield schema
        if "$ref" in schema:
            yield from self._parts(self._places.target(schema["$ref"]), depth - 1)
        for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            yield from self._parts(each, depth - 1)

    def _excludes(self, a: dict[str, Any], b: dict[str, Any], types: frozenset[str], depth: int) -> bool:
        listed = [values for each in (a, b) if (values := _values(each)) is not None]
        if len(listed) == 2 and not listed[0] & listed[1]:
            return True
        common = types & types_of(a) & types_of(b)
        return all(
            self._objects(a, b, depth)
            if kind == "object"
            else kind in _BOUNDS and _beyond(a, b, *_BOUNDS[kind])
            for kind in common
        )

    def _objects(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        """Whether a member that an object must have cannot have both schemas."""
        names = [name for each in (a, b) for name in _list(each, "required") if isinstance(name, str)]
        return any(self._apart(_member(a, name), _member(b, name), _ALL, depth - 1) for name in names)


def types_of(schema: dict[str, Any]) -> frozenset[str]:
    """Returns the types that a schema names itself, with number for integer."""
    named = schema.get("type")
    types = _ALL
    if isinstance(named, str | list):
        names = [named] if isinstance(named, str) else named
        types &= frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))
    if (values := _values(schema)) is not None:
        types &= frozenset(kind for kind, _ in values)
    return types


def _values(schema: dict[str, Any]) -> set[tuple[str, str]] | None:
    """Returns the values that a schema lists, with their types. None: it lists none."""
    if "const" in schema:
        return {_kinded(schema["const"])}
    return set(map(_kinded, schema["enum"])) if isinstance(schema.get("enum"), list) else None


def _kinded(value: Any) -> tuple[str, str]:
    match value:
        case None:
            return "null", ""
        case bool():
            return "boolean", str(value)
        case int() | float():
            return "number", str(float(value)) if abs(value) < 2**53 else ""  # larger ones may be equal
        case str():
            return "string", value
        case list():
            return "array", ""  # no proof needs more
        case _:
            return "object", ""


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _member(schema: dict[str, Any], name: str) -> Any:
    """Returns the schema of a member of an object."""
    members = schema.get("properties")
    if isinstance(members, dict) and name in members:
        return members[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _beyond(a: dict[str, Any], b: dict[str, Any], least: str, most: str) -> bool:
    """Whether the bounds of two schemas leave no number between them."""
    for one, other in ((a, b), (b, a)):
        low, high = one.get(least), other.get(most)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            return True
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in JSON."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    return a == b if _is_number(a) and _is_number(b) else json.dumps(a) == json.dumps(b)
