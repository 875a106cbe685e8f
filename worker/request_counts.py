"""What an engine process counts of its requests, for metrics and for the status of its worker."""

from dataclasses import dataclass, field

from baton.content import Tier
from baton.engine import Output


@dataclass(slots=True)
class RequestCounts:
    """Counts since the start of an engine process."""

    prompt_tokens: int = 0
    """Of prompts that this worker prefilled, cached ones included."""
    prompt_tokens_cached: int = 0
    """Those that its prefix cache had."""
    prompt_tokens_fetched: int = 0
    """Those that its prefix cache got from another worker for their prompt."""
    generation_tokens: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    no_room: int = 0
    """Refused reservations."""
    prefix_fetched_tokens: list[int] = field(default_factory=lambda: [0] * len(Tier))
    """By tier, positions with KV from prefix caches of other workers, whether a prompt used it or not."""
    prefix_fetched_bytes: int = 0
    """This KV."""
    prompt_parts: int = 0
    """Parts of prompts that this worker computed together with others."""
    prompt_parts_failed: int = 0
    prompt_parts_waited: float = 0.0
    """Seconds that their steps waited for KV."""

    def count_prompt(self, tokens: int, cached: int, fetched: int) -> None:
        """Counts a prefilled prompt. `fetched` tokens came for it, and are among the `cached` ones if they
        fill blocks."""
        fetched = min(fetched, cached)
        self.prompt_tokens += tokens
        self.prompt_tokens_cached += cached - fetched
        self.prompt_tokens_fetched += fetched

    def count(self, output: Output) -> None:
        self.generation_tokens += 1
        self.finished_stop += output.finish_reason == "stop"
        self.finished_length += output.finish_reason == "length"
