"""What the rules for single keywords share: one schema while it is rewritten, and what they may ask for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.router.schemas.disjoint import Proof
from baton.router.schemas.negation import Negation
from baton.router.schemas.places import Places
from baton.router.schemas.probe import Probe

MAX_DEPTH = 64
MAX_FORMS = 64
"""Equal forms with alternatives, in one schema."""
MAX_TOGETHER = 4
"""Of these, in one object: their alternatives multiply."""
MAX_NAMES = 1_000
"""Properties that a keyword may add to an object."""
_MAX_LOOKS = 1_000

CONDITIONAL = {"$dynamicRef", "$recursiveRef", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies"}
"""Keywords by which it depends on the value what a schema evaluates."""


@dataclass
class Node:
    """One schema while it is rewritten."""

    old: dict[str, Any]
    pointer: str
    depth: int
    new: dict[str, Any] = field(default_factory=dict)
    also: list[Any] = field(default_factory=list)
    """Schemas that hold as well."""

    @property
    def members(self) -> dict[str, Any]:
        return members(self.new.get("properties"))

    @property
    def required(self) -> list[str]:
        return strings(self.old.get("required"))

    @property
    def is_closed(self) -> bool:
        """An object has no other members than those in `members`."""
        return self.new.get("additionalProperties") is False and "patternProperties" not in self.new


class Walk:
    """One schema with all inside of it, as rules see it. `rewriter` says what becomes of each keyword.

    Attributes:
        unenforced: JSON pointers of what is left out.
        forms: equal forms with alternatives that are used.
        tightened: bounds that now exclude some values that they should allow.
    """

    def __init__(self, root: Any, probe: Probe, without: frozenset[str]) -> None:
        """`without`: as of `rewritten`."""
        self.root = root
        self.probe = probe
        self.without = without
        self.places = Places(root)
        self.proof = Proof(self.places)
        self.negation = Negation(self.places, self._exact_target)
        self.unenforced: list[str] = []
        self.forms = 0
        self.tightened = 0
        self._looks = 0
        self._targets: dict[str, Any] = {}

    def schema(self, schema: Any, pointer: str, depth: int) -> Any:
        """Rewrites one schema."""
        raise NotImplementedError

    def exact(self, schema: Any, pointer: str, depth: int) -> Any:
        """Returns an equal schema; None: there is none. It names no place then."""
        count, tightened = len(self.unenforced), self.tightened
        new = self.schema(schema, pointer, depth)
        if len(self.unenforced) > count or self.tightened > tightened or not isinstance(new, bool | dict):
            del self.unenforced[count:]
            return None
        return new

    def _exact_target(self, reference: str) -> Any:
        """As `exact`, of what a reference names."""
        if reference not in self._targets:
            self._targets[reference] = None  # while it is written, for those that name themselves
            target = self.places.target(reference)
            self._targets[reference] = self.exact(target, reference.removeprefix("#"), 1)
        return self._targets[reference]

    def may_branch(self, node: Node) -> bool:
        """Whether an equal form with alternatives may be used. Counts it."""
        if "forms" in self.without or (not node.pointer and "forms of the whole" in self.without):
            return False
        if self.forms >= MAX_FORMS or len(node.also) >= MAX_TOGETHER:
            return False
        self.forms += 1
        return True

    def may_look(self) -> bool:
        """Whether one more schema may be looked at for a rule. Counts it."""
        self._looks += 1
        return self._looks <= _MAX_LOOKS


Rule = Callable[[Walk, Node, str], bool]
"""Rewrites a keyword of a node. False: it cannot be enforced as a whole."""


def members(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def count_of(value: Any) -> int | None:
    """Returns a number of things. None: the value is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def both(a: Any, b: Any) -> Any:
    """Returns the schema of values that have both schemas."""
    if a is False or b is False:
        return False
    if a in (True, {}):
        return b
    return a if b in (True, {}) else {"allOf": [a, b]}
