"""Bounds vLLM's steps with prompts, as Baton's engine bounds its own. Pure.

vLLM has one bound that may change with each step: how many tokens of each prompt are in it. It would compute
all prompts side by side, and each as late as the last one. So a prompt begins when those before it leave room
for all of it, or are computed (`may_begin`). vLLM cannot stop a prompt that has begun, so one of a lower
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
from dataclasses import dataclass, replace

from baton.engine.api.stats import EncoderStats, StepStats
from baton.engine.core.meters import (
    DECAY,
    FULL_STEP,
    LEAST,
    LONG,
    Batch,
    ChunkLimit,
    Meters,
    may_join,
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


@dataclass(slots=True)
class _Prompt:
    tokens: int
    due: float
    gap_cost: float | None
    left: int
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
    """Times are in seconds of any clock."""

    def __init__(
        self, usual: int, most: int, target: float | None, target_steps: float = LONG, graph: int = 0,
        drafts: int = 0, chunk: int = 0,
    ) -> None:  # fmt: skip
        """`usual`: vLLM's bound for steps without decodes. 0: none. `most`: 0 if vLLM computes each prompt in
        one step. `graph`: tokens of the largest CUDA graph. 0: none. `drafts`: of a decode in a step. vLLM's
        bound holds for decodes, too. `chunk`: as of `least_chunk`. The others are those of `ChunkLimit`."""
        self._most = most
        self._usual = usual
        self._room = FULL_STEP  # for the prompts of the next step
        self._rows = 1 + drafts
        self._chunk = chunk
        self._largest = beside_decodes = min(usual or most, most, graph or most)
        self._limits = target, beside_decodes, target_steps
        self._graph = graph or math.inf
        self._start(None)
        self._context = 0  # of the last step
        self._prompts: dict[str, _Prompt] = {}  # by request id, until a step computes the last token
        self._begun: dict[str, _Prompt] = {}  # of these, those with blocks
        # The gap costs of requests that decode, and of those that will when their KV has come.
        self._decoding: dict[str, float] = {}
        self._coming: dict[str, float] = {}
        self._prefixes = set[str]()
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

    def expect(
        self, request_id: str, tokens: int, due: float, gap_cost: float | None, priority: float = 0
    ) -> None:
        """vLLM has a new request, and computes so many tokens of its prompt. 0: another worker does.
        `due`: when its first token should come. `gap_cost`: as in `EngineRequest`. None: vLLM samples
        one token only. `priority`: vLLM's, of which the lowest goes first."""
        if tokens:
            self._prompts[request_id] = _Prompt(tokens, due, gap_cost, tokens, priority)
        else:
            self._coming[request_id] = gap_cost or 0.0

    def expect_prefix(self, request_id: str) -> None:
        """vLLM has a request whose KV comes from another worker's cache. The token behind it is no decode."""
        self._prefixes.add(request_id)

    def may_begin(self, request_id: str, cached: int) -> bool:
        """Whether the step that is scheduled now may begin a prompt, of which vLLM has `cached` tokens."""
        if self._measured is not None or (prompt := self._prompts.get(request_id)) is None:
            return True
        if any(not step.decodes and step.prompt_tokens > self._graph for step in self._under_way):
            return False  # its launch would delay the end of that step
        ahead = [each.left for each in self._begun.values() if each.priority <= prompt.priority]
        behind = len(self._begun) - len(ahead)
        return may_join(prompt.tokens - cached, sum(ahead), self._room // (1 + behind))

    def begun(self, request_id: str) -> None:
        """vLLM has given the request its blocks. The step that is scheduled now computes it."""
        if (prompt := self._prompts.get(request_id)) is not None:
            self._begun[request_id] = prompt

    def preempted(self, request_id: str) -> None:
        """It begins again."""
        self._begun.pop(request_id, None)

    def finished(self, request_id: str) -> None:
        self._prompts.pop(request_id, None)
        self._begun.pop(request_id, None)
        self._decoding.pop(request_id, None)
        self._coming.pop(request_id, None)
        self._prefixes.discard(request_id)

    def scheduled(self, request_id: str, computed: int, count: int) -> None:
        """The step computes `count` tokens of the request after the first `computed`."""
        if request_id in self._prefixes:
            return
        if count > self._rows or (count > 1 and request_id in self._prompts):
            self._step.prompt_tokens += count
            self._step.positions += count * (computed + count / 2)
        else:
            self._step.decodes += 1
            self._step.context += computed + 1
        if (gap_cost := self._coming.pop(request_id, None)) is not None:
            self._decoding[request_id] = gap_cost
        if (prompt := self._prompts.get(request_id)) is None:
            return
        prompt.left = prompt.tokens - computed - count
        if prompt.left <= 0:
            del self._prompts[request_id]
            self._begun.pop(request_id, None)
            if prompt.gap_cost is not None:
                self._decoding[request_id] = prompt.gap_cost

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
            self._launches.add(max(0.0, seconds - self._expected(step)))
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
            spent = max(0.0, seconds - self._expected(step))
            self._encode_seconds += spent
            self._encoding.add(spent / step.image_tokens)

    def _expected(self, step: _Step) -> float:
        """Seconds of a step for its decodes and the tokens of prompts."""
        prompts, limit = step.prompt_tokens * self._alone, self._meters.chunk_limit
        return prompts + (limit.decode_seconds(Batch(step.decodes, step.context, 0)) if step.decodes else 0.0)

    def bound(self, now: float) -> int:
        """Most tokens of each prompt in a step that is scheduled now. 0: all that the step has room for. So a
        step that should only decode has as many tokens of each prompt as of a decode."""
        rows, limit = len(self._decoding) + len(self._coming), self._meters.chunk_limit
        prompts = self._prompts.values()
        least = min((prompt.priority for prompt in self._begun.values()), default=-math.inf)
        joins = any(prompt.priority < least for prompt in prompts)  # beside those that have begun
        shares = max(1, len(self._begun) + joins)
        if not rows or not self._most:
            self._room = self._alone_step or FULL_STEP
            return self._alone_step and max(self._alone_step // shares, self._chunk, self._rows)
        if self._measured is not None:
            return max(self._rows, int(min(self._most, self._graph - rows * self._rows)))
        begins = now + sum(map(self._expected, self._under_way))
        # Smaller steps up to the due time would spare gaps. If those cost nothing, that only delays prompts.
        costly = any((*self._decoding.values(), *self._coming.values()))
        waiting = [(prompt.left, prompt.due if costly else now) for prompt in prompts]
        tokens = limit.tokens(self._batch, waiting, begins)
        if self._alone:
            tokens = max(tokens, int(self._launches.value / self._alone))
        tokens = int(min(tokens, self._graph - rows * self._rows))
        self._room = tokens = prompt_limit(max(tokens, self._chunk * shares), 1, self._in_a_row, ())
        return max(self._rows, tokens // shares)

    @property
    def _batch(self) -> Batch:
        """What the next step computes."""
        first = next(iter(self._prompts.values()), None)
        position, gap_cost = first.tokens - first.left if first else 0, sum(self._decoding.values())
        return Batch(len(self._decoding), self._context, position, gap_cost)

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
