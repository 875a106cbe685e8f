"""What only the compiler knows of a schema."""

import json

from llguidance import LLMatcher, LLTokenizer

from baton.grammars.compiler import compiled, error_of
from baton.router.tools.regex import anywhere, literal, of_ascii


class Probe:
    """Answers of the compiler. Those that it gave once are remembered."""

    def __init__(self, alphabet: LLTokenizer) -> None:
        self._alphabet = alphabet
        self._known: dict[tuple[str, str], bool] = {}

    def knows_format(self, name: str) -> bool:
        return self._takes("format", name)

    def takes_pattern(self, pattern: str) -> bool:
        return self._takes("pattern", pattern)

    def _takes(self, keyword: str, value: str) -> bool:
        if (keyword, value) not in self._known:
            schema = json.dumps({"type": "string", keyword: value})
            self._known[keyword, value] = not error_of(self._alphabet, "json_schema", schema)
        return self._known[keyword, value]

    def matching(self, pattern: str, names: list[str]) -> list[str]:
        """Returns the names in which a pattern matches."""
        matcher = compiled(self._alphabet, "grammar", f"start: {literal(anywhere(of_ascii(pattern)))}")
        return [name for name in names if _accepts(matcher.deep_copy(), name.encode())]

    def others(self, pattern: str, names: list[str]) -> bool:
        """Whether a pattern matches in some text that is not one of the names. True if that is unknown."""
        try:
            regex = literal(anywhere(of_ascii(pattern)))
        except ValueError:
            return True
        taken = " | ".join(json.dumps(name, ensure_ascii=False) for name in names)
        error = error_of(self._alphabet, "grammar", f"start: NAME\nNAME: {regex} & ~({taken})")
        return not error.startswith("the grammar allows no token")


def _accepts(matcher: LLMatcher, text: bytes) -> bool:
    return matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()
