"""What a tool's schema says of its arguments, for formats that write them one by one and not as JSON."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from baton.router.api.schemas import subschemas, target

Schema = Mapping[str, Any] | bool | None
Types = frozenset[str]
JSON_TYPES: Types = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_DEPTH = 16
"""References and combinations that are followed. A schema that is deeper may have values of all types."""
_OF_PLACES = {"$id", "$dynamicRef", "$recursiveRef"}
"""Keywords that change what a reference means."""
_PLAIN = re.compile(r"#/(\$defs|definitions)/[^/~%]+")


def resolved(schema: Schema, root: Schema) -> Schema:
    """Follows the references of a schema to other places of `root`."""
    for _ in range(_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = target(root, schema["$ref"])
    return None


def unknown_reference(root: Any) -> str | None:
    """Returns what of the references in a schema may mean another place for others than for `resolved`; None:
    nothing does."""
    for part in subschemas(root):
        if names := part.keys() & (_OF_PLACES if part is not root else _OF_PLACES - {"$id"}):
            return min(names)
        if "$ref" in part and not (isinstance(part["$ref"], str) and _PLAIN.fullmatch(part["$ref"])):
            return f"$ref like {str(part['$ref'])[:40]!r}"
    return None


def conjuncts(schema: Schema, root: Schema, depth: int = _DEPTH) -> Iterator[Mapping[str, Any]]:
    """Yields schemas that all must hold: a schema, what it refers to, and the members of its allOf."""
    if not isinstance(schema, Mapping) or not depth:
        return
    yield schema
    schemas = schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    schemas = [*schemas, target(root, schema["$ref"])] if isinstance(schema.get("$ref"), str) else schemas
    for other in schemas:
        yield from conjuncts(other, root, depth - 1)


def types_of(schema: Schema, root: Schema, memo: dict[int, Types], depth: int = _DEPTH) -> Types:
    """Returns the JSON types that values of a schema may have.

    `memo`: the result for each schema of `root` that was looked at, by id. So none is looked at twice."""
    if not isinstance(schema, Mapping) or not depth:
        return JSON_TYPES
    if id(schema) in memo:
        return memo[id(schema)]
    types = memo[id(schema)] = JSON_TYPES
    if isinstance(schema.get("$ref"), str):
        types &= types_of(target(root, schema["$ref"]), root, memo, depth - 1)
    named = schema.get("type")
    if isinstance(named, str | list):
        types &= frozenset([named] if isinstance(named, str) else filter(None, map(str, named)))
    for values in allowed_values(schema):
        types &= frozenset(map(_type_of, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            types &= frozenset().union(*(types_of(each, root, memo, depth - 1) for each in schema[name]))
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            types &= types_of(each, root, memo, depth - 1)
    memo[id(schema)] = types
    return types


def allowed_values(schema: Mapping[str, Any]) -> list[list[Any]]:
    """The lists of values that a schema names itself. A value is in each of them."""
    lists = [schema.get("enum"), [schema["const"]] if "const" in schema else None]
    return [values for values in lists if isinstance(values, list)]


def as_json(text: str, types: Types) -> str:
    """Returns the JSON of a value that the model wrote as a bare string, as JSON, or as in Python."""
    if types != {"string"}:
        for reader in (_read_json, _read_python):
            try:
                written, value = reader(text.strip())
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                continue
            kind = _type_of(value)
            integral = isinstance(value, float) and value.is_integer() and "integer" in types
            if kind != "string" and (kind in types or (kind == "integer" and "number" in types) or integral):
                return written
    return json.dumps(text, ensure_ascii=False)


def _read_json(text: str) -> tuple[str, Any]:
    return text, json.loads(text, parse_constant=_refuse)


def _read_python(text: str) -> tuple[str, Any]:
    value = ast.literal_eval(text)
    return json.dumps(value, allow_nan=False), value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and Infinity are not JSON


def _type_of(value: Any) -> str:
    return _OF_VALUE.get(type(value), "null" if value is None else "array")
