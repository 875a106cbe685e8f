"""Learns the model of the steps of one engine (`step_model`): a table, and factors that follow the steps.

    ObservedSteps   makes one from any steps, as far as it was not measured
    Correction      follows an engine that is slower or faster than its table
    LearnedSteps    all of them, for one engine

Pure.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from baton.steps.averages import Average
from baton.steps.step_model import LARGEST_FACTOR, MOST_IN_PAIRS, StepModel, interpolated

ADAPTS = 0.1
"""Share of the error of a step by which the factors of its parts change."""
LARGEST_ERROR = 0.5
"""A step counts as at most so much longer than expected, as a share. A longer one may be a pause of the
process."""
DECAY = 0.95
"""Factor on the weight of an observed step with each later one of about its size."""


class _Bin:
    """Steps of about one size. Means in which older steps weigh less, and what one more position adds."""

    __slots__ = ("covariance", "mean_seconds", "mean_size", "mean_work", "variance", "weight")

    def __init__(self) -> None:
        self.weight = self.mean_size = self.mean_work = self.mean_seconds = 0.0
        self.variance = self.covariance = 0.0  # of work, and of work and seconds; both times the weight

    def add(self, size: float, work: float, seconds: float) -> None:
        """`work`: positions or pairs that attention reads."""
        if self.weight > 2:
            seconds = min(seconds, (1 + LARGEST_ERROR) * self.mean_seconds)
        kept = DECAY * self.weight
        self.weight = kept + 1
        change = work - self.mean_work
        self.variance = DECAY * self.variance + change * change * kept / self.weight
        self.covariance = (
            DECAY * self.covariance + change * (seconds - self.mean_seconds) * kept / self.weight
        )
        self.mean_size += (size - self.mean_size) / self.weight
        self.mean_work += change / self.weight
        self.mean_seconds += (seconds - self.mean_seconds) / self.weight


class _Bins:
    """Steps of one kind by size. What was measured at the start stays."""

    def __init__(
        self,
        sizes: Sequence[int],
        measured: Mapping[int, float],
        slope: float | None,
        *,
        have_pairs: bool = False,
    ) -> None:
        """`measured`: seconds of some of the sizes. `slope`: of one position or pair. 0: not known. None:
        there is no work. `have_pairs`: without work, a step of `size` tokens has size² / 2 pairs."""
        self._sizes = sizes
        self._bins = [_Bin() for _ in sizes]
        self._measured = measured
        self._slope = slope or 0.0
        self._learns_slope = slope == 0
        self._have_pairs = have_pairs

    def add(self, size: int, work: float, seconds: float) -> None:
        if self.learns(size):
            self._bins[self._index(size)].add(size, work, seconds)

    def learns(self, size: int) -> bool:
        """Whether steps of this size count: they were not measured, or what `work` adds was not."""
        return self._learns_slope or self._sizes[self._index(size)] not in self._measured

    def knows(self, size: int) -> bool:
        """Whether steps of this size were measured, or counted."""
        index = self._index(size)
        return self._sizes[index] in self._measured or self._bins[index].weight > 0

    @property
    def known(self) -> tuple[int, ...]:
        """The sizes that `knows` is true of."""
        return tuple(size for size in self._sizes if self.knows(size))

    def _index(self, size: int) -> int:
        return max(0, bisect_right(self._sizes, size) - 1)

    def table(self, others: "_Bins | None" = None) -> tuple[tuple[int, ...], tuple[float, ...], float]:
        """Sizes, seconds without what `work` adds, and what one more of `work` adds. Empty: not known.
        `others`: of the same sizes, for those without steps here."""
        slope = _slope(self._bins, have_pairs=self._have_pairs) if self._learns_slope else self._slope
        bins = zip(self._sizes, self._bins, self._bins if others is None else others._bins, strict=True)
        unmeasured = [
            each if each.weight else other for size, each, other in bins if size not in self._measured
        ]
        learned = {
            round(each.mean_size): each.mean_seconds - slope * each.mean_work
            for each in unmeasured
            if each.weight
        }
        sizes = sorted({**learned, **self._measured}.items())
        return tuple(size for size, _ in sizes), _rising([max(0.0, seconds) for _, seconds in sizes]), slope


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """The values closest to these (least squares) that never fall, by pooling adjacent violators: values that
    fall get their mean. So one slow step of a small size does not make all larger ones slow."""
    means: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while means and means[-1][0] > mean:
            before, more = means.pop()
            mean, count = (mean * count + before * more) / (count + more), count + more
        means.append((mean, count))
    return tuple(mean for mean, count in means for _ in range(count))


def _slope(bins: Sequence[_Bin], *, have_pairs: bool) -> float:
    """What one more of `work` adds to steps of one size. `have_pairs`: as in `_Bins`."""
    working = [each for each in bins if each.mean_work >= 1]
    # Relative to the work of a bin, or the largest steps alone would say what small ones cost.
    variance = sum(each.variance / each.mean_work**2 for each in working)
    covariance = sum(each.covariance / each.mean_work**2 for each in working)
    slope = max(0.0, covariance / variance) if variance > 0 else 0.0
    # The rest of a step is not negative, however steep the line through a few steps is.
    loads = ((each.mean_seconds, each.mean_work + have_pairs * each.mean_size**2 / 2) for each in bins)
    share = MOST_IN_PAIRS if have_pairs else 1.0
    return min([slope, *(share * seconds / load for seconds, load in loads if load > 0)])


class ObservedSteps:
    """Makes a model from the steps that it is told of. Those of one size are averaged.

    The context of decodes grows with their number. What it costs is learned from steps of about one size.

    A worker that always decodes has no steps with prompts alone. There a mixed step counts as one with as
    many prompt tokens as it has rows in all. If one kind of steps was not there yet, a decode counts as a
    prompt token, and the other way round."""

    def __init__(self, rows: Sequence[int], tokens: Sequence[int], measured: StepModel | None = None) -> None:
        """The sizes from which on steps count together, ascending. What `measured` has of them stays."""
        known = measured or StepModel((), (), 0.0, (), (), 0.0, 1.0)
        decodes = dict(zip(known.rows, known.decode_seconds, strict=True))
        prompts = dict(zip(known.tokens, known.prompt_seconds, strict=True))
        self._decodes = _Bins(rows, decodes, known.context_seconds)
        self._prompts = _Bins(tokens, prompts, known.pair_seconds, have_pairs=True)
        self._mixed = _Bins(tokens, prompts, None)
        self._smallest = tokens[0]
        self._learns_overlap = measured is None
        self._overlap = Average(DECAY)
        self._overlap.value = known.overlap
        self._model: StepModel | None = None
        self._decode_table, self._prompt_table = self._decodes.table(), self._prompts.table()
        self._update()

    @property
    def model(self) -> StepModel | None:
        """None: no step was there yet."""
        return self._model

    @property
    def at_sizes(self) -> StepModel:
        """The model of a measurement: it has the sizes from which on steps count together. There were steps
        with prompts, and steps that only decoded."""
        model = self._model
        assert model is not None, "there were steps"
        rows, tokens = self._decodes.known, tuple(sorted({*self._prompts.known, *self._mixed.known}))
        return replace(
            model,
            rows=rows,
            decode_seconds=tuple(interpolated(model.rows, model.decode_seconds, size) for size in rows),
            tokens=tokens,
            prompt_seconds=tuple(interpolated(model.tokens, model.prompt_seconds, size) for size in tokens),
        )

    def learns(self, rows: int, tokens: int) -> bool:
        """Whether a step of this size changes the model."""
        if not tokens:
            return self._decodes.learns(rows)
        if not rows:
            return self._prompts.learns(tokens)
        return self._learns_overlap or self._mixed.learns(rows + tokens)

    def knows(self, rows: int, tokens: int) -> bool:
        """Whether there were steps of about this size."""
        if not tokens:
            return self._decodes.knows(rows)
        if not rows:
            return self._prompts.knows(tokens)
        return self._decodes.knows(rows) and (self._prompts.knows(tokens) or self._mixed.knows(rows + tokens))

    def add(self, rows: int, context: float, tokens: int, position: float, seconds: float) -> None:
        """As in `StepModel.step`."""
        if not tokens:
            self._decodes.add(rows, context, seconds)
            self._decode_table = self._decodes.table()
        else:
            if not rows:
                self._prompts.add(tokens, tokens * position, seconds)
            else:
                self._add_mixed(rows, context, tokens, position, seconds)
            self._prompt_table = self._prompts.table(self._mixed)
        self._update()

    def _add_mixed(self, rows: int, context: float, tokens: int, position: float, seconds: float) -> None:
        attention = 0.0
        if (model := self._model) is not None:
            attention = context * model.context_seconds + model.attention(tokens, position)
        self._mixed.add(rows + tokens, 0.0, max(0.0, seconds - attention))
        if model is None or not self._learns_overlap:
            return
        shared, separate = (
            replace(model, overlap=overlap).step(rows, context, tokens, position) for overlap in (1.0, 0.0)
        )
        if shared < separate:
            saved = max(0.0, min(separate - seconds, separate - shared))
            self._overlap.add(saved, separate - shared)

    def _update(self) -> None:
        rows, decodes, context_seconds = self._decode_table
        tokens, prompts, pair_seconds = self._prompt_table
        if not rows:
            rows, decodes = tokens, prompts
        elif not tokens:
            tokens, prompts = rows, decodes
        else:
            if len(rows) == 1 and rows[0] < tokens[-1]:  # many decodes take as long as a prompt
                rows, decodes = (*rows, tokens[-1]), (decodes[0], max(decodes[0], prompts[-1]))
            if 1 < tokens[0] != self._smallest:  # few take as long as a decode
                tokens, prompts = (1, *tokens), (min(decodes[0], prompts[0]), *prompts)
        if rows:
            self._model = StepModel(
                rows, decodes, context_seconds, tokens, prompts, pair_seconds, self._overlap.value
            )


def row_sizes(most: int) -> tuple[int, ...]:
    """Numbers of decodes from which on steps count together."""
    return _sizes(1, most)


def token_sizes(most: int) -> tuple[int, ...]:
    """The same of prompt tokens."""
    return _sizes(16, most)


def _sizes(first: int, most: int) -> tuple[int, ...]:
    """The first one, then twice as many each time, up to `most`."""
    sizes = []
    while first < most:
        sizes.append(first)
        first *= 2
    return *sizes, most


class Correction:
    """How many times as long decodes and prompts take as in the table. Learns from each step.

    The rows and the context of real steps grow together, so there is one factor for decodes and one for
    prompts. A step changes the factors in the direction in which it tells them apart, and no others: steps
    that are all alike fit their sum. Nothing is forgotten between steps.

    Attributes:
        decode, prompt: the factors, from 1 / LARGEST_FACTOR to LARGEST_FACTOR.
    """

    __slots__ = ("decode", "model", "prompt")

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.decode = self.prompt = 1.0

    def record(self, rows: int, context: float, tokens: int, position: float, seconds: float) -> None:
        """Learns from a step, as in `StepModel.step`."""
        decode, prompt = self.model.parts(rows, context, tokens, position)
        decode, prompt = self.decode * decode, self.prompt * prompt
        if (expected := decode + prompt) <= 0:
            return
        error = max(-LARGEST_ERROR, min(LARGEST_ERROR, seconds / expected - 1))
        # The smallest relative change of the factors by which the step would take `error` longer, in part.
        change = ADAPTS * error * expected / (decode * decode + prompt * prompt)
        self.decode = _bounded(self.decode * (1 + change * decode))
        self.prompt = _bounded(self.prompt * (1 + change * prompt))

    @property
    def corrected(self) -> StepModel:
        """The model with these factors."""
        return self.model.corrected(self.decode, self.prompt)


def _bounded(factor: float) -> float:
    return max(1 / LARGEST_FACTOR, min(LARGEST_FACTOR, factor))


class LearnedSteps:
    """The model of one engine, from its first step on.

    What was measured at the start stays, and the rest of the table is learned. The factors follow all
    steps, until `rest`.

    Attributes:
        measured: the model that was measured at the start. None: nothing was."""

    def __init__(self, rows: Sequence[int], tokens: Sequence[int], measured: StepModel | None = None) -> None:
        """As in `ObservedSteps`."""
        self.measured = measured
        self._observed = ObservedSteps(rows, tokens, measured)
        self._correction = None if measured is None else Correction(measured)
        self._corrected = measured

    @property
    def table(self) -> StepModel | None:
        """Without the factors. None: no step was there yet."""
        return self._observed.model

    @property
    def factors(self) -> tuple[float, float]:
        """Of decodes, and of prompts."""
        return (1.0, 1.0) if self._correction is None else (self._correction.decode, self._correction.prompt)

    @property
    def model(self) -> StepModel | None:
        """With the factors. None: no step was there yet."""
        if self._corrected is None and self._correction is not None:
            self._corrected = self._correction.corrected
        return self._corrected

    def rest(self) -> None:
        """The device had nothing to do. The factors are 1 again if the table was measured: what made steps
        slower may be over, and a worker that looks slow gets no step from which it could learn that."""
        if self.measured is not None and self.factors != (1.0, 1.0):
            assert self._correction is not None
            self._correction = Correction(self._correction.model)
            self._corrected = None

    def record(self, rows: int, context: float, tokens: int, position: float, seconds: float) -> None:
        """Learns from a step, as in `StepModel.step`."""
        size, observed, correction = (rows, context, tokens, position), self._observed, self._correction
        # A step of a size that was not there yet may show that the table is wrong, and not the level.
        if correction is not None and observed.knows(rows, tokens):
            correction.record(*size, seconds)
            self._corrected = None
        if not observed.learns(rows, tokens):
            return
        if correction is not None:
            decode, prompt = correction.model.parts(*size)
            expected = correction.decode * decode + correction.prompt * prompt
            seconds *= (decode + prompt) / expected if expected > 0 else 1.0
        observed.add(*size, seconds)
        if (table := observed.model) is not None:
            self._correction = correction or Correction(table)
            self._correction.model = table
            self._corrected = None
