"""Rewrites schemas until the compiler takes them. For a process that is `grammars.trials.limited`."""

import json
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from baton.grammars.compiler import compiled, error_of
from baton.router.schemas.rewriter import Rewritten, rewritten
from baton.router.tools.regex import anywhere, literal, of_ascii

_REMEDIES = {
    "min/maxProperties only": "counts",
    "not disjoint": "patternProperties",
    "regex": "pattern",
}
"""What to leave out, by a part of the compiler's error."""


def enforceable(
    alphabet: LLTokenizer, schema: Any, *, forms_of_the_whole: bool = True
) -> tuple[Rewritten, str]:
    """Returns the schema that the compiler takes, and an empty text; otherwise its error.

    `forms_of_the_whole`: the outermost schema may have alternatives. Raises ValueError."""
    probe = CompilerProbe(alphabet)
    without = frozenset[str]() if forms_of_the_whole else frozenset({"forms of the whole"})
    while True:
        made = rewritten(schema, probe, without)
        if made.schema is False:
            return made, "no value has this schema"
        error = error_of(alphabet, "json_schema", json.dumps(made.schema))
        remedies = {name for text, name in _REMEDIES.items() if text in error}
        if "regex" in error:  # of a value, or of a name
            remedies.add("patternProperties")
        if error and made.has_forms and remedies <= without:
            remedies = {"forms"}
        if remedies <= without:
            return made, error
        without |= remedies


class CompilerProbe:
    """As `walk.Probe`."""

    def __init__(self, alphabet: LLTokenizer) -> None:
        self._alphabet = alphabet
        self._known: dict[tuple[str, str], bool] = {}

    def knows_format(self, name: str) -> bool:
        """As `walk.Probe.knows_format`."""
        return self._takes("format", name)

    def takes_pattern(self, pattern: str) -> bool:
        """As `walk.Probe.takes_pattern`."""
        return self._takes("pattern", pattern)

    def _takes(self, keyword: str, value: str) -> bool:
        if (keyword, value) not in self._known:
            schema = json.dumps({"type": "string", keyword: value})
            self._known[keyword, value] = not error_of(self._alphabet, "json_schema", schema)
        return self._known[keyword, value]

    def matching(self, pattern: str, names: list[str]) -> list[str]:
        """As `walk.Probe.matching`."""
        matcher = compiled(self._alphabet, "grammar", f"start: {literal(anywhere(of_ascii(pattern)))}")
        return [name for name in names if _accepts(matcher.deep_copy(), name.encode())]

    def others(self, pattern: str, names: list[str]) -> bool:
        """As `walk.Probe.others`."""
        try:
            regex = literal(anywhere(of_ascii(pattern)))
        except ValueError:
            return True
        taken = " | ".join(json.dumps(name, ensure_ascii=False) for name in names)
        error = error_of(self._alphabet, "grammar", f"start: NAME\nNAME: {regex} & ~({taken})")
        return not error.startswith("the grammar allows no token")


def _accepts(matcher: LLMatcher, text: bytes) -> bool:
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()
