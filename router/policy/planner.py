"""Plans a request from what workers hold of it, and from what the router knows of all workers.

    plan(request, held, fleet) ─▶ Plan   to be submitted
                               └▶ Lack   what the request waits for

The same function plans the first start of a request and what follows each failure: a failure only ends what
it has destroyed, and the rest is held. In this order:

1. A prefill worker computes the prompt, or has its KV: a decode worker with room fetches it, or that worker
   goes on itself.
2. The next token needs no decode worker: a prefill worker computes it.
3. A decode worker holds memory: it keeps that, and another worker computes prompt and output.
4. No worker holds anything: `placement` compares a handover with one worker that does all, and `split` looks
   whether several workers are faster. Without room at decode workers, a prefill worker with room does all.

Pure: the same arguments and draws give the same plan.
"""

import math
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from operator import itemgetter

from baton.kv_names import CHUNK_TOKENS, Tier
from baton.router.policy import placement, split
from baton.router.policy.fleet import Fleet, Seen
from baton.router.policy.placement import Offer
from baton.router.policy.plan import Plan, Range, Reason
from baton.router.policy.prefill import PrefillRequest, PrefillSnapshot
from baton.router.policy.prefixes import Prefixes
from baton.rpc import worker_pb2 as pb

_MOST_NAMES = 4096
"""Of what a worker computes on. No machine has more CPUs."""


class Lack(Enum):
    """Why there is no plan."""

    ROOM = "room"
    """Decode workers have none now, or none with room has the weights of the worker that computes."""
    PREFILL = "prefill"
    """There is no such worker."""
    DECODE = "decode"
    """No worker that decodes can ever hold the request."""
    TURN = "turn"
    """The decode worker that holds memory is of no use any more. Another one gets the request in its turn."""


@dataclass(frozen=True, slots=True)
class Held:
    """What workers have of a request. Workers are named by their rows.

    Attributes:
        prefill: computes the prompt, or has its KV. None: no worker does.
        has_kv: its KV is computed, or several workers compute it.
        queues: room at a decode worker is promised to it.
        tokens: positions of its KV.
        decode: has reserved memory, and waits for KV. None: no worker does.
    """

    prefill: int | None = None
    has_kv: bool = False
    queues: bool = False
    tokens: int = 0
    decode: int | None = None


NOTHING = Held()


def plan(request: PrefillRequest, held: Held, fleet: Fleet) -> Plan | Lack:
    if (version := request.version) is not None:  # what others hold ends with the next plan
        if not fleet.has_weights(version, [held.prefill]):
            held = Held(decode=held.decode)
        if not fleet.has_weights(version, [held.decode]):
            held = replace(held, decode=None)
    prefixes = Prefixes(fleet, request)
    draft = _plan(request, held, fleet, prefixes)
    if isinstance(draft, Lack):
        return draft
    if version is not None:
        rows = [draft.decode, *(part.worker for part in draft.ranges)]
        if not fleet.has_weights(version, rows):
            return Lack.ROOM
    gap_cost = 0.0
    if draft.decode is not None:
        gap = fleet.workers[draft.decode].status.gap_target_seconds
        gap_cost = placement.gap_cost(fleet, gap, request.answer)
    source = prefixes.source(draft.ranges[0].worker) if len(draft.ranges) == 1 else None
    return Plan(*draft[:-2], gap_cost, source)  # `_replace` takes 3 µs


def _plan(request: PrefillRequest, held: Held, fleet: Fleet, prefixes: Prefixes) -> Plan | Lack:
    if request.pair is not None:
        return _proof(request, held, fleet, *request.pair)
    if held.prefill is not None:
        return _decode_of(request, held, held.prefill, fleet)
    if request.one_token and (offer := _offer(request, fleet, prefixes)) is not None:
        return placement.handover(offer, offer.row)._replace(place="one_token", decode=None)
    if held.decode is not None:
        return Lack.TURN if request.one_token else _prefill_for(request, held.decode, fleet, prefixes)
    return _first(request, fleet, prefixes)


def _proof(request: PrefillRequest, held: Held, fleet: Fleet, computes: str, decodes: str) -> Plan | Lack:
    """A handover between two named workers, whatever it costs."""
    prefill, decode = fleet.named.get(computes), fleet.named.get(decodes)
    if prefill is None or not prefill.ready:
        return Lack.PREFILL
    if decode is None or not decode.ready:
        return Lack.DECODE
    if held.decode is None and not decode.load.fits(request.tokens + 1):
        return Lack.ROOM
    if held.prefill is not None:
        return Plan("held", decode=decode.row)
    return placement.handover(placement.offer(fleet, request, prefill.row, 0), decode.row)


def _first(request: PrefillRequest, fleet: Fleet, prefixes: Prefixes) -> Plan | Lack:
    """No worker holds anything."""
    chosen = fleet.choose_decode(request, request.tokens + 1)
    if chosen is None:
        return _without_room(request, fleet, prefixes) or _no_decode(request.tokens + 1, fleet)
    decode, cached = chosen
    offer = _offer(request, fleet, prefixes, fleet.workers[decode].status.gap_target_seconds)
    if fleet.settings.overflow:
        of_decode = placement.offer(fleet, request, decode, cached, prefixes.source(decode), prefill=offer)
        draft = placement.place(offer, of_decode, apart=fleet.apart)
    elif offer is not None:
        draft = placement.handover(offer, decode)
    else:
        return Lack.PREFILL
    spared = draft.costs["handover"] - min(draft.costs.values()) if "handover" in draft.costs else 0.0
    if offer is not None and (shared := _split(request, offer, decode, spared, fleet)) is not None:
        return shared
    if request.interrupted and not draft.inline:
        return draft._replace(order="decode")
    return draft


def _prefill_for(request: PrefillRequest, decode: int, fleet: Fleet, prefixes: Prefixes) -> Plan | Lack:
    """Another worker computes the KV for this decode worker."""
    gap = fleet.workers[decode].status.gap_target_seconds
    offer = _offer(_without(request, fleet, decode), fleet, prefixes, gap)
    if offer is None:
        return Lack.TURN if fleet.settings.overflow else Lack.PREFILL
    if offer.row == decode:  # a worker does not fetch from itself, and there is no other
        return Lack.TURN if fleet.decodes else _inline(request.tokens, decode, "no_decode")
    shared = _split(request, offer, decode, 0.0, fleet)
    return shared or placement.handover(offer, decode)


def _decode_of(request: PrefillRequest, held: Held, prefill: int, fleet: Fleet) -> Plan | Lack:
    """A worker decodes what this prefill worker has, or computes."""
    asked = replace(_without(request, fleet, prefill), tokens=held.tokens)
    chosen = fleet.choose_decode(asked, held.tokens + 1, promised=held.queues)
    decode = None if chosen is None else chosen[0]
    if decode is None and fleet.lost_decode and fleet.workers[prefill].ready_in(pb.POOL_PREFILL):
        decode = prefill
    if decode is None:
        return _no_decode(held.tokens + 1, fleet)
    if decode != prefill or held.has_kv:
        return Plan("held", decode=decode)
    # A worker does not fetch from itself what it has not computed.
    return _inline(request.tokens, decode, "no_prefill" if fleet.decodes else "no_decode")


def _inline(tokens: int, worker: int, reason: Reason) -> Plan:
    """The only worker that is left computes the prompt and decodes."""
    place = "decode" if reason == "no_prefill" else "prefill"
    return Plan(place, (Range(worker, 0, tokens),), worker, reason=reason)


def _no_decode(tokens: int, fleet: Fleet) -> Lack:
    return Lack.ROOM if fleet.can_ever_hold(tokens) else Lack.DECODE


def _without(request: PrefillRequest, fleet: Fleet, worker: int) -> PrefillRequest:
    """The request with one more worker that is chosen only if there is no other."""
    return replace(request, avoid={*request.avoid, fleet.workers[worker].address})


def _offer(request: PrefillRequest, fleet: Fleet, prefixes: Prefixes, gap: float = 0.0) -> Offer | None:
    """That of the prefill worker that the policy chooses; None without prefill workers. `gap`: as in
    `placement.offer`."""
    snapshot = fleet.prefill_snapshot(request)
    if snapshot is None:
        return None
    return _prefill_offer(fleet, snapshot, request, fleet.policy(snapshot, request), prefixes, gap)


def _prefill_offer(
    fleet: Fleet,
    snapshot: PrefillSnapshot,
    request: PrefillRequest,
    row: int,
    prefixes: Prefixes,
    gap: float = 0.0,
) -> Offer:
    cached, load = snapshot.cached.of(row), snapshot.load(row)
    return placement.offer(fleet, request, row, cached, prefixes.source(row), load=load, gap=gap)


def _without_room(request: PrefillRequest, fleet: Fleet, prefixes: Prefixes) -> Plan | None:
    """A prefill worker computes the request and decodes it, while no decode worker has room for the request,
    or while there is no decode worker. None: the request has to wait."""
    if not fleet.settings.overflow or not fleet.decoders:
        return None
    snapshot = fleet.prefill_snapshot(request)
    if snapshot is None:
        return None
    rows = snapshot.compared(
        fleet.policy(snapshot, request),
        lambda row: fleet.workers[row].load.fits(request.tokens + 1),
        fleet.rng,
    )
    offers = [_prefill_offer(fleet, snapshot, request, row, prefixes) for row in rows]
    draft = placement.place_without_room(offers)
    return draft._replace(reason="no_decode") if draft is not None and fleet.lost_decode else draft


def _split(request: PrefillRequest, offer: Offer, decode: int, spared: float, fleet: Fleet) -> Plan | None:
    """Several workers compute the prompt, the first of them that of the offer. If `decode` has nothing to
    decode it may have the last range, so its KV need not be handed over. None: one worker computes the
    prompt, since that takes about as long. `spared`: as in `split.split`.

    A worker that decodes takes no part: its requests would wait for other workers."""
    first = fleet.workers[offer.row]
    if not (fleet.settings.split_prompts and request.may_split and _takes_part(first)):
        return None
    loads, now = fleet.loads, fleet.now
    gap = fleet.workers[decode].status.gap_target_seconds
    of_first = _split_worker(request, first, first, loads.tokens_waiting(first.row, now), fleet, gap)
    if not split.may_gain(offer.tokens, of_first):
        return None
    # The workers of a plan compute what one worker could read from the shared store.
    if first.status.store == "open" and loads.index.only_stored(first.row, request.chunks):
        return None
    drawn = (
        (loads.tokens_waiting(row, now), row, worker)
        for row in loads.draw(2 * split.MOST_WORKERS, fleet.rng)
        if row not in (first.row, decode)
        and _takes_part(worker := fleet.workers[row])
        and worker.address not in request.avoid
    )
    free = sorted(drawn, key=itemgetter(0))
    # Until a prompt that queues begins, the worker would decode others.
    last, ends = fleet.workers[decode], None
    may_decode = (
        fleet.settings.overflow
        and last is not first
        and not offer.queues
        and last.address not in request.avoid
    )
    if may_decode and _takes_part(last):
        ends = decode, _split_worker(request, last, first, loads.tokens_waiting(decode, now), fleet, gap)
    if not free and ends is None:
        return None
    cost = split.PromptCost(
        request.tokens,
        cached=request.tokens - offer.tokens,
        doubles_at=first.description.attention_doubles_at,
        layers=max(1, first.description.num_layers),
    )
    others = (
        (row, _split_worker(request, worker, first, waiting, fleet, gap)) for waiting, row, worker in free
    )
    draft = split.split(cost, chain([(first.row, of_first)], others), ends, spared)
    arrives = _split_arrives(request, draft, decode, fleet) if draft is not None else 0.0
    if draft is None or _comes_late(draft, arrives, spared):
        return None
    order = "prefill" if offer.queues and draft.ranges[-1].worker != decode else "together"
    return draft._replace(decode=decode, within=offer.within, order=order, arrives=arrives)


def _split_arrives(request: PrefillRequest, draft: Plan, decode: int, fleet: Fleet) -> float:
    """Seconds until the last worker of a split has handed the KV over. 0: not known, or it decodes itself."""
    if (sender := fleet.workers[draft.ranges[-1].worker]).row == decode:
        return 0.0
    cached = fleet.loads.index.overlap(request.chunks, request.tokens, CHUNK_TOKENS, 1 << decode).of(decode)
    receiver = fleet.workers[decode].description
    size = (request.tokens - cached) * placement.sent_bytes(sender.description, receiver)
    arrival = fleet.links.arrival(decode, sender.description.incarnation, size, fleet.now)
    return max(0.0, arrival - fleet.now)


def _comes_late(draft: Plan, arrives: float, spared: float) -> bool:
    """Whether a split whose KV arrives then is no gain any more."""
    seconds, costs = draft.costs["split"], draft.costs
    return arrives > seconds and arrives + costs["harm"] >= costs["unsplit"] - spared


def _split_worker(
    request: PrefillRequest, worker: Seen, first: Seen, waiting: float, fleet: Fleet, gap: float
) -> split.SplitWorker:
    """`waiting`: prompt tokens that it has to compute. `gap`: as in `placement.pace_of`."""
    status, loads, described = worker.status, fleet.loads, worker.description
    pace = placement.pace_of(fleet, worker, gap, request.answer)
    speed = max(1.0, status.prefill_tokens_per_s or loads.speed(first.row))
    fetches = worker.prefix_links.get((first.description.incarnation, Tier.DEVICE))
    rate, free_at = fleet.links.rate(worker.row, first.description.incarnation, fleet.now)
    link = math.inf if fetches is None else fetches.tokens_per_s
    return split.SplitWorker(
        wait=waiting / speed,
        speed=split.first_speed(speed, status, described.attention_doubles_at),
        step=described.max_num_batched_tokens,
        floor=status.fastest_step_seconds,
        link=min(link, rate / max(1, placement.sent_bytes(first.description, described))),
        link_wait=max(0.0, free_at - fleet.now),
        behind=pace.behind,
        variance=split.wait_variance(
            loads.others_share.value,
            loads.prompts.value / speed,
            loads.unreported(worker.row, fleet.now),
            pace.behind,
        ),
        computes_on=frozenset(described.computes_on[:_MOST_NAMES]),
    )


def _takes_part(worker: Seen) -> bool:
    """Whether the worker may compute a part of a prompt now."""
    # What ended since the last report is known of the requests of this router.
    decodes = worker.load.router_requests or min(worker.status.requests_decoding, worker.load.running)
    return worker.ready and worker.description.attention_doubles_at > 0 and not decodes
