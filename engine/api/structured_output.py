"""What structure an output must have. Knows no model: `engine.grammar` enforces it."""

from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher

MAX_LENGTH = 1 << 17
"""Characters of a schema, regex or grammar. So much compiles in 0.1 s."""

LIMITS: dict[str, Any] = {
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""llguidance's, lowered: a mask takes at most some 0.03 s, and a request's states at most some 40 MB."""

WHITESPACE = r"[ \n\r\t]{1,32}"
"""Between the parts of JSON. Without a bound a model that likes newlines never ends."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    """A JSON schema; a regular expression (https://docs.rs/regex) for all of the output; or a grammar in
    llguidance's variant of Lark."""

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "grammar"):
            raise ValueError(
                f"structured_output.kind must be json_schema, regex or grammar, not {self.kind!r}"
            )
        if not 0 < len(self.text) <= MAX_LENGTH:
            raise ValueError(
                f"structured_output.{self.kind} must have 1 to {MAX_LENGTH} characters, not {len(self.text)}"
            )

    @property
    def grammar(self) -> str:
        """For llguidance."""
        match self.kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(self.text, {"whitespace_pattern": WHITESPACE})
            case "regex":
                return LLMatcher.grammar_from_regex(self.text)
            case "grammar":
                return LLMatcher.grammar_from_lark(self.text)
