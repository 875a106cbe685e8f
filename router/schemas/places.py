"""The places of a schema, and references to them."""

from typing import Any

from baton.router.api.schemas import subschemas, target

_HOPS = 16
"""References that are followed one after another."""
_DYNAMIC = {"$dynamicRef", "$recursiveRef"}


def token(name: str) -> str:
    """Returns a name as a token of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


class Places:
    """Finds the places of one schema that references name."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.plain = not any(_is_special(part, root) for part in subschemas(root))
        """References are pointers into this schema, and nothing changes their meaning."""

    def target(self, reference: Any) -> Any:
        """Returns the place that a reference names. None: it is unknown."""
        return target(self._root, reference) if self.plain and isinstance(reference, str) else None

    def resolved(self, schema: Any) -> Any:
        """Follows references that stand alone. None: the place is unknown."""
        for _ in range(_HOPS):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                return schema
            schema = self.target(schema["$ref"])
        return None

    def values(self, schema: Any) -> list[Any] | None:
        """Returns all values that may have a schema, if it lists them. None: it does not."""
        schema = self.resolved(schema)
        if not isinstance(schema, dict):
            return None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return schema["enum"]
        if schema.get("type") in ("boolean", "null"):
            return [True, False] if schema["type"] == "boolean" else [None]
        lists = [self.values(each) for each in schema["anyOf"]] if _is_flat(schema.get("anyOf")) else [None]
        return None if any(each is None for each in lists) else [v for each in lists for v in each or ()]


def _is_flat(options: Any) -> bool:
    """The options list values without further options, so that none is looked at twice."""
    return (
        isinstance(options, list)
        and bool(options)
        and all(isinstance(each, dict) and "anyOf" not in each and "$ref" not in each for each in options)
    )


def _is_special(part: dict[str, Any], root: Any) -> bool:
    reference = part.get("$ref", "#")
    is_pointer = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    return not is_pointer or bool(_DYNAMIC & part.keys()) or ("$id" in part and part is not root)
