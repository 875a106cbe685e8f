"""One visible step: schedule → run → postprocess.

On a GPU the host does not wait between *launch* (schedule and run) and *landing* (postprocess). It launches
the next step while the device computes this one: the new tokens are still unknown to the host, and the device
reads them from its own memory (overlap scheduling, as in SGLang and mini-sglang). At most two steps are under
way. A request that finishes in step n may already be in step n+1. Its row there is ignored, and its blocks
are free after that step.
"""

import math
import time
from array import array
from collections.abc import Sequence

from baton.engine.api.request import PROMPT_PIECE, Hooks, Logprobs, Output, PromptLogprobs, StepResult
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.meters import Meters
from baton.engine.core.pace import Pace
from baton.engine.core.scheduler import Scheduler
from baton.engine.core.step_builder import Schedule, build_adjustments, build_step, is_plain
from baton.engine.execution.events import Landings
from baton.engine.execution.runner import Launched, ModelRunner, StepGivenUp
from baton.engine.execution.sampler import TopLogprobs
from baton.engine.grammar import CompiledGrammar, Grammars
from baton.engine.model_config import ModelConfig
from baton.engine.step import NO_CHOICE, NOT_FINITE, ScoredLogprobs

MOST_WAITED = 0.1
"""Share of a step in which the host may wait for KV from other workers, if the step is to show a speed. The
speed is wrong by no more than this share."""
GRAMMAR_WAIT = 0.05
"""Seconds that a step with nothing to compute waits for a grammar."""


class StepLoop:
    """Launches and lands the steps of an engine. Owns the steps under way."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        grammars: Grammars,
        model_config: ModelConfig,
        meters: Meters,
        hooks: Hooks,
        *,
        overlap: bool,
    ) -> None:
        """`overlap`: as in `EngineConfig`."""
        self.model_config = model_config
        self.joins_at = math.inf
        """Set by the caller: when the next reservation should have its KV (time.monotonic())."""
        self._joined = False  # a request from another worker decodes from the next step on
        self._flights: list[tuple[Schedule, Launched]] = []  # the steps under way, in order
        self._runner = runner
        self._scheduler = scheduler
        self._grammars = grammars
        self._meters = meters
        self._hooks = hooks
        self._graph_rows = runner.graph_rows
        self._overlap = overlap
        self._pace = Pace()
        self._landed_at = 0.0  # when the last step was over, as the host saw it
        self._landings = Landings()
        self.landings_fd = self._landings.fd
        """An eventfd, readable when a launched step is over. The caller reads it."""

    def step(self) -> StepResult:
        """Launches the next step if that is possible, and lands the oldest step if it is over. Without a
        launch it waits for the oldest step. So the tokens of a step come with this call or, on a GPU, with a
        later one."""
        result = StepResult()
        launched = self._may_launch and self._launch(result)
        if self._flights and (not launched or not self._overlap or self._is_over):
            self._land(*self._flights.pop(0), result)
            for plan, later in self._flights:
                if not later.is_sampled:
                    self._sample(plan, later)
        return result

    @property
    def _may_launch(self) -> bool:
        if not self._flights:
            return True
        if not self._overlap or len(self._flights) > 1 or not self._scheduler.may_look_ahead:
            return False
        if self._scheduler.next_prompt <= self._graph_rows:
            return True
        return not self._is_over and self._pace.fits_slow_launch(time.monotonic())

    @property
    def _is_over(self) -> bool:
        """Whether the oldest step is over."""
        return self._flights[0][1].over

    def _launch(self, result: StepResult) -> bool:
        """False: there was nothing to compute, or the step was given up."""
        started = time.monotonic()
        plan = self._scheduler.schedule(self._prompt_limit(started))
        result.preempted += [live.id for live in plan.preempted if live.hand_back]
        for live in plan.started:
            live.started = live.started or started
            if live.handover:
                self._hooks.prefill_started(
                    live.owner, tuple(live.blocks), len(live.token_ids), live.num_cached, live.state_slot
                )
        if not plan.chunks:
            if not self._flights:
                self._grammars.wait(GRAMMAR_WAIT)
            return False
        plan.began = started
        plan.ids = frozenset([live.id for live in plan.chunks])
        self._hooks.computing(plan.ids.union(*(earlier.ids for earlier, _ in self._flights)))
        memory = self._scheduler.memory
        step = build_step(
            plan,
            self.model_config.vocab_size,
            block_size=self._runner.block_size,
            table_width=self._runner.table_width,
            has_states=self._scheduler.states is not None,
            restores=memory.take_restores(plan),
            saves=memory.saves(plan.chunks),
            ahead=self._runner.ahead,
            draft_head=self._runner.drafter is not None,
        )
        handed = [live for live in plan.prompts if live.handover]
        # Other ranks would wait for this one in their next sum.
        may_give_up = len(handed) == len(plan.chunks) and self._runner.followers is None

        def layer_done(layer: int) -> None:
            self._hooks.tick()
            if handed:
                # A draft head computes its layer when the step is sampled. A prompt may have ended by then.
                moved = {live.owner: plan.prompts[live] for live in handed if live.phase is not Phase.GONE}
                called = time.monotonic()
                is_useless = self._hooks.layer_done(layer, moved)
                plan.waited += (time.monotonic() - called) * step.awaits_kv
                if is_useless and may_give_up:
                    raise StepGivenUp

        try:
            launched = self._runner.run(step, layer_done)
        except StepGivenUp:
            plan.end_leases()
            self._hooks.computing(frozenset().union(*(earlier.ids for earlier, _ in self._flights)))
            result.prompts.update(_by_id(plan))
            return False
        may_give_up = False  # a draft head computes its layer later
        self._scheduler.launched(plan)
        self._flights.append((plan, launched))
        if not plan.waits:
            self._sample(plan, launched)
        size = launched.size
        self._pace.launched(
            size if size is not None and not size.chunks else None,
            started,
            time.monotonic(),
            slow=size is None,
            expected=self._expected(plan),
            may_join=bool(plan.decodes or self._scheduler.reserved),
        )
        return True

    def _expected(self, plan: Schedule) -> float:
        """Seconds that a step with prompts should take. 0: not known."""
        if plan.decodes:
            return self._meters.chunk_limit.mixed_seconds(plan.prompt_tokens)
        speed = self._meters.prefill_tokens_per_s
        return plan.prompt_tokens / speed if speed else 0.0

    def _prompt_limit(self, now: float) -> int:
        """Most prompt tokens of the next step, if it decodes."""
        joins_at, self._joined = now if self._joined else self.joins_at, False
        begins = max(now, self._pace.ends) if self._flights else now
        return self._meters.chunk_limit.tokens(self._scheduler.prompts(), begins, joins_at)

    def _sample(self, plan: Schedule, launched: Launched) -> None:
        adjustments = None
        if not all(is_plain(live) for live in plan.sampled):
            drafts = plan.drafts_before
            rows: list[tuple[CompiledGrammar | None, array[int]]] = []
            for row, live in enumerate(plan.sampled):
                grammar, token_ids = None if live.phase is Phase.GONE else live.grammar, live.token_ids
                if grammar is not None and row in drafts:
                    grammar, token_ids = grammar.copy(), token_ids + drafts[row]
                rows.append((grammar, token_ids))
            mask, plan.refused = self._grammars.allowed(rows)
            adjustments = build_adjustments(plan.sampled, self.model_config.eos_ids, mask, drafts)
        self._landings.expect(self._runner.sample(launched, adjustments))
        for live, row, count in plan.requests():
            live.promise(row, count, 0 if live.handover else plan.guesses)

    def _land(self, plan: Schedule, launched: Launched, result: StepResult) -> None:
        """Waits until the step is over, and takes each request on: to its next token, its handover, its
        end."""
        tokens = launched.wait()
        self._hooks.tick()
        seconds = result.seconds = launched.seconds
        result.prompts.update(_by_id(plan))
        result.decodes = plan.decodes
        landed_at = time.monotonic()
        self._pace.landed(seconds, landed_at)
        if plan.waited <= MOST_WAITED * seconds:
            self._meters.record(plan.decodes > 0, plan.prompt_tokens, seconds, plan.prompt_position)
        self._hooks.computing(frozenset().union(*(later.ids for later, _ in self._flights)))
        plan.end_leases()
        if launched.scored is not None:
            result.prompt_logprobs = _of_prompts(plan.scored, launched.scored)
        logprobs = _of_outputs(plan.sampled, launched.logprobs)
        speculation = self._scheduler.speculation
        if speculation is not None and plan.decodes and not plan.prompts:
            speculation.learn_cost(plan, landed_at - max(plan.began, self._landed_at))
        self._landed_at = landed_at
        accepted = launched.accepted if plan.drafts else ()
        guesses = launched.guesses
        for live, first, count in plan.requests():
            live.slack -= count
            if live.phase is Phase.GONE:
                continue  # the request ended while this step was under way
            # The device has counted the right drafts only if the next step may be launched before.
            drafted = tokens[first : first + count]
            right = accepted[first] if accepted else plan.drafts[live].right(drafted) if count else 0
            verified = plan.verified(live, right)
            for row in range(first, first + right + 1):
                if not self._fails(plan, live, row, tokens[row], result):
                    learn = live.learn if row == first else live.learn_after_draft
                    position = learn(tokens[row])
                    if not live.unverified:
                        self._scheduler.memory.publish(live, min(position, verified))
                    wrong = (count - right) * (row == first + right)
                    result.outputs.append(self._emit(live, position, logprobs.get(row), row > first, wrong))
                    if live.phase is Phase.RUNNING:
                        continue
                count = right = row - first  # the request has ended, so later drafts are no tokens
                break
            self._scheduler.memory.choose_states(live, newest=verified > live.num_computed)
            live.num_computed = min(live.num_computed, verified)
            if speculation is not None:
                speculation.record(live, count, right, guesses[first] if guesses else ())

    def _fails(self, plan: Schedule, live: LiveRequest, row: int, token: int, result: StepResult) -> bool:
        """Whether there is no token in this row. This ends the request."""
        if row in plan.refused:
            result.refused.append((live.id, plan.refused[row]))
        elif token == NOT_FINITE:
            result.failed.append((live.id, "the model's logits are not finite numbers"))
        elif token == NO_CHOICE:
            result.refused.append((live.id, "its sampling parameters leave no token to choose from"))
        else:
            return False
        self._leave_batch(live)
        return True

    def _emit(
        self,
        live: LiveRequest,
        position: int,
        logprobs: Logprobs | None,
        accepted_draft: bool = False,
        rejected_drafts: int = 0,
    ) -> Output:
        """Ends the request, or its prefill, if the token at this position says so. The last two as in
        `Output`."""
        finish_reason = live.finish_reason(position, self.model_config.eos_ids)
        if live.handover:
            live.first_logprobs = logprobs
        if finish_reason or live.handover:
            self._leave_batch(live)
        request = live.request
        index, token = position - len(request.prompt_ids), live.token_ids[position]
        queued = prefilled = 0.0
        if live.started is not None and index == len(request.output_ids):
            queued, prefilled = live.started - request.arrived, time.monotonic() - live.started
        return Output(
            live.id, index, token, logprobs, finish_reason, live.num_cached, queued, prefilled,
            accepted_draft, rejected_drafts,
        )  # fmt: skip

    def _leave_batch(self, live: LiveRequest) -> None:
        """Nothing more is computed for this request. With handover, KV transfer may still read its blocks,
        even if the first token was the last: only the caller knows when the transfer is over."""
        if live.handover:
            self._scheduler.hold(live)
        else:
            self._scheduler.drop(live)

    @property
    def rest(self) -> float:
        """Seconds until `step` has something to do, if no request comes in and `landings_fd` stays silent.
        Infinite: nothing until then."""
        if not self._flights or self._is_over:
            return 0.0
        if not self._may_launch or not self._scheduler.has_next:
            return math.inf
        return max(0.0, self._pace.due - time.monotonic())


def _by_id(plan: Schedule) -> dict[bytes, range]:
    return {live.id: positions for live, positions in plan.prompts.items()}


def _of_prompts(scored: Sequence[tuple[LiveRequest, range]], of_step: ScoredLogprobs) -> list[PromptLogprobs]:
    """Log probabilities of the prompts of the requests that have not ended meanwhile. Notes in each request
    how much of its prompt is scored."""
    result = []
    row = 0
    for live, positions in scored:
        wanted = live.request.sampling.prompt_logprobs or 0
        for first in range(0, len(positions), PROMPT_PIECE) if live.phase is not Phase.GONE else ():
            piece = slice(row + first, row + min(first + PROMPT_PIECE, len(positions)))
            logprobs, ranks, ids, values = (of_field[piece] for of_field in of_step)
            result.append(
                PromptLogprobs(
                    live.id,
                    positions[first] + 1,
                    logprobs.tobytes(),
                    ranks.tobytes(),
                    ids[:, :wanted].tobytes(),
                    values[:, :wanted].tobytes(),
                )
            )
        live.num_scored = positions.stop
        row += len(positions)
    return result


def _of_outputs(sampled: Sequence[LiveRequest], rows: TopLogprobs | None) -> dict[int, Logprobs]:
    """Log probabilities of the sampled tokens, by row, of the requests that ask for them."""
    if rows is None:
        return {}
    asked = [row for row, live in enumerate(sampled) if live.request.sampling.logprobs is not None]
    result = {}
    fields = rows.chosen.tolist(), rows.ids.tolist(), rows.values.tolist()
    for row, chosen, ids, values in zip(asked, *fields, strict=True):
        wanted = sampled[row].request.sampling.num_alternatives
        result[row] = Logprobs(chosen, tuple(ids[:wanted]), tuple(values[:wanted]))
    return result
