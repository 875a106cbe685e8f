"""The engine: one visible step, schedule → run → postprocess.

On a GPU the host does not wait between *launch* (schedule and run) and *landing* (postprocess): the next step
is launched while this one is being computed, its tokens unknown, and begins with them on the device (overlap
scheduling, as in SGLang's and mini-sglang's zero-overhead scheduler). Two steps at most are under way. Who
turns out to have ended is in one step too many: its row there is ignored, and its blocks are free after that.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch

from engine.batch import build_batch
from engine.block_pool import BlockPool
from engine.chunk_limit import ChunkLimit
from engine.config import EngineConfig
from engine.flight import Flight, Landings, Moment, moment
from engine.grammar import Grammars
from engine.kernels import kernels_for
from engine.live_request import LiveRequest, Phase
from engine.loader import load_model, open_checkpoint
from engine.memory import MemoryUse, choose_limits, memory_for, size_pool
from engine.meters import Meters
from engine.model_runner import ModelRunner
from engine.pace import Pace
from engine.request import (
    CacheObserver,
    EngineRequest,
    EngineStats,
    KVSink,
    Logprobs,
    Output,
    PrefillChunk,
    StepResult,
    check_request,
)
from engine.sampler import NO_CHOICE, NOT_FINITE
from engine.scheduler import Scheduler
from engine.step_graphs import LARGEST
from engine.warm_up import measure_steps, plan_rehearsal, warm_up

GRAMMAR_WAIT = 0.05
"""Seconds that a step with nothing to compute waits for a grammar."""


def _nothing(*_: object) -> None:
    pass


class Engine:
    """One model and its KV cache. All calls come from one thread; nothing happens between them.

    For the one who moves KV: `kv_cache` has one tensor [2 (K, V), num_blocks, block_size, num_kv_heads,
    head_dim] per layer. The engine owns it; a request's blocks may be read while it is prefilled and held,
    and written while it is reserved. Position p of a request is in slot
    block_table[p // block_size] * block_size + p % block_size.

    `source` is the checkpoint's directory or file.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        kv_sink: KVSink | None = None,
        cache_observer: CacheObserver | None = None,
        tick: Callable[[], None] = _nothing,
        computing: Callable[[Collection[bytes]], None] = _nothing,
        progress: Callable[[str, float], None] = _nothing,
    ) -> None:
        """Loads the model. `tick`, a sign of life, is called for each tensor loaded and each layer of a step;
        `computing` with the ids of all that is under way whenever that changes, so that somebody else can
        tell whom a crash is about; `progress(stage, fraction)` tells how far the start is. Raises
        `ValueError` on what users can mend."""
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        self.device = torch.device(config.device)
        self._config = config
        self._kv_sink = kv_sink
        self._tick = tick
        self._computing = _nothing

        def starting(stage: str, fraction: float) -> None:
            tick()
            progress(stage, fraction)

        checkpoint = open_checkpoint(config, self.device)
        limits = choose_limits(config, checkpoint.config, self.device)
        self.dtype = limits.dtype
        self.block_size = limits.block_size
        with memory_for("the weights", "choose a smaller --model"):
            model, self.model_fingerprint = load_model(
                checkpoint, limits.max_model_len, self.dtype, self.device, starting
            )
        self.model_config = replace(checkpoint.config, max_model_len=limits.max_model_len)
        self.source = checkpoint.source
        self._grammars = Grammars(self.source, self.model_config.vocab_size, self.model_config.eos_ids)
        self._runner = ModelRunner(
            model,
            kernels_for(self.device, self.model_config.head_dim),
            self._grammars,
            self.model_config,
            dtype=self.dtype,
            block_size=self.block_size,
            max_num_seqs=config.max_num_seqs,
            device=self.device,
        )
        self._overlap = False
        self._flights: list[Flight] = []  # in the order of their launch
        self._moment: Callable[[], Moment] = partial(moment, self.device)
        self._landings = Landings()

        use = self._measure(starting) if self.device.type == "cuda" else None
        pool = size_pool(config, self.model_config, limits, use)
        self.model_config = replace(self.model_config, max_model_len=pool.max_model_len)
        with memory_for("the KV pool", "lower --num-blocks or --gpu-memory-utilization"):
            self._open(pool.num_blocks)
            if self.device.type == "cuda":
                warm_up(self, plan_rehearsal(config, pool.max_model_len), starting)
                if config.cuda_graphs:
                    self._runner.capture(
                        config.max_num_batched_tokens,
                        by_layer=kv_sink is not None,
                        progress=lambda done: starting("capturing graphs", done),
                    )
        self._overlap = self.device.type == "cuda" if config.overlap is None else config.overlap
        self._begin(cache_observer, self.model_fingerprint if config.enable_prefix_caching else None)
        self._computing = computing

    def _measure(self, progress: Callable[[str, float], None]) -> MemoryUse:
        """What the largest step takes beside the weights, tried on a small cache, the same for all layers."""
        rehearsal = plan_rehearsal(self._config, self.model_config.max_model_len)
        weights = torch.cuda.memory_allocated(self.device)
        with memory_for("the largest step", "lower --max-num-batched-tokens or --max-num-seqs"):
            self._open(rehearsal.num_blocks(self.block_size), layers=1)
            step = measure_steps(self, rehearsal, self.device, progress)
        self._runner.close()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        graphs = 0
        if self._config.cuda_graphs:
            graphs = step.decode + step.any * LARGEST // max(LARGEST, self._config.max_num_batched_tokens)
        return MemoryUse(total, free, weights, step.any, graphs)

    def _open(self, num_blocks: int, layers: int | None = None) -> None:
        """An empty cache, and nobody there."""
        self.num_blocks = num_blocks
        self._runner.open(num_blocks, layers)
        self._begin()

    def _begin(self, cache_observer: CacheObserver | None = None, prefix_cache: str | None = None) -> None:
        self._scheduler = Scheduler(
            BlockPool(self.num_blocks),
            block_size=self.block_size,
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            prefix_cache_root=prefix_cache.encode() if prefix_cache else None,
            cache_observer=cache_observer,
        )
        self._meters = Meters()
        self._chunk_limit = ChunkLimit(self._config.ttit_target, self._config.max_num_batched_tokens)
        self._pace = Pace()
        assert not self._flights

    # One step

    def step(self) -> StepResult:
        """Launches the next step, if one may be, and sees to the oldest that is over; if it could not launch
        any, it waits for that. So the tokens of a step come with this call or, on a GPU, a later one."""
        result = StepResult()
        launched = self._may_launch and self._launch(result)
        if self._flights and (not launched or not self._overlap or self._flights[0].over):
            self._land(self._flights.pop(0), result)
            if self._flights and self._flights[0].sampling is None:
                self._sample(self._flights[0])
        return result

    @property
    def _may_launch(self) -> bool:
        if not self._flights:
            return True
        return self._overlap and len(self._flights) == 1 and self._scheduler.may_look_ahead

    def _launch(self, result: StepResult) -> bool:
        """False: there was nothing to compute."""
        started = time.monotonic()
        plan = self._scheduler.schedule(self._chunk_limit.tokens)
        for live in plan.started:
            live.started = live.started or started
        result.preempted += [live.id for live in plan.handed_back]
        self._meters.count(plan)
        self._announce(plan.started)
        if not plan.chunks:
            if not self._flights:
                self._grammars.wait(GRAMMAR_WAIT)
            return False
        ids = frozenset([chunk.live.id for chunk in plan.chunks])
        self._computing(ids.union(*(flight.ids for flight in self._flights)))
        batch = build_batch(plan.chunks, self.block_size, self._runner.table_width)
        moved = [PrefillChunk(c.live.id, c.start, c.stop) for c in plan.chunks if c.live.handover]

        def layer_done(layer: int) -> None:
            self._tick()
            if moved and self._kv_sink is not None:
                self._kv_sink.layer_done(layer, moved)

        began = self._moment()
        flight = Flight(plan, ids, self._runner.run(batch, layer_done), began)
        self._scheduler.launched(plan.chunks)
        self._flights.append(flight)
        if not flight.waits:
            self._sample(flight)
        size = flight.computed.size
        only_decodes = size is not None and not size.chunks
        self._pace.launched(size if only_decodes else None, started, time.monotonic())
        return True

    def _sample(self, flight: Flight) -> None:
        flight.sampling = self._runner.sample(flight.computed)
        flight.ended = self._moment()
        for row, live in enumerate(flight.sampled):
            live.promise(row)
        self._landings.expect(flight)

    def _announce(self, started: Sequence[LiveRequest]) -> None:
        for live in started:
            if live.handover and self._kv_sink is not None:
                self._kv_sink.prefill_started(
                    live.id, tuple(live.blocks), len(live.token_ids), live.num_cached
                )

    def _land(self, flight: Flight, result: StepResult) -> None:
        """Waits until it is over, and sees each request on: to its next token, its handover, its end."""
        flight.wait()
        self._tick()
        plan = flight.plan
        seconds = result.seconds = flight.seconds
        self._pace.landed(seconds, time.monotonic())
        self._meters.record(plan, seconds)
        self._chunk_limit.record(plan.decodes, plan.prompt_tokens, seconds)
        self._computing(frozenset().union(*(later.ids for later in self._flights)))
        self._scheduler.landed(plan.chunks)
        sampling = flight.sampling
        assert sampling is not None, "a step is sampled before it lands"
        if sampling.tokens is None:
            return
        logprobs = sampling.logprobs.by_row(flight.sampled) if sampling.logprobs else {}
        for row, (live, token) in enumerate(zip(flight.sampled, sampling.tokens.tolist(), strict=True)):
            if live.phase is Phase.GONE:
                continue  # it ended while this step was under way
            if row in sampling.refused:
                result.refused.append((live.id, sampling.refused[row]))
                self._leave_batch(live)
            elif token == NOT_FINITE:
                result.failed.append((live.id, "the model's logits are not finite numbers"))
                self._leave_batch(live)
            elif token == NO_CHOICE:
                result.refused.append((live.id, "its sampling parameters leave no token to choose from"))
                self._leave_batch(live)
            else:
                position = live.learn(token)
                self._scheduler.verified(live, position)
                result.outputs.append(self._emit(live, position, logprobs.get(row)))

    def _emit(self, live: LiveRequest, position: int, logprobs: Logprobs | None) -> Output:
        """The token at this position is known; what that means for its request."""
        finish_reason = live.finish_reason(position, self.model_config.eos_ids)
        if finish_reason or live.handover:
            self._leave_batch(live)
        request = live.request
        index, token = position - len(request.prompt_ids), live.token_ids[position]
        queued = prefilled = 0.0
        if live.started is not None and index == len(request.output_ids):
            queued, prefilled = live.started - live.arrived, time.monotonic() - live.started
        return Output(live.id, index, token, logprobs, finish_reason, live.num_cached, queued, prefilled)

    def _leave_batch(self, live: LiveRequest) -> None:
        """Nothing more is computed for it. Whoever takes over its KV may still be reading the blocks, also
        where the first token was the last: only `release` says that this is over."""
        if live.handover:
            self._scheduler.hold(live)
        else:
            self._scheduler.drop(live)

    # The life of a request

    def add(self, request: EngineRequest, *, handover: bool = False) -> None:
        """Queues a request for prefill. With `handover` it is held after its first token, whichever that is:
        its blocks keep the KV of prompt and given output until `release`. Raises `ValueError` if the request
        can never be served."""
        self._validate(request)
        self._prepare(self._scheduler.add(request, handover=handover))

    def reserve(self, request: EngineRequest) -> Sequence[int] | None:
        """Sets aside blocks for prompt + output + 1 positions; the caller will write KV of all but the last
        into `kv_cache`. Returns the block table; None: no room now. Raises `ValueError` if there never is."""
        self._validate(request)
        live = self._scheduler.reserve(request)
        if live is None:
            return None
        self._prepare(live)
        return tuple(live.blocks)

    def start(self, request: EngineRequest) -> Sequence[int] | None:
        """Gives a request blocks at once and prefills it here, beside those that decode and within what these
        are promised; it then decodes. Returns its block table; None: no room now. Raises `ValueError` if
        there never is."""
        self._validate(request)
        live = self._scheduler.start(request)
        if live is None:
            return None
        live.started = time.monotonic()
        self._prepare(live)
        return tuple(live.blocks)

    def extend_reservation(self, request_id: bytes, output_ids: Sequence[int]) -> Sequence[int] | None:
        """The reservation shall be for a longer output. Returns its block table, which begins with
        the old one. None: no room, the reservation is unchanged."""
        live = self._scheduler.requests[request_id]
        extended = self._scheduler.extend_reservation(live, list(output_ids))
        return tuple(live.blocks) if extended else None

    def join(self, request_id: bytes, token: int, logprobs: Logprobs | None = None) -> Output:
        """All KV of a reservation is in its blocks: it takes part in the next step, with `token`, the first
        that was sampled from this KV, as input. Returns the output for that token, which may be the last."""
        live = self._scheduler.requests[request_id]
        self._scheduler.join(live)
        live.token_ids.append(token)
        return self._emit(live, len(live.token_ids) - 1, logprobs)

    def release(self, request_id: bytes) -> None:
        """A held request was handed over (or will not be): its blocks are free. Unknown ids are ignored."""
        live = self._scheduler.requests.get(request_id)
        if live is not None:
            assert live.phase is Phase.HELD, f"only a held request is released, this one is {live.phase.name}"
            self._scheduler.drop(live)

    def cancel(self, request_id: bytes) -> None:
        """Ends a request in any phase. Its blocks are free as soon as no step that is under way has them.
        Unknown ids are ignored."""
        live = self._scheduler.requests.get(request_id)
        if live is not None:
            self._scheduler.drop(live)

    def _prepare(self, live: LiveRequest) -> None:
        live.longest = min(live.longest, self.model_config.max_model_len)
        wanted = live.request.sampling.structured_output
        if wanted is not None:
            live.grammar = self._grammars.compile(wanted, live.request)

    def _validate(self, request: EngineRequest) -> None:
        if request.id in self._scheduler.requests:
            raise ValueError(f"request {request.id.hex()} is in the engine already")
        check_request(request, self.model_config.vocab_size, self.model_config.max_model_len)

    # How it stands

    @property
    def kv_cache(self) -> list[torch.Tensor]:
        return self._runner.kv_cache

    @property
    def blocks_free(self) -> int:
        return self._scheduler.pool.free

    @property
    def blocks_leaving(self) -> int:
        """Of requests that have ended: free once the steps that are under way are over."""
        return self._scheduler.blocks_leaving

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything: False also while all that waits, waits for blocks."""
        return bool(self._flights or self._scheduler.running) or self._scheduler.can_admit

    @property
    def rest(self) -> float:
        """Seconds until `step` has something to do, unless it is called for with what comes in meanwhile or
        by `landings_fd`. Infinite: only then."""
        if not self._flights or self._flights[0].over:
            return 0.0
        if not self._may_launch or not self._scheduler.has_next:
            return math.inf
        return max(0.0, self._pace.due - time.monotonic())

    @property
    def landings_fd(self) -> int:
        """An eventfd, readable when a launched step is over; for the caller to read."""
        return self._landings.fd

    @property
    def waits_for_device(self) -> bool:
        """Something is being computed: the next sign of life is its end."""
        return bool(self._flights)

    @property
    def idle(self) -> bool:
        """No request in any phase: nothing waits, runs, is held or reserved, or is still being computed."""
        return not self._scheduler.requests and not self._flights

    def assert_whole(self) -> None:
        """To be called when idle: proves that no block, and nothing of any request, was left behind."""
        assert not self._flights, "a step is under way"
        self._scheduler.assert_whole()

    def stats(self) -> EngineStats:
        return self._meters.stats(self._scheduler, self._chunk_limit)
