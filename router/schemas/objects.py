"""Rules for keywords of objects."""

from typing import Any

from baton.router.schemas.disjoint import types_of
from baton.router.schemas.negation import any_of
from baton.router.schemas.places import token
from baton.router.schemas.walk import (
    CONDITIONAL,
    MAX_DEPTH,
    MAX_FORMS,
    MAX_NAMES,
    Node,
    Walk,
    both,
    count_of,
    members,
    strings,
)

_OF_STRINGS = {"const", "enum", "pattern", "minLength", "maxLength", "format", "$ref", "anyOf", "allOf"}


def property_names(walk: Walk, node: Node, keyword: str) -> bool:
    """Names of an enum are `properties`; those of a pattern or a length are `patternProperties`."""
    place = f"{node.pointer}/{keyword}"
    names = walk.exact(walk.places.resolved(node.old[keyword]), place, node.depth + 1)
    if isinstance(names, bool):
        names = {} if names else {"enum": []}
    if names is None:
        return False
    limits = {name: value for name, value in names.items() if name in _OF_STRINGS}
    if not limits and "string" in types_of(names):
        return True
    if "patternProperties" in node.old:
        return False
    listed, known = _listed(walk, names, limits), node.members
    more = node.new.get("additionalProperties", True)
    if listed is not None and len(listed) <= MAX_NAMES:
        kept = {name: each if name in listed else False for name, each in known.items()}
        node.new["properties"] = kept | {name: more for name in listed if name not in known}
    elif not known and limits.keys() == {"pattern"}:
        node.new["patternProperties"] = {limits["pattern"]: more}
    elif not known and limits.keys() <= {"minLength", "maxLength"}:
        least, most = (count_of(limits.get(name, 0)) for name in ("minLength", "maxLength"))
        if least is None or most is None:
            return False
        bounds = f"{least},{most if 'maxLength' in limits else ''}"
        node.new["patternProperties"] = {f"^[\\s\\S]{{{bounds}}}$": more}
    else:
        return False
    node.new["additionalProperties"] = False
    return True


def _listed(walk: Walk, names: dict[str, Any], limits: dict[str, Any]) -> dict[str, None] | None:
    """Returns the names of members that a schema lists. None: it does not list them all."""
    if "string" not in types_of(names):
        return {}
    if len(limits) != 1 or not all(
        isinstance(each, dict) and each.keys() <= {"type", "const", "enum"} and "string" in types_of(each)
        for each in limits.get("anyOf", ())
    ):
        return None
    values = walk.places.values(names)
    return None if values is None else dict.fromkeys(strings(values))


def unevaluated_properties(walk: Walk, node: Node, keyword: str) -> bool:
    """It is `additionalProperties` of a schema that has all properties of its parts."""
    value = node.old[keyword]
    if "additionalProperties" in node.old or value is True:
        return True
    known = _evaluated(walk, node.old, node.depth)
    if known is None:
        return False
    if known is not True:
        if known:
            node.new["properties"] = {**dict.fromkeys(known, True), **node.members}
        place = f"{node.pointer}/{keyword}"
        node.new["additionalProperties"] = walk.schema(value, place, node.depth + 1)
    return True


def _evaluated(walk: Walk, schema: dict[str, Any], depth: int) -> dict[str, None] | bool | None:
    """Returns the names of properties that a schema evaluates beside its patterns.

    True: all. None: it depends on the value."""
    if depth > MAX_DEPTH or not walk.may_look() or schema.keys() & CONDITIONAL:
        return None
    names = dict.fromkeys(members(schema.get("properties")))
    parts = list(schema["allOf"]) if isinstance(schema.get("allOf"), list) else []
    parts += [walk.places.target(schema["$ref"])] if "$ref" in schema else []
    for part in parts:
        if isinstance(part, bool):
            continue
        if not isinstance(part, dict) or "patternProperties" in part:
            return None
        if part.keys() & {"additionalProperties", "unevaluatedProperties"}:
            return True
        inner = _evaluated(walk, part, depth + 1)
        if inner is None or isinstance(inner, bool):
            return inner
        names |= inner
    return names if len(names) <= MAX_NAMES else None


def counts(walk: Walk, node: Node, keyword: str) -> bool:
    """The compiler counts no optional properties, but knows of one in an object without others."""
    count = count_of(node.old[keyword])
    if count is None:
        return True  # the compiler says what is wrong with it
    least = keyword == "minProperties"
    known, required = node.members, set(node.required)
    if count <= len(required) if least else node.is_closed and len(known.keys() | required) <= count:
        del node.new[keyword]
        return True
    free = [name for name, each in known.items() if name not in required and each is not False]
    one_more = least and count == len(required) + 1 and "maxProperties" not in node.old
    if one_more and not node.is_closed and 0 < len(free) <= MAX_FORMS and walk.may_branch(node):
        del node.new[keyword]
        options: list[Any] = [{"type": "object", "required": [name]} for name in free]
        none = dict.fromkeys(free, False)
        options.append({"type": "object", "properties": none, "minProperties": count})
        if other := sorted(types_of(node.old) - {"object"}):
            options.append({"type": other})
        node.also.append(any_of(options))
        return True
    if "counts" in walk.without:
        del node.new[keyword]
        return False
    # llguidance 1.9.1 counts a name that is not in `properties` again if the object repeats it.
    return not least or node.is_closed or count <= len(required) + 1


def dependent(walk: Walk, node: Node, keyword: str) -> bool:
    """An object lacks the one member, or has the others."""
    complete, only_objects = isinstance(node.old[keyword], dict), types_of(node.old) == {"object"}
    for name, needs in members(node.old[keyword]).items():
        if isinstance(needs, list):
            missing = [each for each in strings(needs) if each != name and each not in node.required]
            then: Any = {"required": missing} if missing else True
        else:
            then = walk.schema(needs, f"{node.pointer}/{keyword}/{token(name)}", node.depth + 1)
        if isinstance(needs, list) != (keyword == "dependentRequired") and keyword != "dependencies":
            complete = False
        elif then in (True, {}) or _never(node, name):
            continue
        elif name in node.required and (only_objects or isinstance(needs, list)):
            node.also.append(then)
        elif walk.may_branch(node):
            node.also.append(any_of([{"properties": {name: False}}, *_with(name, then)]))
        else:
            complete = False
    return complete


def _with(name: str, then: Any) -> list[Any]:
    """Returns the schema of objects that have a member and a schema; none if no value has it."""
    if isinstance(then, dict) and then.keys() == {"required"}:
        return [{"required": [name, *then["required"]]}]
    schema = both({"required": [name]}, then)
    return [] if schema is False else [schema]


def _never(node: Node, name: str) -> bool:
    """No object has this member."""
    return node.members[name] is False if name in node.members else node.is_closed


def merge_patterns(walk: Walk, node: Node) -> bool:
    """Merges a pattern that matches in named properties alone into those: the compiler would offer another
    name, and find none."""
    patterns = node.new["patternProperties"]
    if not isinstance(patterns, dict):
        return True
    if "patternProperties" in walk.without and (
        len(patterns) > 1 or not all(map(walk.probe.takes_pattern, patterns))
    ):
        del node.new["patternProperties"]
        node.new.pop("additionalProperties", None)
        return False
    names = [*dict.fromkeys([*node.members, *node.required])]
    for pattern in list(patterns) if names else ():
        if not walk.may_look() or walk.probe.others(pattern, names):
            continue
        value, known = patterns.pop(pattern), node.members
        matching = {name: both(known.get(name, True), value) for name in walk.probe.matching(pattern, names)}
        node.new["properties"] = known | matching
    if not patterns:
        del node.new["patternProperties"]
    return True
