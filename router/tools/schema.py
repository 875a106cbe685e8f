"""What a tool's schema says of its arguments, for formats that write them one by one and not as JSON."""

import ast
import json
from collections.abc import Mapping
from typing import Any, NoReturn

Schema = Mapping[str, Any] | bool | None
Types = frozenset[str]
JSON_TYPES: Types = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_OF_VALUE = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_DEPTH = 16
"""References and combinations that are followed. A schema that is deeper may have values of all types."""


def resolved(schema: Schema, root: Schema) -> Schema:
    """Follows the references of a schema to other places of `root`."""
    for _ in range(_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        place: Any = root
        for name in schema["$ref"].removeprefix("#").split("/")[1:]:
            place = (
                place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
            )
        schema = place
    return None


def types_of(schema: Schema, root: Schema, known: dict[int, Types], depth: int = _DEPTH) -> Types:
    """Returns the JSON types that values of a schema may have.

    `known`: the result for each schema of `root` that was looked at, by id. So none is looked at twice."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return JSON_TYPES
    if id(schema) in known:
        return known[id(schema)]
    types = known[id(schema)] = JSON_TYPES
    named = schema.get("type")
    if isinstance(named, str | list):
        types = frozenset([named] if isinstance(named, str) else filter(None, map(str, named)))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        types &= frozenset(map(_type_of, values))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            types &= frozenset().union(*(types_of(each, root, known, depth - 1) for each in schema[name]))
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            types &= types_of(each, root, known, depth - 1)
    known[id(schema)] = types
    return types


def as_json(text: str, types: Types) -> str:
    """Returns the JSON of a value that the model wrote as a bare string, as JSON, or as in Python."""
    if types != {"string"}:
        for read in (_read_json, _read_python):
            try:
                written, value = read(text.strip())
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
