"""Rules for keywords of arrays, and for those that combine schemas."""

from typing import Any

from baton.router.schemas.disjoint import types_of
from baton.router.schemas.negation import any_of
from baton.router.schemas.walk import CONDITIONAL, MAX_TOGETHER, Node, Walk, both, count_of


def unique_items(walk: Walk, node: Node, keyword: str) -> bool:
    most = count_of(node.old.get("maxItems"))
    return node.old[keyword] is False or (most is not None and most <= 1)


def contains(walk: Walk, node: Node, keyword: str) -> bool:
    """Any items: their number is bounded."""
    least, most = node.old.get("minContains", 1), node.old.get("maxContains")
    if least == 0 and most is None:
        return True
    if node.old[keyword] not in (True, {}):
        return False
    node.also.append({"minItems": least} if most is None else {"minItems": least, "maxItems": most})
    return True


def unevaluated_items(walk: Walk, node: Node, keyword: str) -> bool:
    """It is `items` of a schema without other parts."""
    value = node.old[keyword]
    if value is True or "items" in node.old:
        return True
    if node.old.keys() & (CONDITIONAL | {"contains", "allOf", "$ref"}):
        return False
    node.new["items"] = walk.schema(value, f"{node.pointer}/{keyword}", node.depth + 1)
    return True


def not_(walk: Walk, node: Node, keyword: str) -> bool:
    inner = walk.exact(node.old[keyword], f"{node.pointer}/{keyword}", node.depth + 1)
    other = None if inner is None else walk.negation.of(inner, node.new)
    if other is None:
        return False
    if (
        isinstance(other, dict)
        and not other.keys().isdisjoint({"anyOf", "allOf"})
        and not walk.may_branch(node)
    ):
        return False
    node.also.append(other)
    return True


def one_of(walk: Walk, node: Node, keyword: str) -> bool:
    """It is `anyOf` if its branches exclude each other, or can be made to."""
    given, count = node.old[keyword], len(walk.unenforced)
    if not isinstance(given, list):
        raise ValueError(f"{keyword} must be an array")
    branches = [
        walk.schema(each, f"{node.pointer}/{keyword}/{i}", node.depth + 1) for i, each in enumerate(given)
    ]
    if walk.proof.disjoint(given, types_of(node.old)):
        node.also.append(_any_of(branches))
        return True
    exact = len(walk.unenforced) == count
    if exact and len(branches) <= MAX_TOGETHER and walk.may_branch(node):
        others = [walk.negation.of(each, node.new) for each in branches]
        if not any(each is None for each in others):
            node.also.append(_any_of([_alone(i, branches, others) for i in range(len(branches))]))
            return True
    node.also.append(_any_of(branches))
    return False


def _alone(place: int, branches: list[Any], others: list[Any]) -> Any:
    """Returns the schema of values that have the schema of one branch alone."""
    schema = branches[place]
    for i, other in enumerate(others):
        schema = schema if i == place else both(schema, other)
    return schema


def _any_of(options: list[Any]) -> Any:
    return any_of([each for each in options if each is not False])


def if_(walk: Walk, node: Node, keyword: str) -> bool:
    """A value has the condition and `then`, or its opposite and `else`."""
    count = len(walk.unenforced)
    then, otherwise = (
        walk.schema(node.old.get(name, True), f"{node.pointer}/{name}", node.depth + 1)
        for name in ("then", "else")
    )
    if then in (True, {}) and otherwise in (True, {}):
        return len(walk.unenforced) == count
    condition = walk.exact(node.old[keyword], f"{node.pointer}/{keyword}", node.depth + 1)
    other = None if condition is None else walk.negation.of(condition, node.new)
    if other is None or not walk.may_branch(node):
        del walk.unenforced[count:]
        return False
    node.also.append(_any_of([both(condition, then), both(other, otherwise)]))
    return True
