"""What an engine process counts, beside the statistics of its engine. Counts are since its start."""

from dataclasses import dataclass, field

from baton.kv_names import Tier


@dataclass(slots=True)
class RequestCounts:
    """Of all attempts, also of those that have ended. Metrics have all of them. A worker reports those that
    `WorkerStatus` has under the same names."""

    computed_prompt_tokens: int = 0
    """Of prompts that this worker prefilled."""
    prompt_tokens_cached: int = 0
    """The same prompts' tokens that its prefix cache had."""
    prompt_tokens_fetched: int = 0
    """Those that its prefix cache got from another worker for their prompt."""
    generation_tokens: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    no_room: int = 0
    """Refused reservations."""
    fetched_by_tier: list[int] = field(default_factory=lambda: [0] * len(Tier))
    """By tier, positions with KV from prefix caches of other workers, whether a prompt used it or not."""
    prefix_fetched_bytes: int = 0
    """This KV."""
    prompt_parts: int = 0
    """Parts of prompts that this worker computed together with others."""
    prompt_parts_failed: int = 0
    prompt_parts_waited: float = 0.0
    """Seconds that their steps waited for KV."""
    handovers: int = 0
    """Requests whose KV came from another worker."""
    handovers_hidden: float = 0.0
    """Sum over these of `InjectStats.hidden_share`."""

    def count_prompt(self, tokens: int, cached: int, fetched: int) -> None:
        """Counts a prefilled prompt of so many `tokens`. `fetched` ones came for it, and are among the
        `cached` ones if they fill blocks."""
        fetched = min(fetched, cached)
        self.computed_prompt_tokens += tokens - cached
        self.prompt_tokens_cached += cached - fetched
        self.prompt_tokens_fetched += fetched


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The shared store, as a worker sees it."""

    written: int
    """Chunks that the store took."""
    refused: int
    """Chunks that it did not take."""
    missed: int
    """Chunks whose objects were wrong, or gone when they were read."""
