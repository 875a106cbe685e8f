"""The structure that a request's output must have. `engine.grammar` enforces it for a model."""

from dataclasses import dataclass
from typing import Literal

MAX_LENGTH = 1 << 17
"""Most characters of a schema, regex or grammar. This length compiles in 0.1 s."""


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The structure of one request's output. Raises `ValueError` naming kind and bound."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    """A JSON schema; a regular expression (https://docs.rs/regex) that the whole output must match; or a
    grammar in llguidance's variant of Lark."""

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "regex", "grammar"):
            raise ValueError(
                f"structured_output.kind must be json_schema, regex or grammar, not {self.kind!r}"
            )
        if not 0 < len(self.text) <= MAX_LENGTH:
            raise ValueError(
                f"structured_output.{self.kind} must have 1 to {MAX_LENGTH} characters, not {len(self.text)}"
            )
