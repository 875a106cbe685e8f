"""The engine: the requests of one model, from `add`, `reserve` or `start` to their end, and what it says of
itself. `engine.step_loop` computes them."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from baton.engine.api.config import EngineConfig, TierCells, versioned
from baton.engine.api.pools import Pool
from baton.engine.api.request import NO_HOOKS, EngineRequest, Hooks, Image, Logprobs, Output
from baton.engine.api.stats import EngineStats
from baton.engine.core.block_pool import BlockPool
from baton.engine.core.cells import Cells
from baton.engine.core.elastic import Amounts, Budget
from baton.engine.core.kept_blocks import record_bytes
from baton.engine.core.leases import Owner
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.meters import ChunkLimit, Meters
from baton.engine.core.offload_tier import stats_of
from baton.engine.core.prefix_cache import PrefixCache
from baton.engine.core.prompt_images import PromptImages
from baton.engine.core.request_lives import RequestLives
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.speculation import PromptLookup, Speculation
from baton.engine.core.state_copies import StateCopies
from baton.engine.core.units import Units
from baton.engine.core.window_blocks import WindowBlocks
from baton.engine.execution.commands import Drop
from baton.engine.execution.elastic_cache import PoolPlan
from baton.engine.execution.graphs import batch_sizes
from baton.engine.execution.image_encoder import encoder_stats
from baton.engine.execution.kept_cache import Keep
from baton.engine.execution.memory_sizing import COPY_TOKENS, PoolSize, tier_places
from baton.engine.execution.rank import commands, join
from baton.engine.execution.rank_files import RankFiles
from baton.engine.execution.start import Started, start_rank
from baton.engine.execution.threads import device_names
from baton.engine.grammar import Grammars
from baton.engine.loader import tokenizer_source
from baton.engine.loader.live_weights import NewWeights
from baton.engine.loader.tokenizer_json import eos_of_tokenizer, tokenizer_json
from baton.engine.memory import EngineMemory
from baton.engine.model_config import ModelConfig, known_ids
from baton.engine.models import cache_bytes_per_token, state_bytes_per_request, windows_of
from baton.engine.outputs import Outputs
from baton.engine.step_loop import StepLoop
from baton.steps.learned_steps import LearnedSteps, row_sizes, token_sizes
from baton.steps.step_model import LARGE, StepModel
from baton.system.kept_pages import KeptMemory
from baton.vision.embeddings import CACHE_BYTES, Embeddings

log = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    *,
    files: RankFiles | None = None,
    hooks: Hooks = NO_HOOKS,
    kept: Sequence[KeptMemory] = (),
    wait_for_turn: Callable[[], None] | None = None,
) -> "Engine":
    """Loads the model and makes it ready. Raises `ValueError` for mistakes that the user can mend.

    With `tensor_parallel_size` above 1 this is rank 0. The caller starts a process for each
    other rank. That process runs an `engine.execution.rank.Follower` with the same configuration and `files`.
    If one of them ends, the caller ends this process.

    `kept`: for the KV of each rank and, with `config.stands_by`, its weights; the caller owns them. Engines
    that follow each other on them use the published KV of those before. Only one may write it at a time.

    `wait_for_turn`: for an engine that is made while another one uses that memory. It is called when the
    engine needs the memory, and returns when the other one has ended. Weights are loaded at a low priority
    before."""

    device, ranks = join(config, 0, files)

    keep = Keep(kept, record_bytes, wait_for_turn)
    started = start_rank(config, device, ranks, hooks.stage, keep)
    if files is not None:
        started.runner.followers = commands(config, started, files)
    return Engine(config, started, hooks)


def _speculation(config: EngineConfig) -> Speculation | None:
    """None: no token is drafted."""
    if (wanted := config.speculative_config) is None:
        return None
    drafter = None if wanted.by_device else PromptLookup(wanted)
    sizes = batch_sizes(config.max_decode_rows)
    return Speculation(drafter, wanted.num_speculative_tokens, sizes)


def _with_eos_of_tokenizer(model: ModelConfig, tokenizer: str) -> ModelConfig:
    """An output ends with either EOS, as in vLLM."""
    eos = eos_of_tokenizer(tokenizer)
    more = () if eos is None or eos in model.eos_ids else known_ids([eos], model.vocab_size, tokenizer)
    return replace(model, eos_ids=(*model.eos_ids, *more))


def _large(steps: StepModel | None) -> tuple[int, float]:
    """Prompt tokens and seconds of the largest step that was measured. (0, 0.0): none shows the speed of long
    prompts."""
    if steps is None or (tokens := steps.tokens[-1]) < LARGE:
        return 0, 0.0
    return tokens, steps.prompt(tokens)


def pools_of(
    size: PoolSize, block_size: int, windows: WindowBlocks | None
) -> tuple[BlockPool, Cells[bytes] | None]:
    """The states are None if no layer has states."""
    states = Cells[bytes](_units(size.of(Pool.SLOTS))) if size.num_slots else None
    return BlockPool(size.num_blocks, block_size, windows, _units(size.of(Pool.BLOCKS))), states


def _units(planned: PoolPlan, first: int = 0) -> Units:
    return Units(first, planned.places, planned.unit, planned.present_units, keeps_first=not first)


def _budget(
    started: Started,
    pool: BlockPool,
    states: Cells[bytes] | None,
    copies: StateCopies | None,
    max_num_seqs: int,
) -> Budget | None:
    """None: the pools keep their sizes."""
    if (planned := started.pool.elastic) is None:
        return None
    budget = Budget(
        pool,
        states,
        copies,
        pages=Amounts(planned.blocks.pages, planned.slots.pages, planned.windows.pages),
        page_bytes=planned.page_bytes,
        free_pages=planned.free_pages,
        memory=max_num_seqs,
    )
    budget.move = started.runner.move
    return budget


class Engine:
    """One model and its KV cache; `build_engine` makes one. One thread makes all calls, and
    nothing happens between them.

    `caches` has what each layer caches, as its `CacheSpec` in `cache_spec` lays it out, with the heads of
    this rank. The engine owns it. KV transfer may read the blocks and the state slot of a request that is
    prefilled or held, and write those of a reserved one. Position p of a request is in slot
    block_table[p // block_size] * block_size + p % block_size.

    Benches and tests also read `scheduler`, which plans steps, `runner`, which computes them, `meters`, and
    `loaded`, which has the weights.
    """

    def __init__(self, config: EngineConfig, started: Started, hooks: Hooks) -> None:
        runner = started.runner
        self.model_fingerprint = started.model_fingerprint
        self.content_root = started.content_root(started.model_fingerprint)
        self._root_of, self.loaded = started.content_root, started.loaded
        self.numerics = started.numerics
        self.tokenizer = tokenizer_source(config, started.source)
        """The file or directory that has the tokenizer."""
        self.model_config = model = _with_eos_of_tokenizer(started.model_config, self.tokenizer)
        self.cache_spec = started.cache_spec
        self.cache_arrays = started.cache_arrays
        """What each layer caches over all ranks."""
        self.block_size = runner.block_size
        self.num_blocks = started.pool.num_blocks
        self.ranks = runner.ranks
        self.block_bytes = self.block_size * cache_bytes_per_token(self.cache_spec) * self.ranks.size
        """Of the KV of one block, on all ranks."""
        sizes = row_sizes(config.max_num_seqs), token_sizes(config.max_num_batched_tokens)
        self._steps = steps = LearnedSteps(*sizes, started.steps)
        budget = config.max_num_batched_tokens
        limit = ChunkLimit(steps, config.itl_target, budget, config.itl_target_steps)
        self._kept = started.kept
        pool, states, cache = self._memory_of_requests(config, started, hooks)
        if self._kept is not None:
            hooks.stage("verifying KV", 0.0)
        if cache is not None and (blocks := cache.take_over()):
            log.info("%d blocks of KV of the engine before are whole, and are used", blocks)
        self.window_blocks = None if pool.windows is None else pool.windows.of
        """int32, by block: the block in layers with windows, 0 if it has none. None: all layers have the same
        blocks."""
        self.lives = lives = RequestLives(
            pool,
            max_num_seqs=config.max_num_seqs,
            max_model_len=model.max_model_len,
            cache=cache,
            states=states,
            budget=_budget(
                started, pool, states, None if cache is None else cache.copies, config.max_num_seqs
            ),
        )
        """All requests. The caller adds them with the methods of the engine, which compile grammars."""
        speculation = _speculation(config)
        self.scheduler = Scheduler(
            lives,
            max_num_batched_tokens=config.max_num_batched_tokens,
            mixed_rows=runner.mixed_rows,
            full_step=int(min(model.full_step, runner.graph_rows)),  # without a graph, launches bound a step
            speculation=speculation,
        )
        self._outputs = Outputs(lives, speculation, model.eos_ids)
        self._grammars = Grammars(tokenizer_json, self.tokenizer, model.vocab_size, model.eos_ids)
        self.meters = Meters(limit, _large(started.steps))
        for rows, context, tokens, position, seconds in started.first_steps:
            self.meters.record(rows, tokens, seconds, position + tokens / 2, context)
        self.encoder = started.encoder
        """Of images. None: the model sees none, transformers is not installed, or other workers encode."""
        self.embedding_format = started.embeddings
        """Of images that other workers encode. None: they encode none."""
        self._images: Embeddings | None = started.encoder
        self.runner = runner
        self.loop = StepLoop(
            runner,
            self.scheduler,
            self._outputs,
            self._grammars,
            model,
            self.meters,
            hooks,
            overlap=runner.device.type == "cuda" if config.overlap is None else config.overlap,
            encoder=started.encoder,
        )
        """Computes the requests. The caller calls its `step` while it `has_work`."""
        self.memory = EngineMemory(
            started.memory, lives, self.loop, started.runner.followers, started.encoder
        )
        self.caches = runner.cache.of_layers
        self.prefix_exchange = lives.prefix_exchange
        """Moves prefixes between this prefix cache and those of other workers or a shared store. None: there
        is no cache."""
        self.offload = lives.offload
        """The tiers below the device, each for blocks or for states. They say what to copy there and back."""

    def _memory_of_requests(
        self, config: EngineConfig, started: Started, hooks: Hooks
    ) -> tuple[BlockPool, Cells[bytes] | None, PrefixCache | None]:
        """The blocks, the slots of states and the prefix cache."""
        windows = self._windows(config, started)
        pool, states = pools_of(started.pool, self.block_size, windows)
        return pool, states, self._prefix_cache(config, started, hooks, pool)

    def _prefix_cache(
        self,
        config: EngineConfig,
        started: Started,
        hooks: Hooks,
        pool: BlockPool,
    ) -> PrefixCache | None:
        """None: there is no prefix cache."""
        places = tier_places(config, started.pool, self.cache_spec, self.block_size, self.ranks.size)
        for tier, size in config.offload_sizes.items():
            flag = f"--{tier.name.lower()}-cache-size"
            if size < self.block_bytes:
                raise ValueError(f"{flag} {size}: a block takes {self.block_bytes} bytes")
            if TierCells(tier, False) not in places:
                state_bytes = state_bytes_per_request(self.cache_spec) * self.ranks.size
                log.warning(
                    "%s is ignored: no room for copies of states, of %d bytes each", flag, state_bytes
                )
        if not config.enable_prefix_caching:
            return None
        if private := [x.name for layer in self.cache_arrays for x in layer if not x.kind.by_name]:
            log.warning("prefix caching is off: no two requests share what %s keeps", private[0])
            return None
        copies = None
        if started.pool.num_slots:
            if not started.pool.num_copies:
                log.warning(
                    "prefix caching is off: no memory is left for copies of states; lower --max-num-seqs"
                )
                return None
            units, first, count = None, started.pool.num_slots, started.pool.num_copies
            if (planned := started.pool.elastic) is not None:
                units = _units(planned.copies, first)
            chunk = started.runner.chunk_tokens
            copies = StateCopies(first, count, COPY_TOKENS, self.block_size, chunk, units)
        return PrefixCache(
            pool,
            self.content_root,
            hooks=hooks,
            offload_places=places,
            prompt_seconds=self.prompt_seconds,
            copies=copies,
            windows=windows_of(self.cache_arrays),
            kept={} if self._kept is None else self._kept.records,
        )

    def _windows(self, config: EngineConfig, started: Started) -> WindowBlocks | None:
        """None: all layers have the same blocks."""
        if (count := started.pool.window_blocks) is None:
            return None
        windows, tokens = windows_of(self.cache_arrays), config.max_num_batched_tokens
        units = _units(started.pool.of(Pool.WINDOWS))
        return WindowBlocks(self.num_blocks, count, self.block_size, windows, tokens, units)

    # The life of a request

    def add(
        self, request: EngineRequest, *, handover: bool = False, owner: Owner | None = None
    ) -> LiveRequest:
        """Queues a request for prefill. With `handover` the request is held after its first token: its blocks
        keep the KV of prompt and given output until `cancel` or `resume`.

        For `add`, `reserve` and `start` the request must have passed `check_request`. Hooks name it by
        `owner`, without one by its id. Whatever uses the blocks of the request or its states has one of the
        owner's leases: they are free when the request has ended and the last lease has ended."""
        return self._prepare(self.lives.add(request, handover=handover, owner=owner), None)

    def reserve(self, request: EngineRequest, owner: Owner | None = None) -> LiveRequest | None:
        """Reserves blocks for prompt + output + 1 positions. The caller writes the KV of all but the last one
        into `caches`, except for the first `LiveRequest.num_cached`: other requests may read these blocks.
        It writes the states after these positions into its slot. Returns None if there is no room now."""
        live = self.lives.reserve(request, owner)
        return None if live is None else self._prepare(live, None)

    def start(self, request: EngineRequest, owner: Owner | None = None) -> LiveRequest | None:
        """Gives a request its blocks at once, prefills it here, and then decodes it. Returns None if there is
        no room now."""
        live = self.lives.start(request, owner)
        return None if live is None else self._prepare(live, time.monotonic())

    def start_part(
        self,
        request: EngineRequest,
        ranges: Sequence[range],
        read_at: Sequence[int] = (),
        owner: Owner | None = None,
    ) -> LiveRequest | None:
        """Reserves blocks for a prompt that this engine shares with others, as for `add` with handover. It
        computes these ranges, each after `lives.begin_range`. Other workers read KV of them where ranges of
        theirs begin, at `read_at`. The caller writes the KV of the positions between them that the prefix
        cache lacks, and of layers with windows what the ranges read. Of a layer it does so before
        `Hooks.layer_done` returns. It writes the states after the position before a range earlier: before
        `Hooks.layer_done` of the layer before returns, those of the first layer before `lives.begin_range`.
        Returns None if there is no room now."""
        live = self.lives.start_part(request, ranges, read_at, owner)
        return None if live is None else self._prepare(live, time.monotonic())

    def extend_reservation(self, live: LiveRequest, output_ids: Sequence[int]) -> bool:
        """Extends a reservation to a longer output. Its new block table begins with the old one.
        False: no room, the reservation is unchanged. Raises `ValueError` if the output does not begin with
        the one before, whose blocks may have names already, or leaves no token to generate."""
        prompt = len(live.request.prompt_ids)
        known, limit = len(live.token_ids) - prompt, live.asked.longest - prompt
        if not known <= len(output_ids) < limit:
            raise ValueError(f"{len(output_ids)} output_ids, but {known} to {limit - 1} are possible")
        if list(output_ids[:known]) != list(live.token_ids[prompt:]):
            raise ValueError(f"the first {known} output_ids are not those of the reservation")
        return self.lives.extend_reservation(live, list(output_ids))

    def join(self, live: LiveRequest, token: int, logprobs: Logprobs | None = None) -> Output:
        """Starts decoding a reservation after the caller wrote its KV. `token`, the first one sampled from
        this KV, is the input of the next step. Returns the output for this token, which may be the last."""
        self.lives.join(live)
        self.loop.joined()
        live.token_ids.append(token)
        # The prefill said how much of the prompt it found in its cache.
        return self._outputs.emit(live, len(live.token_ids) - 1, logprobs)._replace(cached_tokens=0)

    def resume(self, live: LiveRequest, request_id: bytes, owner: Owner | None = None) -> Output | None:
        """Starts decoding a held request here, under the id `request_id` and for a new owner.

        Its KV stays where it is, and nothing is computed again. If it is preempted it is handed back, like a
        request of `join`. No transfer may read its blocks any more. Returns the output for its first token
        again, which may be the last. None: the batch has no seat now, and the request stays held. A step may
        free a seat. Between two steps this call takes it before the queue."""
        if not self.lives.resume(live, request_id, owner):
            return None
        live.started = None  # the first output said how long the prefill took
        return self._outputs.emit(live, len(live.token_ids) - 1, live.first_logprobs)

    def cancel(self, live: LiveRequest) -> None:
        """Ends a request in any phase, also one that was handed over. Ignores one that has ended."""
        if live.phase is not Phase.GONE:
            self.lives.drop(live)

    def only_here(self, chunks: Iterable[bytes] | None) -> None:
        """No other worker has these chunks any more: if they were handed over, or fetched from here, they are
        no longer evicted first. None: all chunks."""
        if (cache := self.lives.cache) is not None:
            cache.only_here(chunks)

    def _prepare(self, live: LiveRequest, started: float | None) -> LiveRequest:
        live.started = started
        if live.request.images:
            vision = self.model_config.vision
            assert vision is not None, "checked with the request"
            live.images = PromptImages(
                live.request.images,
                partial(self._embeddings, live.request.tenant),
                grid=vision.sections is not None,
                sees_whole=bool(vision.whole_layers),
            )
        if live.request.sampling.has_grammar:
            live.grammar = self._grammars.compile(live.request)
            live.grammar.tell_ready(self.loop.wake)
            self.lives.await_grammar(live)
        return live

    def _embeddings(self, tenant: bytes, image: Image[bytes]) -> "Future[np.ndarray]":
        if self._images is None:
            failed: Future[np.ndarray] = Future()
            failed.set_exception(
                ValueError("this worker has no encoder: install Baton with the extra `images`")
            )
            return failed
        future = self._images.embeddings(image.name, image.pixels, image.rows, image.columns, tenant)
        if not future.done():
            future.add_done_callback(self.loop.wake)
        return future

    @property
    def computes_on(self) -> list[str]:
        return device_names(self.runner.device)

    @property
    def kept_image_tokens(self) -> int:
        """Tokens of images whose embeddings its encoder keeps. 0: it has none."""
        return 0 if self.encoder is None else CACHE_BYTES // self.runner.image_bytes

    def fetch_images(self, images: Embeddings) -> None:
        """Takes embeddings from there: other workers encode."""
        self._images = self.loop.images = images

    # Weights

    def staging(self, path: str) -> Callable[[], NewWeights]:
        """All ranks read and check the weights of a checkpoint of the same model. Returns what does so on
        this rank and waits for the others, beside steps, in any thread. It raises `ValueError` naming what
        does not fit; nothing has changed then."""
        if self.embedding_format is not None:
            raise ValueError(
                "--advanced.encoder-pool: weights of encoders cannot be replaced; start all workers again"
            )
        if "weights" in self.memory.released:
            raise ValueError("the memory of the weights is released: call /resume_memory_occupation first")
        followers = self.runner.followers
        others = None if followers is None else followers.stage(path)

        def stage() -> NewWeights:
            new = self.loaded.stage(path)
            if others is not None:
                others()
            return new

        return stage

    def stage_weights(self, path: str) -> NewWeights:
        """As `staging`, and waits for it."""
        return self.staging(path)()

    def drop_weights(self) -> None:
        """What was staged is not wanted."""
        if (followers := self.runner.followers) is not None:
            followers.send(Drop())

    def replace_weights(self, new: NewWeights, version: str) -> None:
        """Computes with these weights from now on. `version` is one that no other weights have or had. It is
        part of the fingerprint, and so of all names of KV: no prefix of other weights is found again, and
        what the cache has of them ages out.

        The engine has `only_decodes`. These go on with the KV that they have, and no other request gets it.
        """
        assert self.only_decodes, "a prompt would have KV of two weights"
        for live in self.lives:
            self.lives.memory.make_private(live)
        if self.encoder is not None:
            self.encoder.forget()
        followers = self.runner.followers
        others = None if followers is None else followers.replace()
        new.apply()
        if others is not None:
            others()
        self.memory.lost_weights = False
        self.model_fingerprint = versioned(new.fingerprint, version)
        self.content_root = self._root_of(self.model_fingerprint)
        if self.lives.cache is not None:
            self.lives.cache.rename(self.content_root)
        if self._kept is not None:
            self._kept.rename(self.content_root)

    def close(self) -> None:
        """Computes nothing more, and ends the other ranks."""
        if self.encoder is not None:
            self.encoder.close()
        self.runner.stop()
        self._grammars.close()

    # State

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def blocks_free(self) -> int:
        return self.lives.blocks_free

    @property
    def is_moving_memory(self) -> bool:
        """As in `RequestLives`."""
        return self.lives.is_moving_memory

    @property
    def idle(self) -> bool:
        """Whether there is no request in any phase, no lease on one, and no block that a tier fills."""
        loading = any(tier.loading for tier in self.offload)
        return not self.lives.some and not self.loop.under_way and not loading

    @property
    def only_decodes(self) -> bool:
        """Whether all requests decode, and neither a step, a transfer nor a tier uses their blocks."""
        lives, loading = self.lives, any(tier.loading for tier in self.offload)
        if loading or self.loop.under_way or lives.leaving:
            return False
        return all(live.phase is Phase.RUNNING and live.decodes and not live.leases for live in lives)

    def assert_whole(self) -> None:
        """Proves, when idle, that no block and no other part of a request was left behind."""
        assert not self.loop.under_way, "a step is under way"
        self.lives.assert_whole()

    def prompt_seconds(self, tokens: int, uncached: int, position: int) -> float:
        """As in `Meters`."""
        return self.meters.prompt_seconds(tokens, uncached, self.scheduler.batch(position))

    def parts_waiting(self) -> Iterator[tuple[bytes, int, int]]:
        """Yields (request, tokens, position of the first) of each part of a prompt that is not computed."""
        yield from self.scheduler.parts_waiting()
        for schedule, _ in self.loop.under_way:
            for live, positions in schedule.prompts.items():
                yield live.id, len(positions), positions.start

    def stats(self, parts: Iterable[tuple[bytes, int, int]] | None = None) -> EngineStats:
        """`parts`: those of `parts_waiting`, if the caller has read them. To read them looks up the blocks of
        each prompt that waits."""
        parts = self.parts_waiting() if parts is None else parts
        lives, scheduler, meters = self.lives, self.scheduler, self.meters
        meters.rest(self.loop.idle_seconds)
        limit, cache = meters.chunk_limit, lives.cache
        if cache is not None:
            cache.settle()
        batch = scheduler.batch(meters.prefill_position)
        return EngineStats(
            requests_running=len(lives.running),
            requests_decoding=batch.rows,
            requests_waiting=len(lives.waiting) + len(lives.compiling) + len(lives.loading),
            tokens_waiting=sum(tokens for _, tokens, _ in parts),
            blocks_free=lives.blocks_free,
            blocks_spare=min(lives.blocks_spare, lives.blocks_free),
            blocks_total=lives.pool.num_blocks,
            blocks_cached=lives.pool.cached,
            held_prefills=len(lives.held),
            reservations=len(lives.reserved),
            preemptions=scheduler.preemptions,
            prefix_cache_queries=cache.queries if cache else 0,
            prefix_cache_hits=cache.hits if cache else 0,
            prefill_tokens_per_s=meters.prefill_tokens_per_s,
            prefill_position=meters.prefill_position,
            step_seconds=meters.step_seconds,
            fastest_step_seconds=limit.fastest_seconds,
            gap_target_seconds=limit.gap_target,
            long=limit.long_step(batch),
            experts=None if (load := self.runner.expert_load) is None else load.read(),
            offload=stats_of(self.offload),
            speculation=None if scheduler.speculation is None else scheduler.speculation.stats,
            step_table=self._steps.table,
            step_factors=self._steps.factors,
            decode_context=int(batch.context),
            gap_cost=batch.gap_cost,
            memory=None if (budget := lives.budget) is None else budget.stats,
            encoder=None if self.encoder is None else encoder_stats(self.encoder),
        )
