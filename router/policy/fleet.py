"""The workers as one router sees them when it plans a request."""

import random
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import KW_ONLY, dataclass, field

from baton.router.policy.decode import CACHED_PRESSURE, DecodeLoad, DecodePool, two_choices
from baton.router.policy.links import Links
from baton.router.policy.pace import Pace
from baton.router.policy.prefill import PrefillPolicy, PrefillRequest, PrefillSnapshot
from baton.router.policy.prefill_loads import PrefillLoads
from baton.router.policy.settings import DEFAULT_SETTINGS, PlanSettings
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import StepModel


@dataclass(eq=False, repr=False)
class Seen:
    """A worker as plans see it. `workers.worker.Worker` is one with its connection."""

    address: str
    _: KW_ONLY
    row: int = -1
    """Its row in the tables of the policies. -1: it is not attached."""
    pool: "pb.Pool" = pb.POOL_UNSPECIFIED
    """In which the worker gets new work: that of the last report, or else its first."""
    description: pb.WorkerDescription = field(default_factory=pb.WorkerDescription)
    """Of the attached incarnation, or of the last one."""
    status: pb.WorkerStatus = field(default_factory=pb.WorkerStatus)
    """The last report."""
    step_model: StepModel | None = None
    """What its steps cost, as of the last report. None: not known."""
    prefix_links: dict[tuple[int, int], pb.PrefixLink] = field(default_factory=dict)
    """Those of the last report, by incarnation and tier of the other worker."""
    load: DecodeLoad = field(init=False)
    """What the router knows of its decodes, in either pool, while it is attached."""
    pace: tuple[pb.WorkerStatus, Pace] | None = None
    """That of the last plan, with the report that it follows from. Reports come once a second, and many
    requests are planned between two."""
    shown_images: OrderedDict[bytes, int] = field(default_factory=OrderedDict)
    """By name, tokens of those whose pixels it got from this router. It should keep their embeddings."""
    retired: bool = False
    """It gets no new work."""

    @property
    def ready(self) -> bool:
        """Whether the worker takes new work."""
        return not self.retired

    def ready_in(self, pool: "pb.Pool") -> bool:
        """Whether the worker takes new work of this pool."""
        return self.ready and self.pool == pool


@dataclass(kw_only=True)
class Fleet:
    """A plan reads it and changes nothing. `Desk` keeps it.

    Attributes:
        now: the time of the last event, by the clock of `loads`.
        named: the attached workers by address.
        workers: the same by row.
        attached_rows: these rows, as a set of bits.
        prefills, decodes: those that get new work of the pool.
        links: those that KV comes on.
        promised_slots, promised_positions: room at decode workers that prompts need when they start.
        policy: chooses prefill workers.
        apart: prefill workers leave all decodes to decode workers with room, as in `regime`.
        had_decode: the decode pool had a worker once.
    """

    now: float
    rng: random.Random
    named: dict[str, Seen]
    workers: dict[int, Seen]
    attached_rows: int
    prefills: DecodePool
    decodes: DecodePool
    loads: PrefillLoads
    policy: PrefillPolicy
    links: Links = field(default_factory=Links)
    promised_slots: int = 0
    promised_positions: int = 0
    settings: PlanSettings = DEFAULT_SETTINGS
    apart: bool = False
    had_decode: bool = False

    @property
    def lost_decode(self) -> bool:
        """The decode pool has lost its last worker. A pool that never had one is only starting."""
        return self.settings.overflow and self.had_decode and not self.decodes

    @property
    def decoders(self) -> DecodePool:
        """The workers that decode new requests: prefill workers, if the decode pool has none any more."""
        return self.prefills if self.lost_decode else self.decodes

    def has_weights(self, version: str, rows: Iterable[int | None]) -> bool:
        """Whether all of these workers have the weights of this version."""
        return all(row is None or self.workers[row].description.weights.version == version for row in rows)

    def can_ever_hold(self, tokens: int) -> bool:
        """Whether an idle worker that decodes has blocks for so many positions."""
        return any(load.blocks_total * load.block_size >= tokens for load in self.decoders)

    def prefill_snapshot(self, request: PrefillRequest) -> PrefillSnapshot | None:
        """The prefill workers that may be chosen; None if there are none."""
        avoided: Collection[int] = ()
        if request.avoid:
            listed = [self.named.get(address) for address in request.avoid]
            avoided = {worker.row for worker in listed if worker is not None and worker.row >= 0}
        return self.loads.snapshot(request, self.now, avoided)

    def choose_decode(
        self, request: PrefillRequest, tokens: int, *, promised: bool = False
    ) -> tuple[int, int] | None:
        """Chooses a decode worker with room for `tokens` positions. Returns its row, and how many of them it
        has cached. None: there seems to be no room. Promised room stays free, except for a request that it is
        `promised` to."""
        if self.promised_slots and not promised:
            free = self.decodes.free
            if free.slots <= self.promised_slots or free.positions < self.promised_positions + tokens:
                return None
        chosen = self.decodes.choose(tokens, self.rng, request.avoid)
        if chosen is None:
            return None
        if request.adapter:
            chosen = self._with_adapter(chosen, request, tokens)
        return self.nearest(chosen, request)

    def nearest(self, chosen: DecodeLoad, request: PrefillRequest) -> tuple[int, int]:
        """Returns the row of the worker to decode the prompt, and its number of cached tokens: `chosen`, or a
        worker with room that has the most of the prompt cached, such as its last turn.

        The latter gets less KV, and shares its blocks. But it must not be much more loaded than `chosen`."""
        pool = self.decodes
        cached = self.loads.index.overlap(request.chunks, request.tokens, pool.block_size, pool.rows)
        cached_tokens, most = cached.of(chosen.row), cached.most
        if cached_tokens < most:
            loads = [
                load
                for row in cached.holders()
                if (load := self.workers[row].load).fits(request.tokens + 1)
                and load.worker not in request.avoid
            ]
            best = two_choices(loads, self.rng)
            if best is not None and best.pressure <= chosen.pressure + CACHED_PRESSURE:
                return best.row, most
        return chosen.row, cached_tokens

    def _with_adapter(self, chosen: DecodeLoad, request: PrefillRequest, tokens: int) -> DecodeLoad:
        """Returns a decode worker that has the adapter of the request on its device, and is not much more
        loaded than the chosen one. Else the chosen one."""
        seconds = self.loads.adapter_seconds
        if not seconds(chosen.row, request.adapter):
            return chosen
        most = chosen.pressure + CACHED_PRESSURE
        near = [
            load
            for load in self.decodes
            if load.fits(tokens)
            and load.pressure <= most
            and load.worker not in request.avoid
            and not seconds(load.row, request.adapter)
        ]
        return two_choices(near, self.rng) or chosen
