"""Regular expressions of clients inside of grammars: they are read piece by piece, and never patched."""

import re
from collections.abc import Iterator

_PIECE = re.compile(r"\\.|[^\\]", re.DOTALL)
"""An escape or a character."""
_DIGITS, _WORDS, _SPACES = "0-9", "0-9A-Za-z_", r"\t-\r \x{a0}"
_CLASSES = {
    r"\d": f"[{_DIGITS}]", r"\D": f"[^{_DIGITS}]", r"\w": f"[{_WORDS}]", r"\W": f"[^{_WORDS}]",
    r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]",
}  # fmt: skip
"""Of a regular expression, as in xgrammar. llguidance would take any character of Unicode."""


def pieces(regex: str) -> list[str]:
    """Returns the escapes and characters of a regular expression. Raises ValueError."""
    escapes = _PIECE.findall(regex)
    if sum(map(len, escapes)) != len(regex):
        raise ValueError("the regular expression ends within an escape")
    return escapes


def of_ascii(regex: str) -> str:
    """Returns the same with classes of ASCII. Raises ValueError."""
    return "".join(_CLASSES.get(piece, piece) for piece in pieces(regex))


def literal(regex: str) -> str:
    """Returns a regular expression as a literal of Lark. Raises ValueError."""
    return "/" + "".join(r"\/" if piece == "/" else piece for piece in pieces(regex)) + "/"


def anywhere(pattern: str) -> str:
    """Returns the regular expression of all texts in which a `pattern` of a JSON schema matches.

    Raises ValueError if that cannot be said: what an anchor inside of it means, llguidance refuses."""
    branches = [
        (branch[:1] == ["^"], branch[-1:] == ["$"], "".join(branch).removeprefix("^"))
        for branch in alternatives(pieces(pattern))
    ]
    if len(branches) > 1 and re.search(r"\(\?[A-Za-z-]+\)", pattern):
        raise ValueError("a pattern with flags has alternatives")
    return "|".join(
        ("" if begins else "(?s:.*)") + f"(?:{text[:-1] if ends else text})" + ("" if ends else "(?s:.*)")
        for begins, ends, text in branches
    )


def alternatives(escapes: list[str]) -> Iterator[list[str]]:
    """Yields the alternatives of a whole regular expression, as Rust's syntax divides it."""
    branch: list[str] = []
    groups = classes = 0
    opened = -2  # where a class may still hold a bracket as its first character
    for i, piece in enumerate(escapes):
        if classes:
            if piece == "^" and opened == i - 1:
                opened = i
            elif piece == "[":
                classes, opened = classes + 1, i
            elif piece == "]" and opened != i - 1:
                classes -= 1
        elif piece == "[":
            classes, opened = 1, i
        elif piece == "|" and not groups:
            yield branch
            branch = []
            continue
        else:
            groups += (piece == "(") - (piece == ")")
        branch.append(piece)
    yield branch
