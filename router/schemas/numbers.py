"""Rules for numbers that the compiler does not keep as they are.

llguidance 1.9.1 computes bounds as doubles, those of integers in 64 bits. It writes values of `const` and
`enum` as it read them: integers beyond 2**53 as the nearest double, and doubles of more digits perhaps one
bit off. So an answer that must be 9007199254740993 would be 9007199254740992.
"""

import math
from decimal import Decimal
from typing import Any

from baton.router.schemas.disjoint import types_of
from baton.router.schemas.walk import Node, Walk

_EXACT = 1 << 53
"""A double holds each integer up to this one."""
_MOST = (1 << 63) - 1024
"""The greatest double that is an integer of 64 bits."""
_LEAST = 1e-22
"""The compiler's expression of a lesser bound may be nested too deep."""
_MOST_POWER = 22
"""A double is read exactly if it is an integer up to `_EXACT`, times or by a power of ten up to this one."""


def bounds(walk: Walk, node: Node, keyword: str) -> bool:
    """A bound beyond 2**53 becomes the next double inside of it, also as the compiler writes it. Those of 64
    bits become `_MOST`, since the compiler takes no greater ones."""
    bound = node.old[keyword]
    if not isinstance(bound, int | float) or isinstance(bound, bool):
        return True
    if abs(bound) <= _EXACT and (not bound or abs(bound) >= _LEAST or "bounds" not in walk.without):
        return True
    if "bounds" in walk.without or keyword.startswith("exclusive"):
        del node.new[keyword]
        return False
    sign = 1 if keyword == "maximum" else -1
    named = node.old.get("type")
    types = named if isinstance(named, list) else [named]
    is_integer = "integer" in types and "number" not in types
    if is_integer and _MOST < bound * sign <= 1 << 64:
        inside = float(sign * _MOST)
    elif abs(bound) > 1 << 64:
        del node.new[keyword]
        return False
    else:
        inside = float(bound)
        written = Decimal(repr(bound))
        # The compiler writes bounds of numbers with the fewest digits: 2**60 as 1152921504606847000.
        while (Decimal(inside) if is_integer else Decimal(repr(inside))) * sign > written * sign:
            inside = math.nextafter(inside, -sign * math.inf)
    node.new[keyword] = int(inside)
    walk.tightened += inside != bound
    return True


def listed(walk: Walk, node: Node, keyword: str) -> bool:
    """Of values that the compiler would change, only the types are enforced."""
    value = node.old[keyword]
    values = [value] if keyword == "const" else value
    if not isinstance(values, list) or all(map(_is_kept, values)):
        return True
    del node.new[keyword]
    types = sorted(types_of({"enum": values}))
    if not any(isinstance(each, float) for each in values):
        types = ["integer" if name == "number" else name for name in types]
    node.new.setdefault("type", types)
    return False


def _is_kept(value: Any) -> bool:
    """Whether the compiler writes a value as it is."""
    match value:
        case list():
            return all(map(_is_kept, value))
        case dict():
            return all(map(_is_kept, value.values()))
        case int():
            return abs(value) <= _EXACT or (abs(value) <= _MOST and int(float(value)) == value)
        case float():
            if not math.isfinite(value):
                return False
            _, digits, power = Decimal(repr(value)).normalize().as_tuple()
            assert isinstance(power, int), "the number is finite"
            return int("".join(map(str, digits))) <= _EXACT and abs(power) <= _MOST_POWER
    return True
