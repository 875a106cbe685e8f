"""One visible step loop: schedule → run → postprocess.

On a GPU the host does not wait between *launch* (schedule and run) and *landing* (postprocess). It launches
the next step while the device computes this one: the new tokens are still unknown to the host, and the device
reads them from its own memory (overlap scheduling, as in SGLang and mini-sglang). At most two steps are under
way. A request that finishes in step n may already be in step n+1. Its row there is ignored. That step has a
lease on the request, so its blocks are free after that step.
"""

import math
import time
from array import array

from baton.engine import split_steps
from baton.engine.api.request import Hooks, StepResult
from baton.engine.core.adjustments import build_adjustments
from baton.engine.core.live_request import Phase
from baton.engine.core.meters import Batch, Meters
from baton.engine.core.pace import Pace
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.step_builder import Schedule, build_step, is_plain
from baton.engine.execution.events import Landings
from baton.engine.execution.runner import Launched, ModelRunner
from baton.engine.grammar import CompiledGrammar, Grammars
from baton.engine.model_config import ModelConfig
from baton.engine.outputs import Outputs
from baton.engine.step import Step
from baton.vision.embeddings import Embeddings
from baton.vision.encoder import Encoder

MOST_WAITED = 0.1
"""Share of a step in which the host may wait for KV from other workers, or the device may encode images, if
the step is to show a speed. The speed is wrong by no more than this share."""
LONGEST_WAIT = 0.002
"""Seconds that a step with nothing to compute waits for an image or a grammar. Messages and KV that come
meanwhile wait as long, so it is short beside a step."""


class StepLoop:
    """Launches and lands the steps of an engine.

    Attributes:
        under_way: the launched steps that have not landed, the oldest first. While there is one, the engine
            shows no sign of life until its end.
        joins_at: when the next reservation should have its KV (time.monotonic()). Set by the caller. KV that
            is late is expected in as many seconds as it is late: beside a transfer that stalls, prompts would
            be computed in short steps until it ends.
        frozen: no step is launched. Those under way land, and requests stay as they are.
        images: makes embeddings of images. None: nothing does.
        landings_fd: an eventfd, readable when a launched step is over, and after `wake`. The caller reads it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        outputs: Outputs,
        grammars: Grammars,
        model_config: ModelConfig,
        meters: Meters,
        hooks: Hooks,
        *,
        overlap: bool,
        encoder: Encoder | None = None,
    ) -> None:
        """`overlap`: as in `EngineConfig`. `encoder`: of images. None: there is none."""
        self.under_way: list[tuple[Schedule, Launched]] = []
        self.joins_at = math.inf
        self.frozen = False
        self.hooks = hooks
        self.graph_rows = runner.graph_rows
        self._joined = False  # a request from another worker decodes from the next step on
        self._runner = runner
        self._scheduler = scheduler
        self._outputs = outputs
        self._grammars = grammars
        self._model_config = model_config
        self._meters = meters
        self._overlap = overlap
        self._encoder = encoder
        self.images: Embeddings | None = encoder
        self._pace = Pace()
        self._landed_at = 0.0  # when the last step was over, as the host saw it
        self._landings = Landings()
        self.landings_fd = self._landings.fd

    def step(self) -> StepResult:
        """Launches the next step if that is possible, and lands the oldest step if it is over. Without a
        launch it waits for the oldest step. So the tokens of a step come with this call or, on a GPU, with a
        later one."""
        result = StepResult()
        launched = self._may_launch and self._launch(result)
        if self.under_way and (not launched or not self._overlap or self._is_over):
            self._land(*self.under_way.pop(0), result)
            for schedule, later in self.under_way:
                if not later.is_sampled:
                    self._sample(schedule, later)
        return result

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything. False while all requests wait for blocks or for a load."""
        return bool(self.under_way) or (not self.frozen and self._scheduler.has_work)

    @property
    def seconds_to_step(self) -> float:
        """Seconds until `step` has something to do, if no request comes in and `landings_fd` stays silent.
        Infinite: nothing until then."""
        if not self.under_way or self._is_over:
            return 0.0
        if not self._may_launch or not self._scheduler.has_next:
            return math.inf
        return max(0.0, self._pace.due(slow=self._launches_slowly) - time.monotonic())

    @property
    def _may_launch(self) -> bool:
        if self.frozen:
            return False
        if not self.under_way:
            return True
        if not self._overlap or len(self.under_way) > 1 or not self._scheduler.may_look_ahead:
            return False
        if not self._launches_slowly:
            return True
        return not self._is_over and self._pace.fits_slow_launch(time.monotonic())

    @property
    def _launches_slowly(self) -> bool:
        """Whether no graph has the kernels of the next step."""
        return self._scheduler.next_prompt > self.graph_rows

    @property
    def _is_over(self) -> bool:
        """Whether the oldest step is over."""
        return self.under_way[0][1].over

    # Launch

    def _launch(self, result: StepResult) -> bool:
        """False: there was nothing to compute, or the step was given up."""
        began = time.monotonic()
        schedule = self._schedule(began, result)
        self._use_spare_time(schedule)
        if not schedule.chunks:
            if not self.under_way and not (self.images is not None and self.images.wait(LONGEST_WAIT)):
                self._grammars.wait(LONGEST_WAIT)
            return False
        self._computing(schedule)
        launched = self._run(schedule, self._arrays(schedule))
        if launched is None:
            schedule.end_leases()
            self._computing()
            result.prompts.update(_by_id(schedule))
            return False
        self._scheduler.launched(schedule)
        result.ranges_launched += [live.id for live in schedule.prompts if live.phase is Phase.RESERVED]
        self.under_way.append((schedule, launched))
        if not schedule.waits:
            self._sample(schedule, launched)
        if self._overlap:  # else no step is launched while this one is under way
            size = launched.size
            kind = size if size is not None and not size.chunks else None
            self._pace.launched(
                kind,
                began,
                time.monotonic(),
                slow=size is None,
                # Averages know the steps of a kind.
                expected=0.0 if kind is not None else self._meters.step_expected(*schedule.size),
            )
        return True

    @property
    def idle_seconds(self) -> float:
        """Since the last step was over. 0: a step is under way."""
        return 0.0 if self.under_way else time.monotonic() - self._landed_at

    def _schedule(self, began: float, result: StepResult) -> Schedule:
        joins_at = began if self._joined else began + abs(self.joins_at - began)
        self._joined = False
        begins = max(began, self._pace.ends) if self.under_way else began

        def prompt_limit(batch: Batch) -> int:
            encoding = 0.0 if self._encoder is None else self._encoder.queue_seconds
            prompts = self._scheduler.prompts()
            return self._meters.chunk_limit.tokens(batch, prompts, begins, joins_at, encoding)

        schedule = self._scheduler.schedule(prompt_limit)
        schedule.began = began
        schedule.ids = frozenset([live.id for live in schedule.chunks])
        result.preempted += [live.id for live in schedule.preempted if live.hand_back]
        if self._model_config.vision is not None:
            self._outputs.drop_unseen(result)
        for live in schedule.started:
            live.started = live.started or began
            if live.handover:
                self.hooks.prefill_started(live)
        return schedule

    def _use_spare_time(self, schedule: Schedule) -> None:
        """Gives moves of memory, and then the encoder, what the step leaves until the gap target, if a gap
        may become longer by them."""
        budget, gap, spare = self._scheduler.lives.budget, self._meters.chunk_limit.gap_target, math.inf
        if budget is None and self._encoder is None:
            return
        if gap and (schedule.decodes or self._scheduler.some_may_join):
            spare = max(0.0, gap - self._meters.step_expected(*schedule.size))
        if budget is not None:
            spare = max(0.0, spare - budget.go_on(spare))
        if self._encoder is not None:
            self._encoder.turns.grant(spare, gap)

    def _arrays(self, schedule: Schedule) -> Step:
        lives = self._scheduler.lives
        states = lives.memory.states
        return build_step(
            schedule,
            self._model_config.vocab_size,
            block_size=self._runner.block_size,
            table_width=self._runner.cache.table_width,
            has_states=states is not None,
            restores=() if states is None else states.take_restores(schedule),
            saves=() if states is None else states.saves(schedule.chunks),
            ahead=self._runner.ahead,
            draft_head=self._runner.drafter is not None,
            window_blocks=None if lives.pool.windows is None else lives.pool.windows.of,
            sees=self._model_config.vision is not None,
        )

    def _run(self, schedule: Schedule, step: Step) -> Launched | None:
        """None: the step was given up."""
        handed = [live for live in schedule.prompts if live.handover]

        def layer_done(layer: int) -> bool:
            self.hooks.tick()
            if not handed:
                return False
            # A draft head computes its layer when the step is sampled. A prompt may have ended by then.
            moved = {live.owner: schedule.prompts[live] for live in handed if live.phase is not Phase.GONE}
            return bool(self.hooks.layer_done(layer, moved))

        if step.awaits_kv:
            return split_steps.run(self._runner, schedule, step, layer_done)
        return self._runner.run(step, layer_done)

    def _sample(self, schedule: Schedule, launched: Launched) -> None:
        adjustments = None
        if not all(is_plain(live) for live in schedule.sampled):
            drafts = schedule.drafts_before
            rows: list[tuple[CompiledGrammar | None, array[int]]] = []
            for row, live in enumerate(schedule.sampled):
                grammar, token_ids = None if live.phase is Phase.GONE else live.grammar, live.token_ids
                if grammar is not None and row in drafts:
                    grammar, token_ids = grammar.copy(), token_ids + drafts[row]
                rows.append((grammar, token_ids))
            mask, schedule.refused = self._grammars.allowed(rows)
            adjustments = build_adjustments(schedule.sampled, self._model_config.eos_ids, mask, drafts)
        self._landings.expect(self._runner.sample(launched, adjustments))
        for live, row, count in schedule.requests():
            live.promise(row, count, 0 if live.handover else schedule.guesses)

    # Landing

    def _land(self, schedule: Schedule, launched: Launched, result: StepResult) -> None:
        """Waits until the step is over, and takes each request on."""
        tokens = launched.wait()
        self.hooks.tick()
        seconds = result.seconds = launched.seconds
        result.prompts.update(_by_id(schedule))
        result.decodes = schedule.decodes
        landed_at = time.monotonic()
        if self._overlap:
            self._pace.landed(seconds, landed_at)
        # What an encoder of images computes beside a step makes it longer, too.
        waited = schedule.waited + (0.0 if self._encoder is None else self._encoder.turns.taken())
        is_typical = waited <= MOST_WAITED * seconds
        if is_typical:
            size = schedule.size
            self._meters.record(size.rows, size.tokens, seconds, size.position, size.context)
        speculation = self._scheduler.speculation
        if speculation is not None and is_typical and schedule.decodes and not schedule.prompts:
            speculation.learn_cost(schedule, landed_at - max(schedule.began, self._landed_at))
        self._landed_at = landed_at
        self._computing()
        schedule.end_leases()
        if (cache := self._scheduler.lives.cache) is not None:
            cache.settle()
        self._outputs.add(schedule, launched, tokens, result)

    def _computing(self, *launching: Schedule) -> None:
        """Tells which requests are in the steps under way and in this one."""
        schedules = (*launching, *(schedule for schedule, _ in self.under_way))
        self.hooks.computing(frozenset().union(*(schedule.ids for schedule in schedules)))

    # When

    def wake(self, _: object = None) -> None:
        """An image or a grammar that a prompt needs is ready, or failed. Any thread may call it."""
        self._landings.wake()

    def joined(self) -> None:
        """A request from another worker decodes from the next step on."""
        self._joined = True


def _by_id(schedule: Schedule) -> dict[bytes, range]:
    return {live.id: positions for live, positions in schedule.prompts.items()}
