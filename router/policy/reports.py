"""What the reports of workers mean for a choice: the offers that `place` compares. Pure."""

import math
from dataclasses import dataclass

from baton.content import Tier
from baton.router.policy.chunk_index import ChunkIndex
from baton.router.policy.decode import DecodeLoad
from baton.router.policy.placement import DecodeOffer, MixedPace, PrefillOffer
from baton.router.policy.prefill import PrefillRequest, PrefillSnapshot
from baton.rpc import bounded_report
from baton.rpc import worker_pb2 as pb

REPORTS_PER_SECOND = 500
"""From all workers together. A report takes a router up to 0.1 ms."""
WINDOW_STEPS = 2
"""Steps of prompts for each prefill worker: one that it computes, and one to schedule from."""


def report_seconds(workers: int) -> float:
    """The least seconds between two reports of each of so many workers that a router can take. Workers with
    several routers report as often as that."""
    return bounded_report(workers / REPORTS_PER_SECOND)


def pace(status: pb.WorkerStatus) -> MixedPace:
    return MixedPace(
        status.decode_seconds or status.step_seconds,
        status.chunk_tokens,
        status.chunk_seconds,
        status.long_chunk_tokens,
        status.long_chunk_seconds,
    )


def apply_cache_events(index: ChunkIndex, row: int, events: pb.CacheEvents) -> None:
    if events.reset:
        index.clear(row)
    index.discard(row, events.evicted)
    index.add(row, events.added)
    for tier, chunks in zip(Tier, (events.device, events.host, events.disk), strict=True):
        index.place(row, chunks, tier)


def prefill_offer(
    snapshot: PrefillSnapshot,
    request: PrefillRequest,
    row: int,
    status: pb.WorkerStatus,
    load: DecodeLoad,
    utilisation: float,
) -> PrefillOffer:
    """The offer of a prefill worker. `load`: what it decodes."""
    first_token, mixed = snapshot.seconds(request, row), pace(status)
    tokens = request.tokens - snapshot.cached.of(row)
    if (load.own or status.requests_decoding) and mixed.known:  # it computes the prompt beside decodes
        first_token = max(first_token, mixed.seconds(snapshot.tokens_ahead(row) + tokens))
    decodes = load.fits(request.tokens + 1)
    return PrefillOffer(first_token, tokens, mixed.short_tokens, decodes, utilisation)


def decode_offer(status: pb.WorkerStatus, load: DecodeLoad, waiting: float, cached: int) -> DecodeOffer:
    """The offer of a decode worker with `waiting` prompt tokens ahead, and `cached` tokens of the prompt."""
    speed = status.prefill_tokens_per_s
    return DecodeOffer(pace(status), waiting, cached, not load.running, 1 / speed if speed > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class PrefillWindow:
    """Prompt tokens that keep all workers busy. More would only wait at the workers."""

    tokens: float = 0.0
    step: float = math.inf
    """Prompt tokens of a step of one worker."""

    def holding(self, prompt: int) -> float:
        """The window if prompts have `prompt` tokens. A prompt that is longer than a step counts as a step:
        otherwise one long prompt fills the window, and the other workers get none."""
        return self.tokens * max(1.0, prompt / self.step)


def prefill_window(budgets: list[int], speed: float, decodes: list[MixedPace]) -> PrefillWindow:
    """`budgets`, `speed`: of the prefill workers, the tokens of a step of each, and the tokens/s of all
    together. `decodes`: the decode workers that compute prompts too."""
    chunks = [found.largest_chunk for found in decodes]
    if not budgets:
        tokens = sum(tokens for tokens, _ in chunks)
        return PrefillWindow(WINDOW_STEPS * tokens, tokens / len(chunks) if tokens else math.inf)
    spare = sum(tokens / seconds for tokens, seconds in chunks if seconds)
    share = 1 + (spare / speed if speed else 0.0)
    return PrefillWindow(WINDOW_STEPS * sum(budgets) * share, sum(budgets) / len(budgets))
