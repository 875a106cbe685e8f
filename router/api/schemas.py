"""JSON schemas as clients write them."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
"""Keywords whose members are schemas under any name."""
_VALUES = {"enum", "const", "default", "examples"}
"""Keywords whose members are no schemas."""
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
"""Of a member of a list, in a reference (RFC 6901). No list is longer."""


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the schema and all schemas in it. What is no schema, such as a name or a value, is left out."""
    parts = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        if not isinstance(part, dict):
            continue
        yield part
        for name, value in part.items():
            if name in _MAPS and isinstance(value, dict):
                parts += value.values()
            elif name not in _VALUES:
                parts.append(value)


def target(root: Any, reference: str) -> Any:
    """Returns the place of a schema that a reference names (RFC 6901, as a fragment of a URI). None: there is
    none."""
    place = root
    for name in unquote(reference.removeprefix("#")).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list):
            place = place[int(name)] if _INDEX.fullmatch(name) and int(name) < len(place) else None
        else:
            place = place.get(name) if isinstance(place, dict) else None
    return place


def in_usual_form(schema: Any) -> Any:
    """Changes a schema to an equal one without what serializers of clients write, and returns it.

    A keyword that is null is absent: JSON Schema knows null only as a value. A property whose schema is true
    has an empty one, since chat templates read members of it.
    """
    for part in subschemas(schema):
        unset = [name for name, value in part.items() if value is None and name not in ("const", "default")]
        for name in unset:
            del part[name]
        properties = part.get("properties")
        if isinstance(properties, dict):
            properties.update({name: {} for name, value in properties.items() if value is True})
    return schema
