"""The engine: one visible step, schedule → run → postprocess."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import StepBatch, build_batch
from engine.block_pool import BlockPool
from engine.chunk_limit import ChunkLimit
from engine.config import EngineConfig
from engine.grammar import Grammars
from engine.kernels import HeadNorm, kernels_for
from engine.live_request import LiveRequest, Phase
from engine.loader import load_model, open_checkpoint
from engine.memory import MemoryUse, choose_limits, memory_for, size_pool
from engine.meters import Meters
from engine.request import (
    CacheObserver,
    EngineRequest,
    EngineStats,
    KVSink,
    Logprobs,
    Output,
    PrefillChunk,
    StepResult,
)
from engine.sampler import sample
from engine.scheduler import Schedule, Scheduler
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
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        kv_sink: KVSink | None = None,
        cache_observer: CacheObserver | None = None,
        tick: Callable[[], None] = _nothing,
        computing: Callable[[Sequence[bytes]], None] = _nothing,
        progress: Callable[[str, float], None] = _nothing,
    ) -> None:
        """Loads the model. `tick`, a sign of life, is called for each tensor loaded and each layer of a step;
        `computing` with the ids of a step before it runs, and with none when it is over, so that somebody
        else can tell whom a crash is about; `progress(stage, fraction)` tells how far the start is. Raises
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
            self._model, self.model_fingerprint = load_model(
                checkpoint, limits.max_model_len, self.dtype, self.device, starting
            )
        self.model_config = replace(checkpoint.config, max_model_len=limits.max_model_len)
        self._kernels = kernels_for(self.device, self.model_config.head_dim)
        self._grammars = Grammars(checkpoint.source, self.model_config.vocab_size, self.model_config.eos_ids)

        use = self._measure(starting) if self.device.type == "cuda" else None
        pool = size_pool(config, self.model_config, limits, use)
        self.model_config = replace(self.model_config, max_model_len=pool.max_model_len)
        with memory_for("the KV pool", "lower --num-blocks or --gpu-memory-utilization"):
            self._open(pool.num_blocks)
            if self.device.type == "cuda":
                warm_up(self, plan_rehearsal(config, pool.max_model_len), starting)
        self._begin(cache_observer, self.model_fingerprint if config.enable_prefix_caching else None)
        self._computing = computing

    def _measure(self, progress: Callable[[str, float], None]) -> MemoryUse:
        """What the largest step takes beside the weights, tried on a small cache, the same for all layers."""
        rehearsal = plan_rehearsal(self._config, self.model_config.max_model_len)
        weights = torch.cuda.memory_allocated(self.device)
        with memory_for("the largest step", "lower --max-num-batched-tokens or --max-num-seqs"):
            self._open(rehearsal.num_blocks(self.block_size), layers=1)
            step = measure_steps(self, rehearsal, self.device, progress)
        self.kv_cache = []
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return MemoryUse(total, free, weights, activations=step.any, graphs=0)

    def _open(self, num_blocks: int, layers: int | None = None) -> None:
        """An empty cache, and nobody there. With `layers`, only so many layers have memory of their own."""
        self.num_blocks = num_blocks
        model = self.model_config
        shape = (2, num_blocks, self.block_size, model.num_kv_heads, model.head_dim)
        own = layers or model.num_layers
        # Not zeroed: nothing reads what was not written, and the system maps a page when it is first touched.
        caches = [torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(own)]
        self.kv_cache = [caches[layer % own] for layer in range(model.num_layers)]
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

    # One step

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Computes the next tokens of as many requests as the budgets allow."""
        started = time.monotonic()
        overflowing = any(live.hand_back and live.num_left > 1 for live in self._scheduler.running)
        plan = self._scheduler.schedule(self._chunk_limit.tokens if overflowing else None)
        for live in plan.started:
            live.started = live.started or started
        result = StepResult(preempted=[live.id for live in plan.handed_back])
        self._announce(plan.started)
        if not plan.chunks:
            self._grammars.wait(GRAMMAR_WAIT)
        else:
            self._computing([chunk.live.id for chunk in plan.chunks])
            batch = build_batch(plan.chunks, self.block_size, self.device)
            hidden = self._run(plan, batch)
            self._postprocess(plan, batch, hidden, result)
            self._computing(())
        seconds = time.monotonic() - started
        self._meters.record(plan, seconds)
        self._chunk_limit.record(plan.decodes, plan.prompt_tokens, seconds)
        return result

    def _announce(self, started: Sequence[LiveRequest]) -> None:
        for live in started:
            if live.handover and self._kv_sink is not None:
                self._kv_sink.prefill_started(
                    live.id, tuple(live.blocks), len(live.token_ids), live.num_cached
                )

    def _run(self, plan: Schedule, batch: StepBatch) -> Tensor:
        """The forward pass: writes the KV of all chunks, returns the hidden state of each of their tokens."""
        moved = [PrefillChunk(c.live.id, c.start, c.stop) for c in plan.chunks if c.live.handover]

        kernels = self._kernels
        num_heads, num_kv_heads = self.model_config.num_heads, self.model_config.num_kv_heads
        attention = kernels.plan(batch.attention, num_heads, num_kv_heads, self.dtype)

        def attend(layer: int, qkv: Tensor, rotary: Tensor, norm: HeadNorm | None) -> Tensor:
            kv = self.kv_cache[layer]
            q, k, v = kernels.rope_and_write(qkv, rotary, norm, kv, batch.attention.slots)
            return kernels.attention(q, k, v, kv, attention)

        def layer_done(layer: int) -> None:
            self._tick()
            if moved and self._kv_sink is not None:
                self._kv_sink.layer_done(layer, moved)

        return self._model(batch.token_ids, batch.positions, attend, layer_done)

    def _postprocess(self, plan: Schedule, batch: StepBatch, hidden: Tensor, result: StepResult) -> None:
        """Samples, and sees every request on: to its next token, to its handover, to its end."""
        for chunk in plan.chunks:
            self._scheduler.computed(chunk)
        if not batch.sampled:
            return
        mask, refused = self._grammars.allowed([(live.grammar, live.token_ids) for live in batch.sampled])
        logits = self._model.logits(hidden[batch.sampled_rows])
        choices = sample(logits, batch.sampled, self.model_config.eos_ids, mask)
        for row, (live, choice) in enumerate(zip(batch.sampled, choices, strict=True)):
            if row in refused:
                result.refused.append((live.id, refused[row]))
                self._leave_batch(live)
                continue
            if choice is None:
                result.failed.append((live.id, "the model's logits are not finite numbers"))
                self._leave_batch(live)
                continue
            self._scheduler.verified(live)
            live.sampled = True
            result.outputs.append(self._emit(live, choice.token, choice.logprobs))

    def _emit(self, live: LiveRequest, token: int, logprobs: Logprobs | None) -> Output:
        """The token is part of the request; what that means for it."""
        live.token_ids.append(token)
        finish_reason = live.finish_reason(self.model_config.eos_ids, self.model_config.max_model_len)
        output = Output(
            id=live.id,
            output_index=live.num_generated - 1,
            token=token,
            logprobs=logprobs,
            finish_reason=finish_reason,
            cached_tokens=live.num_cached,
        )
        if live.started is not None and live.num_generated == len(live.request.output_ids) + 1:
            output = replace(
                output,
                queue_seconds=live.started - live.arrived,
                prefill_seconds=time.monotonic() - live.started,
            )
        if finish_reason or live.handover:
            self._leave_batch(live)
        return output

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
        self._constrain(self._scheduler.add(request, handover=handover))

    def reserve(self, request: EngineRequest) -> Sequence[int] | None:
        """Sets aside blocks for prompt + output + 1 positions; the caller will write KV of all but the last
        into `kv_cache`. Returns the block table; None: no room now. Raises `ValueError` if there never is."""
        self._validate(request)
        live = self._scheduler.reserve(request)
        if live is None:
            return None
        self._constrain(live)
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
        self._constrain(live)
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
        return self._emit(live, token, logprobs)

    def release(self, request_id: bytes) -> None:
        """A held request was handed over (or will not be): its blocks are free. Unknown ids are ignored."""
        live = self._scheduler.requests.get(request_id)
        if live is not None:
            assert live.phase is Phase.HELD, f"only a held request is released, this one is {live.phase.name}"
            self._scheduler.drop(live)

    def cancel(self, request_id: bytes) -> None:
        """Ends a request in any phase, its blocks are free at once. Unknown ids are ignored."""
        live = self._scheduler.requests.get(request_id)
        if live is not None:
            self._scheduler.drop(live)

    def _constrain(self, live: LiveRequest) -> None:
        wanted = live.request.sampling.structured_output
        if wanted is not None:
            live.grammar = self._grammars.compile(wanted, live.request)

    def _validate(self, request: EngineRequest) -> None:
        vocabulary, longest = self.model_config.vocab_size, self.model_config.max_model_len
        sampling = request.sampling
        if request.id in self._scheduler.requests:
            raise ValueError(f"request {request.id.hex()} is in the engine already")
        if not request.prompt_ids:
            raise ValueError("prompt_ids must not be empty")
        for name in ("prompt_ids", "output_ids"):
            if any(not 0 <= token < vocabulary for token in getattr(request, name)):
                raise ValueError(f"{name} must be token ids, 0 to {vocabulary - 1}")
        for name in ("stop_token_ids", "logit_bias"):
            if any(token >= vocabulary for token in getattr(sampling, name)):
                raise ValueError(f"{name} must be about token ids, 0 to {vocabulary - 1}")
        if len(request.output_ids) >= sampling.max_tokens:
            raise ValueError(f"max_tokens is {sampling.max_tokens}, output_ids has {len(request.output_ids)}")
        if len(request.prompt_ids) + len(request.output_ids) >= longest:
            raise ValueError(
                f"prompt_ids and output_ids have {len(request.prompt_ids) + len(request.output_ids)} tokens; "
                f"with at least one more, the limit is {longest} (max_model_len)"
            )

    # How it stands

    @property
    def blocks_free(self) -> int:
        return self._scheduler.pool.free

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything: False also while all that waits, waits for blocks."""
        return bool(self._scheduler.running) or self._scheduler.can_admit

    @property
    def idle(self) -> bool:
        """No request in any phase: nothing waits, runs, is held or reserved."""
        return not self._scheduler.requests

    def assert_whole(self) -> None:
        """To be called when idle: proves that no block, and nothing of any request, was left behind."""
        self._scheduler.assert_whole()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            tokens_waiting=scheduler.tokens_waiting,
            blocks_free=scheduler.pool.free,
            blocks_total=scheduler.pool.num_blocks,
            blocks_cached=scheduler.pool.cached,
            held=len(scheduler.held),
            reservations=len(scheduler.reserved),
            preemptions=self._meters.preemptions,
            prefix_cache_queries=scheduler.prefix_queries,
            prefix_cache_hits=scheduler.prefix_hits,
            prefill_tokens_per_s=self._meters.prefill_tokens_per_s,
            step_seconds=self._meters.step_seconds,
            chunk_tokens=self._chunk_limit.fitting,
            chunk_seconds=self._chunk_limit.seconds,
        )
