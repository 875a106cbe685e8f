"""Turns a JSON schema of draft 2020-12 into one of keywords that the grammar compiler knows.

Three things come of a keyword. It has an equal form, which takes its place (`oneOf` of branches that exclude
each other is `anyOf`). It has no effect, and is left out (`uniqueItems: false`). Or it cannot be enforced: it
is left out too, and its place is returned. So each value of the schema has the new schema, and without such
places each value of the new schema has the old one.

The work is bounded by the constants of `walk`, and by the steps of `disjoint` and `negation`.
"""

from typing import Any, NamedTuple

from baton.router.schemas import combinations, numbers, objects
from baton.router.schemas.disjoint import types_of
from baton.router.schemas.lookahead import LOOK, without_lookahead
from baton.router.schemas.places import token
from baton.router.schemas.probe import Probe
from baton.router.schemas.walk import MAX_DEPTH, Node, Rule, Walk, members

_KEPT = {
    "type", "const", "enum", "required", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "minProperties", "maxProperties", "$id",
    "$anchor", "$dynamicAnchor", "x-guidance",
}  # fmt: skip
"""Keywords without schemas inside that the compiler enforces. Others that are not below are annotations."""
_ONE = ("items", "additionalProperties")
_LISTS = ("allOf", "anyOf", "prefixItems")
_NAMED = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_OF_DRAFT_3 = {"divisibleBy", "extends", "disallow"}
_RULES: dict[str, tuple[Rule, str]] = {
    "unevaluatedProperties": (objects.unevaluated_properties, "object"),
    "unevaluatedItems": (combinations.unevaluated_items, "array"),
    "propertyNames": (objects.property_names, "object"),
    "uniqueItems": (combinations.unique_items, "array"),
    "contains": (combinations.contains, "array"),
    "not": (combinations.not_, ""),
    "oneOf": (combinations.one_of, ""),
    "if": (combinations.if_, ""),
    "dependentRequired": (objects.dependent, "object"),
    "dependentSchemas": (objects.dependent, "object"),
    "dependencies": (objects.dependent, "object"),
    "minProperties": (objects.counts, "object"),
    "maxProperties": (objects.counts, "object"),
    "minimum": (numbers.bounds, "number"),
    "maximum": (numbers.bounds, "number"),
    "exclusiveMinimum": (numbers.bounds, "number"),
    "exclusiveMaximum": (numbers.bounds, "number"),
    "const": (numbers.listed, ""),
    "enum": (numbers.listed, ""),
    "$dynamicRef": (lambda *_: False, ""),
    "$recursiveRef": (lambda *_: False, ""),
}
"""By keyword the rule, in order, and the only type of which the keyword says something."""


class Rewritten(NamedTuple):
    schema: Any
    unenforced: tuple[str, ...]
    """JSON pointers of keywords in the schema that was given."""
    has_forms: bool
    """Some equal forms have alternatives."""


def rewritten(schema: Any, probe: Probe, without: frozenset[str] = frozenset()) -> Rewritten:
    """Raises ValueError for a schema of an earlier draft, or one that is too deep.

    `without`: what is not to be used. "forms": equal forms with alternatives. "forms of the whole": those of
    the outermost schema. "pattern", "patternProperties", "counts", "bounds": what the compiler does not take
    of them.
    """
    rewriter = _Rewriter(schema, probe, without)
    return Rewritten(rewriter.whole(), tuple(dict.fromkeys(rewriter.unenforced)), rewriter.forms > 0)


class _Rewriter(Walk):
    def __init__(self, root: Any, probe: Probe, without: frozenset[str]) -> None:
        super().__init__(root, probe, without)
        self._new_references: dict[str, str] = {}
        self._wanted: list[tuple[str, str, Any, str]] = []
        """Container, name, schema and pointer of definitions."""

    def whole(self) -> Any:
        new = self.schema(self.root, "", 0)
        if not isinstance(new, dict):
            return {} if new is True else new
        if not self.places.plain:
            for container in _DEFINITIONS:
                for name, value in members(self.root.get(container)).items():
                    self._wanted.append((container, name, value, f"/{container}/{token(name)}"))
        for container, name, value, pointer in self._wanted:  # they may want more
            new.setdefault(container, {})[name] = self.schema(value, pointer, 1)
        return new  # without definitions that no reference reaches

    def schema(self, schema: Any, pointer: str, depth: int) -> Any:
        if not isinstance(schema, dict):
            return schema
        if depth > MAX_DEPTH:
            raise ValueError(f"schemas are nested more than {MAX_DEPTH} deep")
        node = Node(schema, pointer, depth)
        for keyword, value in schema.items():
            _check_draft(keyword, value, schema)
            self._keyword(node, keyword, value)
        for keyword, (rule, kind) in _RULES.items():
            has_effect = keyword in schema and (not kind or kind in types_of(schema))
            if has_effect and not rule(self, node, keyword):
                self._left_out(node, keyword)
        if "patternProperties" in node.new and not objects.merge_patterns(self, node):
            self._left_out(node, "patternProperties")
        target = self.places.target(node.new["$ref"]) if "$ref" in node.new else None
        if isinstance(target, dict) and "type" in node.new and target.get("type") == node.new["type"]:
            del node.new["type"]  # the compiler takes nothing beside a reference of a schema to itself
        return _joined(node)

    def _keyword(self, node: Node, keyword: str, value: Any) -> None:
        """Rewrites what the compiler knows itself."""
        place, new = f"{node.pointer}/{token(keyword)}", node.new
        if keyword == "$ref":
            new[keyword] = self._reference(value)
        elif keyword == "format":
            if not isinstance(value, str) or self.probe.knows_format(value):
                new[keyword] = value  # others are annotations
        elif keyword == "pattern":
            self._pattern(node, value)
        elif keyword == "items" and isinstance(value, list):  # as earlier drafts have it
            new["prefixItems"] = self._list(value, place, node.depth)
            more, place = node.old.get("additionalItems", True), f"{node.pointer}/additionalItems"
            new["items"] = self.schema(more, place, node.depth + 1)
        elif keyword in _ONE:
            new[keyword] = self.schema(value, place, node.depth + 1)
        elif keyword in _NAMED and isinstance(value, dict):
            new[keyword] = {
                name: self.schema(each, f"{place}/{token(name)}", node.depth + 1)
                for name, each in value.items()
            }
        elif keyword in _LISTS and isinstance(value, list):
            new[keyword] = self._list(value, place, node.depth)
        elif keyword in _KEPT or keyword in _NAMED or keyword in _LISTS:
            new[keyword] = value  # the compiler says what is wrong with it

    def _list(self, schemas: list[Any], place: str, depth: int) -> list[Any]:
        return [self.schema(each, f"{place}/{i}", depth + 1) for i, each in enumerate(schemas)]

    def _pattern(self, node: Node, value: Any) -> None:
        if isinstance(value, str) and any(look in value for look in LOOK):
            if (schemas := without_lookahead(value)) is None:
                self._left_out(node, "pattern")
            else:
                # Parts that the compiler does not take are known when the whole is tried.
                taken = [each for each in schemas if self._is_taken(each.get("pattern"))]
                node.also += taken
                if len(taken) < len(schemas):
                    self._left_out(node, "pattern")
        elif self._is_taken(value):
            node.new["pattern"] = value
        else:
            self._left_out(node, "pattern")

    def _is_taken(self, pattern: Any) -> bool:
        return (
            "pattern" not in self.without or not isinstance(pattern, str) or self.probe.takes_pattern(pattern)
        )

    def _left_out(self, node: Node, keyword: str) -> None:
        self.unenforced.append(f"{node.pointer}/{token(keyword)}")

    def _reference(self, reference: Any) -> Any:
        if not self.places.plain or reference in ("#", "#/"):
            return reference
        target = self.places.target(reference)
        if not isinstance(target, dict | bool):
            return reference  # the compiler says what is wrong with it
        if reference not in self._new_references:
            pointer = reference.removeprefix("#")
            container, _, name = pointer[1:].partition("/")
            if container not in _DEFINITIONS or any(character in name for character in "/~%"):
                # Its place may be another one in the new schema.
                container, name = "$defs", f"moved-{len(self._wanted)}"
                while name in members(self.root.get("$defs")):
                    name += "-"
            self._new_references[reference] = f"#/{container}/{name}"
            self._wanted.append((container, name, target, pointer))
        return self._new_references[reference]


def _check_draft(keyword: str, value: Any, schema: dict[str, Any]) -> None:
    """Raises ValueError for keywords of earlier drafts that would be ignored."""
    bound = keyword.removeprefix("exclusive").lower()
    if keyword in ("exclusiveMinimum", "exclusiveMaximum") and value is True and bound not in schema:
        raise ValueError(f"{keyword} must be a number")
    if keyword in _OF_DRAFT_3 or (keyword == "required" and isinstance(value, bool)):
        raise ValueError(f"{keyword} is of draft 3 of JSON Schema, which is not supported")


def _joined(node: Node) -> Any:
    """Returns a schema with those that hold as well, behind its own keywords."""
    new = node.new
    for each in node.also:
        if each is False:
            return False
        if each in (True, {}):
            continue
        if each.keys() <= {"anyOf", "pattern", "minLength"} and each.keys().isdisjoint(new):
            new |= each
        elif "allOf" not in new:
            new["allOf"] = [each]
        else:  # the properties keep their order
            outer = {"x-guidance": new.pop("x-guidance")} if "x-guidance" in new else {}
            new = {**outer, "allOf": [new, each]}
    return new
