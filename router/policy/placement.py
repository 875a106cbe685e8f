"""Decides which workers compute a request: where its tokens come first, and at what cost to others.

There are three places:

    handover   a prefill worker computes the prompt, and hands its KV over to a decode worker
    decode     the decode worker computes the prompt in chunks beside its decodes
    prefill    the prefill worker computes the prompt, and goes on with the decode itself

A handover costs two decode steps and disturbs nothing. It makes one gap longer, which is felt in a short
answer. So short answers go where their second token comes first, and long answers where the first one does.

The decode worker is good for a prompt that fits into a step, and while prefill workers have a queue. But a
prompt makes the gaps of all that decode there longer. So far as these are beyond the gap target G, it costs

    late seconds of all these gaps · F / (G · N)            seconds of a first token

with the target F of a first token, and the expected tokens N of an answer: a user who waits for F until the
answer begins is ready to wait for G · N from then on. So a decode worker with many decodes computes no
prompts while a prefill worker can. Gaps within the target cost nothing.

The prefill worker is good for a short answer to a short prompt. But while it decodes, each of its prompts
takes up to `PATIENCE_SECONDS` longer: when it decoded all answers of under 80 tokens, a trace of chats had
28 % more TTFT. While decode workers have no room, and while there are none, it decodes every request that it
has room for. So under a load that gains from it, two workers act as a prefill and a decode worker. Under
other loads they act as two colocated engines.

The estimates are the costs that workers measure and report. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from baton.router.policy.fleet import Fleet
from baton.router.policy.plan import Plan, Range, Reason
from baton.router.policy.prefill import PrefillRequest, PrefillSnapshot
from baton.rpc import worker_pb2 as pb

HANDOVER_STEPS = 2.0
"""Decode steps between the first token, from prefill, and the second."""
PATIENCE = 1.3
"""A prompt may take this many times as long beside decodes as alone, and `PATIENCE_SECONDS` more. Only if it
would take longer, decode steps become longer for it."""
PATIENCE_SECONDS = 0.04
SHORT_ANSWER = 64
"""Output tokens. In longer answers a handover is one of many gaps."""
SHORT_PROMPT_STEPS = 2
"""A prefill worker decodes after prompts that take at most so many short steps beside decodes. Its other
prompts are expected to be like this one, and to take that long while it decodes."""
SLOWER = 0.12
"""A worker that decodes takes this share longer for short prompts, on the whole."""
QUEUED = 0.5
"""Prompts that wait beside decodes take this share longer than expected: meanwhile requests join, and steps
become shorter for them."""
LEAST_UTILISATION = 0.1
"""Of a prefill worker. An idle one may get many prompts in the next second, while it still decodes."""
FIRST_TOKEN_TARGET = 0.3
"""Seconds. A longer one spares the gaps of decode workers that are full, and prompts wait longer."""
ANSWER_SECONDS = 5.0
"""The longest time for which the future prompts of a prefill worker are considered."""


@dataclass(frozen=True, slots=True)
class MixedPace:
    """What the steps of a worker cost that both decode and compute prompts, as it reports. 0 is unknown.

    A short step is always allowed. Long steps are at the gap target.
    """

    decode_seconds: float = 0.0
    """Of a step that only decodes."""
    short_tokens: int = 0
    """Prompt tokens of a short step."""
    short_seconds: float = 0.0
    long_tokens: int = 0
    long_seconds: float = 0.0
    gap_target: float = 0.0
    """Seconds that a gap may take. A worker that has many decodes takes longer steps."""

    @property
    def known(self) -> bool:
        """Whether any prompt token fits into a step with decodes."""
        return self.short_tokens > 0 or self.long_tokens > 0

    @property
    def largest_chunk(self) -> tuple[int, float]:
        """Prompt tokens of the longest step, and its seconds."""
        if self.long_tokens:
            return self.long_tokens, self.long_seconds
        return self.short_tokens, self.short_seconds

    @property
    def token_seconds(self) -> float:
        """Time that a prompt token adds to a step."""
        if self.long_tokens:
            return max(0.0, self.long_seconds - self.decode_seconds) / self.long_tokens
        return max(0.0, self.short_seconds - self.decode_seconds) / max(1, self.short_tokens)

    def seconds(self, tokens: float) -> float:
        """Time to compute prompts of `tokens` beside decodes; infinite if it is unknown."""
        if not self.known:
            return math.inf
        fast = self._in_chunks(tokens, max(self.long_tokens, self.short_tokens))
        slow = self._in_chunks(tokens, self.short_tokens)
        return max(fast, min(slow, patience(tokens * self.token_seconds)))

    def _in_chunks(self, tokens: float, chunk: int) -> float:
        if not chunk:
            return math.inf
        return tokens * self.token_seconds + math.ceil(tokens / chunk) * self.decode_seconds


def patience(alone: float) -> float:
    """Seconds that a prompt may take, if it takes `alone` seconds without decodes beside it."""
    return PATIENCE * alone + PATIENCE_SECONDS


def pace(status: pb.WorkerStatus) -> MixedPace:
    return MixedPace(
        status.decode_seconds or status.step_seconds,
        status.chunk_tokens,
        status.chunk_seconds,
        status.long_chunk_tokens,
        status.long_chunk_seconds,
        status.gap_target_seconds,
    )


@dataclass(frozen=True, slots=True)
class DecodeOffer:
    """A decode worker that may compute the prompt itself."""

    pace: MixedPace
    waiting: float = 0.0
    """Prompt tokens that it computes before this request."""
    cached: int = 0
    """Cached tokens of this prompt."""
    idle: bool = False
    """It decodes nothing, so nothing bounds its steps."""
    alone: float = 0.0
    """Measured time of a prompt token without decodes. 0: unknown."""
    decodes: int = 0
    """Requests that it decodes, or will."""
    row: int = 0
    """Of the worker."""

    def cost(self, tokens: int, answer: int) -> float:
        """Seconds until the second token, and what the prompt costs those that decode there, in seconds of a
        first token. `answer`: expected output tokens of a request."""
        gap = self.pace.gap_target
        late = self._late_seconds(tokens) / (gap * answer) if gap else 0.0
        return self.second_token(tokens) + FIRST_TOKEN_TARGET * late

    def _late_seconds(self, tokens: int) -> float:
        """Seconds that the prompt adds to gaps beyond their target, of all that decode there."""
        pace, (chunk, seconds) = self.pace, self.pace.largest_chunk
        if not chunk:
            return 0.0
        late = max(seconds, pace.gap_target) - max(pace.decode_seconds, pace.gap_target)
        return self.decodes * math.ceil((tokens - self.cached) / chunk) * late

    def second_token(self, tokens: int) -> float:
        """Seconds until the second token of a prompt of `tokens` tokens; infinite without an offer."""
        pace, own = self.pace, tokens - self.cached
        work = self.waiting + own
        if not pace.known:
            return math.inf
        if self.idle:
            # The weights are read for the prompt now, so a token costs no less than without decodes.
            return work * max(pace.token_seconds, self.alone) + 2 * pace.decode_seconds
        # The step under way may be a short one.
        seconds, begins = pace.seconds(work), max(0.0, pace.short_seconds - pace.decode_seconds)
        return begins + seconds + QUEUED * (seconds - pace.seconds(own)) + pace.decode_seconds


def decode_offer(fleet: Fleet, row: int, cached: int) -> DecodeOffer:
    """The offer of a decode worker with `cached` tokens of the prompt."""
    status, load = fleet.workers[row].status, fleet.workers[row].load
    waiting, speed = fleet.loads.tokens_waiting(row, fleet.now), status.prefill_tokens_per_s
    alone = 1 / speed if speed > 0 else 0.0
    return DecodeOffer(pace(status), waiting, cached, not load.running, alone, load.running, row)


@dataclass(frozen=True, slots=True)
class PrefillOffer:
    """A prefill worker that may compute the prompt."""

    first_token: float
    """Seconds until the first token."""
    tokens: int = 0
    """Prompt tokens that it would compute."""
    short_tokens: int = 0
    """Prompt tokens of its short steps with decodes. 0: unknown."""
    decodes: bool = False
    """It has room to decode the request, too."""
    utilisation: float = 0.0
    """Share of its time in which it computes prompts."""
    within: float = 0.0
    """Seconds in which the prompt should be computed."""
    queues: bool = False
    """More than one step of prompts, also of other routers, seems to be ahead of the request."""
    row: int = 0
    """Of the worker."""


def prefill_offer(fleet: Fleet, snapshot: PrefillSnapshot, request: PrefillRequest, row: int) -> PrefillOffer:
    """The offer of a prefill worker."""
    worker, loads = fleet.workers[row], fleet.loads
    first_token, mixed = snapshot.seconds(request, row), pace(worker.status)
    tokens = request.tokens - snapshot.cached.of(row)
    # It computes the prompt beside decodes.
    if (worker.load.own or worker.status.requests_decoding) and mixed.known:
        first_token = max(first_token, mixed.seconds(snapshot.tokens_ahead(row) + tokens))
    return PrefillOffer(
        first_token,
        tokens,
        mixed.short_tokens,
        worker.load.fits(request.tokens + 1),
        loads.utilisation(row),
        within=patience(tokens / float(snapshot.speed[row])),
        queues=loads.tokens_queued(row, fleet.now) > worker.description.max_num_batched_tokens,
        row=row,
    )


def handover(
    tokens: int, prefill: PrefillOffer, decode: int, costs: Mapping[str, float] | None = None
) -> Plan:
    """The prefill worker computes the prompt, and the worker `decode` fetches the KV."""
    return Plan(
        "handover",
        (Range(prefill.row, 0, tokens),),
        decode,
        cached=tokens - prefill.tokens,
        within=prefill.within,
        order="prefill" if prefill.queues and prefill.row != decode else "together",
        costs={"first_token": prefill.first_token} if costs is None else costs,
    )


def on_prefill(tokens: int, prefill: PrefillOffer, reason: Reason, costs: Mapping[str, float]) -> Plan:
    """The prefill worker computes the prompt and decodes."""
    ranges, cached = (Range(prefill.row, 0, tokens),), tokens - prefill.tokens
    return Plan("prefill", ranges, prefill.row, cached, prefill.within, reason=reason, costs=costs)


def place(tokens: int, answer: int, prefill: PrefillOffer | None, offers: Sequence[DecodeOffer]) -> Plan:
    """Returns where a request goes.

    Args:
        tokens: length of the prompt.
        answer: output tokens that the request is expected to get still.
        prefill: the chosen prefill worker. None: there is none, so a decode worker computes the prompt.
        offers: decode workers. The first one decodes if there is a handover.
    """
    decode, best = min(((found.cost(tokens, answer), found) for found in offers), key=itemgetter(0))
    costs = {"decode": decode}
    ranges, within = (Range(best.row, 0, tokens),), patience((tokens - best.cached) * best.pace.token_seconds)
    if prefill is None:  # the only way to compute the prompt
        return Plan("decode", ranges, best.row, best.cached, within, reason="no_prefill", costs=costs)
    step, short_answer = offers[0].pace.decode_seconds, answer <= SHORT_ANSWER
    costs["handover"] = prefill.first_token + (HANDOVER_STEPS if short_answer else 1.0) * step
    short_tokens = prefill.short_tokens or offers[0].pace.short_tokens
    short_prompt = prefill.tokens <= SHORT_PROMPT_STEPS * short_tokens
    if prefill.decodes and short_prompt and short_answer and step:
        slower = SLOWER * max(prefill.utilisation, LEAST_UTILISATION) * min(answer * step, ANSWER_SECONDS)
        costs["prefill"] = prefill.first_token + step + slower
        if costs["prefill"] < min(costs["handover"], costs["decode"]):
            return on_prefill(tokens, prefill, "no_handover", costs)
    if costs["decode"] < costs["handover"]:
        reason = _reason(tokens, best)
        return Plan("decode", ranges, best.row, best.cached, within, reason=reason, costs=costs)
    return handover(tokens, prefill, offers[0].row, costs)


def place_without_room(tokens: int, prefills: Sequence[PrefillOffer]) -> Plan | None:
    """Returns where a request goes while no decode worker can take it: to the prefill worker with room to
    decode it that has the first token first. Of two, the earlier offer. None: it waits."""
    roomy = [offer for offer in prefills if offer.decodes]
    if not roomy:
        return None
    best = min(roomy, key=lambda offer: offer.first_token)
    return on_prefill(tokens, best, "no_room", {"prefill": best.first_token})


def _reason(tokens: int, offer: DecodeOffer) -> Reason:
    """Says why the decode worker has the tokens of this prompt before a handover would.

    `short`: its queue and the prompt fit into one short step. `cached`: its queue and the uncached part do.
    `saturated`: they do not, so only the queue or the speed of the prefill worker can be the cause.
    """
    step = max(offer.pace.short_tokens, 1)
    if offer.waiting + tokens <= step:
        return "short"
    if offer.waiting + tokens - offer.cached <= step:
        return "cached"
    return "saturated"


WINDOW_STEPS = 2
"""Steps of prompts for each prefill worker: one that it computes, and one to schedule from."""


@dataclass(frozen=True, slots=True)
class PrefillWindow:
    """Prompt tokens that keep all workers busy. More would only wait at the workers."""

    tokens: float = 0.0
    step: float = math.inf
    """Prompt tokens of a step of one worker."""
    tokens_per_s: float = 0.0
    """Prompt tokens that all workers compute in a second; 0: unknown."""
    others: int = 0
    """Prompt tokens of other routers at the workers."""

    def counted(self, prompt: int) -> int:
        """What a prompt takes of the window, if `prompt` tokens of it are computed. One that is longer than a
        step counts as a step: otherwise a long prompt fills the window, and all others wait until it is
        computed, also beside idle workers."""
        return prompt if prompt < self.step else int(self.step)


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
