"""Reasoning: the tokens that a model generates before its answer. `engine.grammar` follows it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How the output of one request reasons. Raises `ValueError` naming the bound."""

    end_id: int
    """The token that ends the reasoning."""
    start_id: int | None = None
    """The output reasons only if this is its first token. None: it reasons from its first token on."""
    budget: int | None = None
    """After this many tokens of reasoning, `end_id` is the only token allowed. None: no limit."""

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise ValueError(f"reasoning.budget must be at least 0, not {self.budget}")

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens that it names."""
        return (self.end_id,) if self.start_id is None else (self.start_id, self.end_id)
