"""Regular expressions that begin with look-aheads, as others without them."""

import re
from typing import Any

from baton.router.tools.regex import alternatives, pieces

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[=!]|\(|\)|[^\\]", re.DOTALL)
"""An escape, a class of characters, the beginning of a group, or a character."""
_CLASS = r"(\\[dwsDWS]|\[(?!\^?\])(?:\\.|[^\]\\\[&~-]|-)+\])"
_CHARACTER = r"(\\[^\w\s]|[A-Za-z0-9_@,:;/ -])"
_BLANK = re.compile(_CLASS + r"\*\$")
"""Text of one class of characters alone."""
_FIRST = re.compile(f"{_CLASS}|{_CHARACTER}")
_TWICE = re.compile(rf"\.\*{_CHARACTER}\1")
"""A character twice in a row, in the first line."""
LOOK = ("(?=", "(?!", "(?<=", "(?<!")


def without_lookahead(pattern: str) -> list[dict[str, Any]] | None:
    """Returns schemas of strings that together say the same as a pattern. None: they cannot say it.

    `^(?=A)(?!^[xy]*$)B` is `^(?:A)`, some character other than x and y, and `^(?:B)`."""
    tokens = _TOKEN.findall(pattern)
    if "".join(tokens) != pattern or tokens[:1] != ["^"]:
        return None
    schemas: list[dict[str, Any]] = []
    place = 1
    while place < len(tokens) and tokens[place] in ("(?=", "(?!"):
        end = _end(tokens, place)
        if end is None:
            return None
        inner = tokens[place + 1 : end]
        body = "".join(inner).removeprefix("^")
        if tokens[place] == "(?!":
            if (schema := _unlike(body)) is None:
                return None
            schemas.append(schema)
        else:
            schemas.append({"pattern": f"^(?:{body})" if _has_alternatives(inner) else f"^{body}"})
        place = end + 1
        if tokens[place : place + 1] and tokens[place] in ("*", "+", "?", "{"):
            return None
    rest = tokens[place:]
    if _has_alternatives(rest):
        return None
    schemas.append({"pattern": "^" + "".join(rest)})
    texts = [each.get("pattern", "") for each in schemas]
    return None if any(look in text for look in LOOK for text in texts) else schemas


def _end(tokens: list[str], begin: int) -> int | None:
    """Returns where the group ends that begins at a place. None: it does not end."""
    depth = 0
    for place in range(begin, len(tokens)):
        depth += tokens[place].startswith("(") - (tokens[place] == ")")
        if not depth:
            return place
    return None


def _has_alternatives(tokens: list[str]) -> bool:
    return len([*alternatives(pieces("".join(tokens)))]) > 1


def _unlike(body: str) -> dict[str, Any] | None:
    """Returns the schema of texts that do not begin as a regular expression says. None: it cannot be said."""
    if body == "$":
        return {"minLength": 1}
    if (blank := _BLANK.fullmatch(body)) is not None:
        return {"pattern": _others(blank[1])}
    if (first := _FIRST.fullmatch(body)) is not None:
        return {"pattern": f"^(?:{_others(first[1] or f'[{first[2]}]')}[\\s\\S]*)?$"}
    if (twice := _TWICE.fullmatch(body)) is not None:
        one = twice[1]
        return {"pattern": rf"^(?:{one}?[^{one}\n])*{one}?(?:\n[\s\S]*)?$"}
    return None


def _others(characters: str) -> str:
    """Returns the class of all other characters."""
    if characters.startswith("\\"):
        return characters.swapcase()
    return f"[{characters[2:]}" if characters.startswith("[^") else f"[^{characters[1:]}"
