"""Takes requests on after their steps: to the next token, the handover or the end. Makes their outputs."""

import time
from collections.abc import Sequence

from baton.engine.api.request import PROMPT_PIECE, Logprobs, Output, PromptLogprobs, StepResult
from baton.engine.core.live_request import LiveRequest, Phase
from baton.engine.core.request_lives import RequestLives
from baton.engine.core.speculation import Speculation
from baton.engine.core.step_builder import Schedule
from baton.engine.execution.runner import Launched
from baton.engine.execution.sampler import TopLogprobs
from baton.engine.step import NO_CHOICE, NOT_FINITE
from baton.engine.step_adjustments import ScoredLogprobs


class Outputs:
    """Knows when a request ends, and says so to `RequestLives`."""

    def __init__(self, lives: RequestLives, speculation: Speculation | None, eos_ids: Sequence[int]) -> None:
        """`speculation`: None: no token is drafted."""
        self._lives = lives
        self._memory = lives.memory
        self._speculation = speculation
        self._eos_ids = eos_ids

    def add(self, schedule: Schedule, launched: Launched, tokens: Sequence[int], result: StepResult) -> None:
        """Adds to the result what a step has computed. `tokens`: by sampled row."""
        if launched.scored is not None:
            result.prompt_logprobs = _of_prompts(schedule.scored, launched.scored)
        self._memory.landed(schedule)
        logprobs = _of_outputs(schedule.sampled, launched.logprobs)
        accepted = launched.accepted if schedule.drafts else ()
        guesses = launched.guesses
        for live, first, count in schedule.requests():
            live.slack -= count
            if live.phase is Phase.GONE:
                continue  # the request ended while this step was under way
            # The device has counted the right drafts only if the next step may be launched before.
            drafted = tokens[first : first + count]
            right = accepted[first] if accepted else schedule.drafts[live].right(drafted) if count else 0
            verified = schedule.verified(live, right)
            for row in range(first, first + right + 1):
                if not self._fails(schedule, live, row, tokens[row], result):
                    learn = live.learn if row == first else live.learn_after_draft
                    position = learn(tokens[row])
                    if not live.shared.unverified:
                        self._memory.publish(live, min(position, verified))
                    wrong = (count - right) * (row == first + right)
                    result.outputs.append(self.emit(live, position, logprobs.get(row), row > first, wrong))
                    if live.phase is Phase.RUNNING:
                        continue
                count = right = row - first  # the request has ended, so later drafts are no tokens
                break
            if self._memory.states is not None:
                self._memory.states.choose(live, newest=verified > live.num_computed)
            live.num_computed = min(live.num_computed, verified)
            if self._speculation is not None:
                self._speculation.record(live, count, right, guesses[first] if guesses else ())

    def _fails(self, schedule: Schedule, live: LiveRequest, row: int, token: int, result: StepResult) -> bool:
        """Whether there is no token in this row. This ends the request."""
        if row in schedule.refused:
            result.refused.append((live.id, schedule.refused[row]))
        elif token == NOT_FINITE:
            result.failed.append((live.id, "the model's logits are not finite numbers"))
        elif token == NO_CHOICE:
            result.refused.append((live.id, "its sampling parameters leave no token to choose from"))
        else:
            return False
        self._leave_batch(live)
        return True

    def drop_unseen(self, result: StepResult) -> None:
        """Ends the requests with an image that cannot be encoded."""
        for live in [x for x in self._lives.running if x.images is not None and x.images.failure]:
            if not any(isinstance(lease, Schedule) for lease in live.leases):  # of the text before the image
                result.failed.append((live.id, live.images.failure if live.images is not None else ""))
                self._leave_batch(live)

    def emit(
        self,
        live: LiveRequest,
        position: int,
        logprobs: Logprobs | None,
        accepted_draft: bool = False,
        rejected_drafts: int = 0,
    ) -> Output:
        """The output for the token at this position. Ends the request, or its prefill, if the token says so.
        The last two are as in `Output`."""
        finish_reason = live.finish_reason(position, self._eos_ids)
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
            self._lives.hold(live)
        else:
            self._lives.drop(live)


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
