"""Decides which workers compute a request: those with the least cost.

One worker computes the prompt, and the same or another one decodes:

    handover   a prefill worker computes the prompt, and hands its KV over to a decode worker
    decode     a decode worker computes the prompt in chunks beside its decodes
    prefill    a prefill worker computes the prompt, and goes on with the decode itself

Users have two targets: F seconds for a first token, and G seconds for a gap. A user who waits for F until an
answer of N tokens begins is ready to wait for G · N from then on. So a second of one gap costs
c = F / (G · N) seconds of a first token, and all costs are in these:

    one worker = prompt + decode + forgotten
    handover   = prompt + forgotten + late + join + decode + forgotten    at two workers
    prompt     = first + behind + C · longer
    decode     = N · (c · d' + C · (d' - d)) + slower
    join       = c · step

    C          the sum of c of all requests that decode there
    first      until the first token: the prompts ahead and this one, beside the decodes there
    behind     added to the first tokens of prompts that come before its worker has none left
    longer     added to the gaps of each request that decodes where the prompt is computed, while it decodes
    d, d'      seconds of a gap that cost where the request decodes, without and with it: those beyond a short
               step, and with vLLM (s - f)² / (short - f) of a shorter step of s seconds, f being the fastest
    slower     added to the first tokens of prompts that come there while it decodes
    late       how much later than the first token its KV comes, over the link and behind what is queued there
    step       what a decode that is handed over waits for there: the end of a step
    forgotten  what the cache loses that no other worker has, if the request needs more memory than is spare.
               As large a share of that as is cached of prompts will be computed there again

A short step takes the geometric mean of G and of the fastest step, as in the engine's `ChunkLimit`. With as
many tokens of prompts as may be, a step takes `step_model.long_seconds`. So a worker that decodes computes
prompts for that time less what its decodes add to such a step, and they take that much longer than alone. A
prompt beside decodes also waits for the step under way, and its last step is not full. A request that
decodes alone may wait for a step of another prompt.

So prompts go where they come first and disturb least. Decodes spread over all workers when their steps are
long, unless prompts there would wait for them. Under a load that gains from it, two workers act as a prefill
and a decode worker, and under others as two colocated engines that share their work.

Images that its cache lacks are encoded by the worker that computes the prompt, and take time as tokens do,
but for those that it was shown before.
If encoders of a pool encode them, no worker loses that time. But a first token comes no sooner than the
embeddings of each image and the tokens from there on.

An adapter that is not on the device of a worker is moved there between two steps. So the request waits for
it, and each decode there has one gap that is longer by this time.

A link carries KV while its prompt is computed. What comes later delays the second token, and users wait for
that as for the first one. So a full link leaves prompts to workers that also decode them.

All terms follow from what workers report of their steps and links, and from what the router sent since. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from baton.router.policy.fleet import Fleet, Seen
from baton.router.policy.pace import MOST_BUSY, Pace, delayed
from baton.router.policy.plan import Place, Plan, Range, Reason
from baton.router.policy.prefill import PrefillRequest
from baton.router.policy.prefixes import PrefixSource
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import LARGE, StepModel

TTFT_GAPS = 20.0
"""Without a target for the first token users wait for it as long as for so many gaps. So it follows the model
and the GPU, as the target of a gap does: 0.3 s for an 8B model on an H200. No measurement says what users
want: this is the default of `--ttft-target`."""
JOIN_STEPS = 2
"""Steps that a prompt takes longer beside decodes: the one under way, and its last one, which is not full. It
counts steps of the engine's loop, which measures how long they are, so no speed can replace it. Without them
p99 of gaps is 1.34 to 1.59 times as long on 64 workers with a slow one (simulated)."""


def reported_model(status: pb.WorkerStatus, budget: int, speed: float) -> StepModel:
    """The model of a worker that reports none: a step that decodes takes as long as recent steps, and prompts
    have this speed in tokens/s. `budget`: most tokens of a step."""
    step, tokens = status.step_seconds, max(2, budget)
    return StepModel((1, 2), (step, step), 0.0, (1, tokens), (1 / speed, tokens / speed), 0.0, 0.0)


@dataclass(slots=True)
class Offer:
    """A worker that may compute the prompt of a request, decode it, or both. Costs are in seconds of a first
    token.

    Attributes:
        row: of the worker.
        request: what is placed.
        target: seconds that users are ready to wait for a first token. 0: unknown, as the target of a gap.
        pace: of the worker. Without a target of a gap prompts are handed over.
        cached: tokens of the prompt that it has, or fetches.
        load: seconds until these are on its device.
        ahead: prompt tokens that it computes before this request.
        mean_prompt: tokens of a prompt that may come meanwhile.
        held_tokens: of the prompt, that it has now.
        spare: positions for which its cache forgets nothing that only this worker has.
        reuse: share of prompts that is cached.
        room: it has room to decode the request.
        encoding: seconds in which it encodes the images that it has not cached, nor was shown before, if it
            decodes nothing.
        adapter: seconds in which its steps stand still until the adapter is on its device.
        embeddings: of each image that encoders encode for it: its position, and seconds until it is encoded.
        arrives: seconds until KV that the prefill worker computes has come here. 0: not known.
        queues: more than one step of prompts, also of other routers, seems to be ahead of the request.
        first: seconds until the first token.
        within: seconds in which the prompt should be computed, if none is ahead.
        prompt_cost: of the prompt at this worker.
        tokens: of the prompt, that it would compute.
        gap_weight: seconds of a first token that a second more in each gap of an answer costs.
    """

    row: int
    request: PrefillRequest
    target: float
    pace: Pace
    cached: int = 0
    load: float = 0.0
    ahead: float = 0.0
    mean_prompt: float = 0.0
    held_tokens: int = 0
    spare: float = math.inf
    reuse: float = 0.0
    room: bool = True
    queues: bool = False
    encoding: float = 0.0
    embeddings: Sequence[tuple[int, float]] = ()
    adapter: float = 0.0
    arrives: float = 0.0
    first: float = field(init=False)
    within: float = field(init=False)
    prompt_cost: float = field(init=False)
    tokens: int = field(init=False)
    gap_weight: float = field(init=False)

    def __post_init__(self) -> None:
        pace, now = self.pace, self.pace.now
        self.tokens = self.request.tokens - self.cached
        self.gap_weight = self.target / pace.gap if pace.gap else 0.0
        stretch = now.stretch
        alone, wait = pace.model.prefill(self.tokens, self.cached) + self.encoding, self.ahead * pace.token
        within = self.load + self.adapter + stretch * alone + JOIN_STEPS * now.step
        first = within + stretch * wait
        for start, seconds in self.embeddings:
            last_part = stretch * pace.model.prefill(self.request.tokens - start, start)
            within = max(within, seconds + last_part + JOIN_STEPS * now.step)
        self.within, self.first = within, first if first > within else within
        self.prompt_cost = self.first + delayed(pace.behind, stretch * wait, stretch * alone)
        if pace.gap_cost:
            self.prompt_cost += self._added(alone) + pace.gap_cost * self.adapter

    def _added(self, alone: float) -> float:
        """Cost of the gaps that become longer by a prompt that takes `alone` seconds without decodes."""
        pace, now = self.pace, self.pace.now
        # A replacement engine decodes before it knows a gap target: its first reports have none, and no step.
        if not now.step or not pace.gap_cost or alone <= 0:
            return 0.0
        count = min(alone / now.prompts, pace.decodes * self.gap_weight / pace.gap_cost)
        longer = now.step + (now.long - now.step) * min(1.0, count) - now.base
        return pace.gap_cost * count * max(0.0, longer)

    def decode_cost(self) -> float:
        """Of the decode at this worker. 0: it is unknown."""
        pace, request = self.pace, self.request
        if not pace.gap:
            return 0.0
        answer, now, busy, late = request.answer, pace.now, pace.busy, pace.late
        request_gap_cost = self.gap_weight / answer
        then = pace.steps(pace.decodes + 1, pace.context + request.tokens, pace.gap_cost + request_gap_cost)
        gap, late_then = pace.gap_of(then, busy)
        gaps = request_gap_cost * late_then + pace.gap_cost * (late_then - late)
        if not busy:  # no prompt comes
            return answer * gaps
        prompt = pace.model.prefill(round(self.mean_prompt), pace.position)
        later = then.stretch - now.stretch
        if prompt > 0:
            later += JOIN_STEPS * (then.step - now.step) / prompt
        if not pace.decodes:  # its first step may compute prompts only
            gaps += request_gap_cost * busy * min(prompt, pace.model.prompt_seconds[-1]) / answer
        slower = busy * answer * gap * later / (1 - min(MOST_BUSY, busy * then.stretch))
        return answer * gaps + slower

    def memory_cost(self, answer: int = 0) -> float:
        """Of what its cache forgets for the prompt, and for so many tokens of the answer."""
        needed = self.request.tokens - self.held_tokens + answer
        forgotten = needed - self.spare
        if forgotten <= 0:
            return 0.0
        alone = forgotten * self.pace.token
        slower = self.pace.now.stretch * (1 + self.pace.behind)
        return self.reuse * (slower * alone + self._added(alone))

    @property
    def join_cost(self) -> float:
        """Of the waits for the step under way and for the adapter, if another worker computes the prompt."""
        pace = self.pace
        if not pace.gap:
            return 0.0
        waits = self.gap_weight * (pace.now.step + self.adapter) / self.request.answer
        return waits + pace.gap_cost * self.adapter


def _target(fleet: Fleet, gap: float) -> float:
    """Seconds that users are ready to wait for a first token, where `gap` is the target of a gap."""
    target = fleet.settings.ttft_target
    return TTFT_GAPS * gap if target is None else target


def gap_cost(fleet: Fleet, gap: float, answer: int) -> float:
    """What a second more in one gap of an answer with so many tokens costs, in seconds of a first token.
    `gap`: the target of a gap. 0: not known, as the result.

    0 for the only attached worker: it must compute every prompt, and a prompt that takes longer delays all
    that come after it. So its steps are as long as their bound (`long_seconds`)."""
    return 0.0 if not gap or len(fleet.workers) == 1 else _target(fleet, gap) / gap / answer


def sent_bytes(sender: pb.WorkerDescription, receiver: pb.WorkerDescription) -> int:
    """Of the KV of a token on its way between two workers: in the narrower of their formats."""
    return min(sender.kv_token_bytes, receiver.kv_token_bytes)


def offer(
    fleet: Fleet,
    request: PrefillRequest,
    row: int,
    cached: int,
    source: PrefixSource | None = None,
    *,
    load: float = 0.0,
    gap: float = 0.0,
    prefill: Offer | None = None,
) -> Offer:
    """The offer of a worker that has `cached` tokens of the prompt, and `load`s them for so many seconds.
    `source`: another worker with more of the prompt, whose tokens come sooner than they are computed.
    `gap`: as in `pace_of`. `prefill`: of the worker that would hand the prompt over to this one."""
    worker, loads = fleet.workers[row], fleet.loads
    status, sent, described = worker.status, worker.load, worker.description
    budget, held_tokens = described.max_num_batched_tokens, cached
    if source is not None:
        cached, load = cached + source.tokens, load + source.seconds
    pace = pace_of(fleet, worker, gap, request.answer)
    waiting = loads.tokens_waiting(row, fleet.now)
    encoding: float = 0.0
    embeddings: list[tuple[int, float]] = []
    if request.images:
        lacking = [image for image in request.images if image.stop > cached]
        encoding = status.encode_token_seconds * sum(
            image.stop - image.start for image in lacking if image.name not in worker.shown_images
        )
        if described.image_fingerprint:
            encoded_in = zip(request.images, request.encoded_in, strict=False)
            embeddings = [(image.start, late) for image, late in encoded_in if image.stop > cached]
    arrives = 0.0
    if prefill is not None and prefill.row != row and row in fleet.links.rows:
        sender = fleet.workers[prefill.row].description
        size = (request.tokens - held_tokens) * sent_bytes(sender, described)
        begins = fleet.now + prefill.first - prefill.within
        arrives = max(0.0, fleet.links.arrival(row, sender.incarnation, size, fleet.now, begins) - fleet.now)
    return Offer(
        row,
        request,
        _target(fleet, pace.gap),
        pace,
        cached,
        load,
        waiting,
        loads.prompts.value,
        held_tokens,
        status.blocks_spare * sent.block_size,
        loads.reused.value,
        sent.fits(request.tokens + 1),
        max(waiting, loads.router_tokens(row)) > budget,
        encoding,
        embeddings,
        loads.adapter_seconds(row, request.adapter) if request.adapter else 0.0,
        arrives,
    )


def pace_of(fleet: Fleet, worker: Seen, gap: float, answer: int) -> Pace:
    """That of the worker now. One that does not depend on the request is kept until a report comes, or until
    the number of decodes changes. `gap`: target of a gap in seconds, if the worker has not decoded. `answer`:
    tokens that are expected."""
    status, sent, kept = worker.status, worker.load, worker.pace
    if (model := worker.step_model) is None:
        speed = status.prefill_tokens_per_s or fleet.loads.speed(worker.row)
        model = reported_model(status, worker.description.max_num_batched_tokens, speed)
    decoding, decodes = status.requests_decoding, sent.running
    # Prompts of other routers count as running, too.
    if (prompts := status.requests_running - decoding) > 0:
        decodes -= prompts
    decodes = max(sent.router_requests, decodes)
    if kept is not None and kept[0] is status and kept[1].model is model and kept[1].decodes == decodes:
        return kept[1]
    context = costs = 0.0
    gap = status.gap_target_seconds or gap
    if decodes:
        context = status.decode_context * decodes / (decoding or 1)
        costs = decodes * (status.gap_cost / decoding if decoding else gap_cost(fleet, gap, answer))
    rate, position = fleet.loads.prompt_rate(worker.row), status.prefill_position
    by_decodes = kept[1].by_decodes if kept is not None and kept[1].model is model else {}
    pace = Pace(
        model, gap, decodes, context, costs, rate, position, status.mixed_step_tokens, by_decodes
    )  # fmt: skip
    if status.gap_target_seconds and (decoding or not decodes):
        worker.pace = status, pace
    return pace


def handover(
    prefill: Offer,
    decode: int,
    costs: Mapping[str, float] | None = None,
    arrives: float = 0.0,
) -> Plan:
    """The prefill worker computes the prompt, and the worker `decode` fetches the KV."""
    return Plan(
        "handover",
        (Range(prefill.row, 0, prefill.request.tokens),),
        decode,
        cached=prefill.cached,
        within=prefill.within,
        encoding=prefill.encoding,
        order="prefill" if prefill.queues and prefill.row != decode else "together",
        costs={"first_token": prefill.first} if costs is None else costs,
        arrives=arrives,
    )


def _inline(place: Place, worker: Offer, reason: Reason, costs: Mapping[str, float]) -> Plan:
    """One worker computes the prompt and decodes."""
    ranges = (Range(worker.row, 0, worker.request.tokens),)
    return Plan(
        place,
        ranges,
        worker.row,
        worker.cached,
        worker.within,
        worker.encoding,
        reason=reason,
        costs=costs,
    )


def place(prefill: Offer | None, decode: Offer, *, apart: bool = False) -> Plan:
    """Returns where a request goes: the plan with the least cost.

    `prefill`: the chosen prefill worker. None: there is none, so the decode worker computes the prompt.
    `apart`: the prefill worker decodes nothing."""
    answer = decode.request.answer
    cost = decode.decode_cost() + decode.memory_cost(answer)
    inline = decode.prompt_cost + cost if decode.pace.gap else math.inf
    if prefill is None:  # the only way to compute the prompt
        return _inline("decode", decode, "no_prefill", {"decode": inline})
    late = max(0.0, decode.arrives - prefill.first)
    joined = late + decode.join_cost + cost
    costs = {"handover": prefill.prompt_cost + prefill.memory_cost() + joined, "decode": inline}
    if prefill.room and prefill.pace.gap and not apart:
        costs["prefill"] = prefill.prompt_cost + prefill.decode_cost() + prefill.memory_cost(answer)
    least = min(costs.values())
    if least == costs["handover"]:
        return handover(prefill, decode.row, costs, decode.arrives)
    if least == inline:
        return _inline("decode", decode, _reason(decode), costs)
    return _inline("prefill", prefill, "no_handover", costs)


def place_without_room(prefills: Sequence[Offer]) -> Plan | None:
    """Returns where a request goes while no decode worker can take it: to the prefill worker with room to
    decode it that costs least. Of two, the earlier offer. None: it waits."""
    roomy = [(offer.prompt_cost + offer.decode_cost(), offer) for offer in prefills if offer.room]
    if not roomy:
        return None
    cost, best = min(roomy, key=itemgetter(0))
    return _inline("prefill", best, "no_room", {"prefill": cost})


def _reason(offer: Offer) -> Reason:
    """Says why the decode worker has the tokens of this prompt before a handover would.

    `short`: its queue and the prompt are small. `cached`: its queue and the uncached part are. `saturated`:
    they are not, so only the queue or the speed of the prefill worker can be the cause.
    """
    if offer.ahead + offer.request.tokens <= LARGE:
        return "short"
    if offer.ahead + offer.tokens <= LARGE:
        return "cached"
    return "saturated"


WINDOW_STEPS = 2
"""Steps of prompts for each prefill worker: one that it computes, and one to schedule from. With fewer it
would idle between two steps. What is beyond waits in the router, where keys take turns. It is the depth of
the engine's loop, so no speed can replace it."""


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


def prefill_window(budgets: list[int], speed: float, decodes: list[pb.WorkerStatus]) -> PrefillWindow:
    """`budgets`, `speed`: of the prefill workers, the tokens of a step of each, and the tokens/s of all
    together. `decodes`: the decode workers that compute prompts too."""
    if not budgets:
        tokens = sum(status.long_chunk_tokens for status in decodes)
        return PrefillWindow(WINDOW_STEPS * tokens, tokens / len(decodes) if tokens else math.inf)
    spare = sum(
        each.long_chunk_tokens / each.long_chunk_seconds for each in decodes if each.long_chunk_seconds
    )
    share = 1 + (spare / speed if speed else 0.0)
    return PrefillWindow(WINDOW_STEPS * sum(budgets) * share, sum(budgets) / len(budgets))
