"""Bounds vLLM's steps with prompts, as Baton's engine bounds its own. Pure.

vLLM would compute all prompts side by side, each as late as the last one. It reads two bounds in each step:
the tokens of the step, and the most of each prompt (`Bounds`). So prompts come one after another, and the
next one begins with what the step has left. vLLM cannot stop a prompt that has begun. So one with a lower
priority number is computed beside it.

Where no CUDA graph holds a whole step with a chunk, Python launches the attention of each layer. Then a small
chunk takes as long as one of some hundred tokens. A chunk computes at least as long as it waits for that. A
step with more tokens than the largest graph takes several times as long, so none with decodes has more. It is
launched for nearly as long as it computes, and meanwhile vLLM's scheduler hears of nothing. So no other step
has more, either, if prompts take about as long in steps of that size (`SLOWER`).

On a GPU steps of chosen sizes are measured at the start (`chosen_steps`). Their table stays, and factors
follow the steps of requests, as in Baton's engine. A table that is learned from requests alone has few sizes,
from different times: routers then err about which of two workers takes longer.

vLLM encodes an image whole, in the step that computes its first token. Such a step says what images cost, and
not what tokens cost.
"""

import math
import statistics
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from baton.engine.api.stats import EncoderStats, StepStats
from baton.engine.core.meters import (
    DECAY,
    FULL_STEP,
    LEAST,
    LONG,
    Batch,
    ChunkLimit,
    Meters,
    prompt_limit,
)
from baton.steps.averages import Average
from baton.steps.learned_steps import LearnedSteps, ObservedSteps, row_sizes, token_sizes
from baton.steps.step_model import StepModel
from baton.vllm_worker.chosen_steps import Kind

ALIKE = 8
"""Steps in a row that only decode, and of which the mean says what such a step takes. vLLM learns late of the
end of one, and the next one then seems short."""
SLOWER = 1.1
"""How many times as long prompts may take in steps that fit into a graph."""
MOST_DECODES = 4_096
"""Largest number of decodes that the table of steps tells apart from fewer."""
NOT_ENCODED = EncoderStats(0, 0, 0.0, 0, 0, 0, 0.0, 0.0)


class Bounds(NamedTuple):
    """Of the step that is scheduled next."""

    step: int
    """Most tokens."""
    prompt: int
    """Most tokens of each prompt. 0: as many as the step has."""


class _Prompt(NamedTuple):
    left: int
    position: int
    due: float
    priority: float


@dataclass(slots=True)
class _Step:
    decodes: int = 0
    context: int = 0  # positions that decodes read
    prompt_tokens: int = 0
    positions: float = 0.0  # sum over the prompt tokens
    image_tokens: int = 0  # that are encoded
    number: int = 0
    scheduled_at: float = 0.0


def _kind(step: _Step) -> Kind:
    if not step.prompt_tokens:
        return "decodes"
    return "mixed" if step.decodes else "prompts"


def _medians(samples: list[tuple[float, float]]) -> tuple[float, float]:
    first, second = zip(*samples, strict=True)
    return statistics.median(first), statistics.median(second)


class MixedSteps:
    """Times are in seconds of any clock.

    Attributes:
        may_begin: whether the step that is scheduled next may begin a prompt.
    """

    def __init__(
        self, usual: int, most: int, target: float | None, target_steps: float = LONG, graph: int = 0,
        drafts: int = 0, chunk: int = 0,
    ) -> None:  # fmt: skip
        """`usual`: vLLM's bound for prompts in steps without decodes. 0: none. `most`: tokens of a step. 0 if
        vLLM computes each prompt in one step. `graph`: tokens of the largest CUDA graph. 0: none. `drafts`:
        of a decode in a step. vLLM's bound holds for decodes, too. `chunk`: as of `least_chunk`. The others
        are those of `ChunkLimit`."""
        self._most = most
        self._usual = usual
        self._rows = 1 + drafts
        self._chunk = chunk
        self.may_begin = True
        self._largest = beside_decodes = min(usual or most, most, graph or most)
        self._limits = target, beside_decodes, target_steps
        self._graph = graph or math.inf
        self._start(None)
        self._context = 0  # of the last step
        self._batch = Batch(0, 0, 0)  # of the step that was bounded last
        self._prompt_tokens: dict[str, int] = {}  # by request id. Without prefixes that come, and pins
        self._step = _Step()  # that is scheduled now
        self._under_way: deque[_Step] = deque()
        self._over_at = 0.0
        self._in_a_row = 0  # mixed steps
        self._decodes: deque[float] = deque(maxlen=ALIKE)  # seconds of the last steps, which only decoded
        self._measured: ObservedSteps | None = None  # None: no steps are chosen
        # Decodes, prompt tokens and position of chosen steps → context and seconds of each such step.
        self._with_prompts = defaultdict[tuple[int, int, float], list[tuple[float, float]]](list)
        # Decodes of steps of the round that only decoded → the same.
        self._decoded = defaultdict[int, list[tuple[float, float]]](list)
        self._round = -1
        self._counts: Kind | None = None
        self._told = ""
        self._encoding = Average(DECAY)
        self._encode_seconds = 0.0  # since the start: what steps with images took beyond their tokens

    def _start(self, measured: StepModel | None) -> None:
        """What was learned of steps is forgotten: some may have compiled functions."""
        self._alone_step, largest_step = self._usual, max(self._usual, self._most, 1)
        if measured is not None and (in_graph := self._in_graph(measured)) is not None:
            measured = in_graph
            self._alone_step = largest_step = max(measured.tokens[-1], self._chunk)
        self._sizes = row_sizes(MOST_DECODES), token_sizes(largest_step)
        self._costs = LearnedSteps(*self._sizes, measured)
        largest = (0, 0.0) if measured is None else (measured.tokens[-1], measured.prompt_seconds[-1])
        self._meters = Meters(ChunkLimit(self._costs, *self._limits), largest)
        self._launches = Average(DECAY)  # seconds of a mixed step, beyond its decodes and its tokens

    def _in_graph(self, measured: StepModel) -> StepModel | None:
        """The model of prompts in steps that fit into the largest graph. None: they take longer so."""
        fitting, most = bisect_right(measured.tokens, self._graph), measured.tokens[-1]
        if not 0 < fitting < len(measured.tokens) or most > self._most:
            return None
        tokens, seconds = measured.tokens[:fitting], measured.prompt_seconds[:fitting]
        model = replace(measured, tokens=tokens, prompt_seconds=seconds)
        return model if model.prefill(most) <= SLOWER * measured.prefill(most) else None

    def measure(self, number: int, counts: Kind | None) -> None:
        """The next steps are those of a round, and one kind of them is measured. None: the table has all."""
        if self._measured is None:
            self._start(None)
            self._measured = ObservedSteps(*self._sizes)
        if number != self._round:
            self._end_round()
        self._round, self._counts = number, counts
        if counts is None:
            for (rows, tokens, position), samples in self._with_prompts.items():
                context, seconds = _medians(samples)
                self._measured.add(rows, context, tokens, position, seconds)
            self._start(self._measured.at_sizes)
            self._measured = None
            self._with_prompts.clear()

    def _end_round(self) -> None:
        """Of the steps that only decoded, those with all of its requests count, as one. Others, and what the
        context grows by, would say more of noise than of contexts."""
        if self._decoded:
            assert self._measured is not None
            rows = max(self._decoded)
            context, seconds = _medians(self._decoded[rows])
            self._measured.add(rows, context, 0, 0.0, seconds)
            self._decoded.clear()

    def encoder(self, images: int, tokens: int) -> EncoderStats:
        """What images have cost, of which vLLM's encoder was given so many."""
        seconds, token = self._encode_seconds, self._encoding.value
        given = replace(NOT_ENCODED, images_encoded=images, tokens=tokens)
        return replace(given, seconds=seconds, encode_token_seconds=token)

    def scheduled(self, request_id: str, computed: int, count: int) -> None:
        """The step computes `count` tokens of the request after the first `computed`."""
        if (prompt_tokens := self._prompt_tokens.get(request_id)) is None:
            return  # the token behind a prefix that came reads a long context, and is no decode
        if count > self._rows or (count > 1 and computed < prompt_tokens):
            self._step.prompt_tokens += count
            self._step.positions += count * (computed + count / 2)
        else:
            self._step.decodes += 1
            self._step.context += computed + 1

    def encodes(self, image_tokens: int) -> None:
        """The step encodes images with so many tokens."""
        self._step.image_tokens += image_tokens

    def begins(self, now: float) -> int:
        """All requests of the step are scheduled. Returns its number."""
        step, self._step = self._step, _Step(number=self._step.number + 1)
        step.scheduled_at = now
        if not self._under_way:
            self._meters.rest(now - self._over_at)
        self._under_way.append(step)
        self._context = step.context
        if step.decodes:
            self._in_a_row = self._in_a_row + 1 if step.prompt_tokens else 0
        return step.number

    def over(self, number: int, now: float) -> None:
        """The step is over. vLLM may have scheduled others before it was. If all requests of a step are
        aborted, vLLM reports its end with that of the next step. Then neither is measured."""
        over = list[_Step]()
        while self._under_way and self._under_way[0].number <= number:
            step = self._under_way.popleft()
            if step.decodes or step.prompt_tokens:
                over.append(step)
        if len(over) == 1:
            self._learn(over[0], now - max(self._over_at, over[0].scheduled_at))
        if over:
            self._over_at = now

    def _learn(self, step: _Step, seconds: float) -> None:
        if step.prompt_tokens:
            self._decodes.clear()
        if self._measured is not None and self._counts != _kind(step):
            return
        limit = self._meters.chunk_limit
        if step.image_tokens:
            self._encoded(step, seconds)
            return
        if not step.prompt_tokens:
            self._decodes.append(seconds)
            seconds = sum(self._decodes) / len(self._decodes)
            if len(self._decodes) < ALIKE and seconds < (limit.fastest_seconds or math.inf):
                return
        elif step.decodes:
            self._launches.add(max(0.0, seconds - self._step_seconds(step)))
        elif step.prompt_tokens < LEAST:
            return  # vLLM may have compiled functions: that is no speed
        position = step.positions / step.prompt_tokens if step.prompt_tokens else 0.0
        if self._measured is None:
            self._meters.record(step.decodes, step.prompt_tokens, seconds, position, step.context)
        elif step.prompt_tokens:
            size = step.decodes, step.prompt_tokens, position - step.prompt_tokens / 2
            self._with_prompts[size].append((step.context, seconds))
        else:
            self._decoded[step.decodes].append((step.context, seconds))

    def _encoded(self, step: _Step, seconds: float) -> None:
        if self._alone:
            spent = max(0.0, seconds - self._step_seconds(step))
            self._encode_seconds += spent
            self._encoding.add(spent / step.image_tokens)

    def _step_seconds(self, step: _Step) -> float:
        """Seconds of a step for its decodes and the tokens of prompts."""
        prompts, limit = step.prompt_tokens * self._alone, self._meters.chunk_limit
        return prompts + (limit.decode_seconds(Batch(step.decodes, step.context, 0)) if step.decodes else 0.0)

    def bound(self, now: float, requests: Collection[Any]) -> Bounds | None:
        """Of the step that is scheduled now. None: vLLM's own. `requests`: vLLM's, all that have not ended.

        Their kv_transfer_params say when a first token is due, as `now`, and `gap_cost` as in
        `EngineRequest`. `uncached` are the tokens that vLLM's cache lacked when the request came."""
        decodes, begun, waiting, coming, costly = list[float](), list[_Prompt](), list[_Prompt](), 0, False
        self._prompt_tokens.clear()
        for request in requests:
            params, status = request.kv_transfer_params or {}, request.status.name
            if "chunks" in params or "pin_id" in params:
                continue
            self._prompt_tokens[request.request_id] = request.num_prompt_tokens
            computed = request.num_computed_tokens
            left = request.num_tokens_with_spec + request.num_output_placeholders - computed
            gap_cost, uncached = params.get("gap_cost", 0.0), params.get("uncached", left)
            prompt = _Prompt(left, computed, params.get("due", math.inf), request.priority)
            costly |= gap_cost > 0
            if status != "RUNNING":
                if "decode_id" in params and status != "PREEMPTED":
                    coming += 1
                else:
                    waiting.append(prompt._replace(left=max(1, min(left, uncached))))
            elif left > self._rows:
                begun.append(prompt)
            elif request.max_tokens > 1:
                decodes.append(gap_cost)
        if not self._most:
            return None
        prompts = [*begun, *sorted(waiting, key=lambda prompt: prompt.priority)]
        position = prompts[0].position if prompts else 0
        self._batch = Batch(len(decodes), self._context, position, sum(decodes))
        rows = (len(decodes) + coming) * self._rows
        in_graph = int(min(self._most, self._graph)) - rows
        if self._measured is not None:
            self.may_begin = True
            return Bounds(self._most, max(self._rows, in_graph) if rows else self._usual)
        least = min((prompt.priority for prompt in begun), default=-math.inf)
        joins = any(prompt.priority < least for prompt in waiting)  # beside those that have begun
        shares = max(1, len(begun) + joins)
        if rows:
            # Smaller steps up to the due time would spare gaps. If those cost nothing, that only delays
            # prompts.
            left = [(prompt.left, prompt.due if costly else now) for prompt in prompts]
            room = self._beside_decodes(left, now, in_graph, self._chunk * shares)
        else:
            room = self._alone_step or max(FULL_STEP, prompts[0].left if prompts else 0)
            room = max(room, self._chunk * shares)
        each = max(self._rows, self._chunk, room // shares)
        others = len(requests) - len(self._prompt_tokens)
        taken = sum(min(prompt.left, each) for prompt in begun)
        # The launch of a prompt would delay the end of a step that no graph holds.
        launches = any(not step.decodes and step.prompt_tokens > self._graph for step in self._under_way)
        self.may_begin = taken < room and not launches
        return Bounds(min(self._most, rows + others + max(room, taken)), each)

    def _beside_decodes(
        self, prompts: list[tuple[int, float]], now: float, in_graph: int, chunks: int
    ) -> int:
        """Tokens of prompts in a step with decodes. `in_graph`: for which the largest graph has room.
        `chunks`: those of the smallest chunks that vLLM takes."""
        limit, begins = self._meters.chunk_limit, now + sum(map(self._step_seconds, self._under_way))
        tokens = limit.tokens(self._batch, prompts, begins)
        if self._alone:
            tokens = max(tokens, int(self._launches.value / self._alone))
        if in_graph >= LEAST:
            tokens = min(tokens, in_graph)
        return prompt_limit(max(tokens, chunks), self._batch.rows, self._in_a_row, ())

    @property
    def _alone(self) -> float:
        """Seconds of a prompt token without decodes. 0: not known."""
        speed = self._meters.prefill_tokens_per_s
        return 1 / speed if speed else 0.0

    def news(self) -> list[StepStats]:
        """Returns what steps cost, if it differs in two digits from what was returned before."""
        if self._measured is not None:
            return []
        meters, limit = self._meters, self._meters.chunk_limit
        batch = self._batch
        long = limit.long_step(batch)
        speed = meters.prefill_tokens_per_s, meters.prefill_position
        rest = meters.step_seconds, limit.fastest_seconds, *speed
        steps, load = self._costs, (self._context, batch.gap_cost)
        model = (*steps.table.decode_seconds, *steps.table.prompt_seconds) if steps.table else ()
        values = *rest, *long, *load, limit.gap_target, *model, *steps.factors
        told, self._told = self._told, " ".join(f"{value:.2g}" for value in values)
        if told == self._told:
            return []
        return [StepStats(*rest, long, steps.table, steps.factors, *load, limit.gap_target, self._largest)]
