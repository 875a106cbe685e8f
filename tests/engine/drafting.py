"""Drafters for tests, which know the tokens of each request, and engines that draft as much as they can."""

import random
from collections.abc import Mapping, Sequence

import numpy as np

from baton.engine import Engine
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.speculation import PromptLookup


class Known(PromptLookup):
    """Knows the tokens of requests, by id, and makes a share of its guesses wrong."""

    def __init__(self, answers: Mapping[bytes, Sequence[int]], wrong: float, vocabulary: int) -> None:
        self._answers = answers
        self._wrong = wrong
        self._vocabulary = vocabulary
        self._rng = random.Random(1)

    def propose(self, live: LiveRequest, drafts: Sequence[int], count: int) -> Sequence[int]:
        first = live.num_known + len(drafts) - len(live.request.prompt_ids)
        right = [*self._answers[live.id][first : first + count], *[0] * count][:count]
        return [(token + (self._rng.random() < self._wrong)) % self._vocabulary for token in right]


def draft_always(
    engine: Engine,
    answers: Mapping[bytes, Sequence[int]] | None = None,
    wrong: float = 0.0,
    vocabulary: int = 199,
) -> None:
    """All requests get all drafts that they may have, from a `Known`. `answers` None: from the draft head.
    `vocabulary`: a wrong guess is another token below it."""
    speculation = engine.scheduler.speculation
    assert speculation is not None
    if answers is not None:
        speculation.drafter = Known(answers, wrong, vocabulary)
    costs = speculation.costs
    costs.is_known = lambda rows: True
    costs.seconds = lambda rows: np.ones(len(costs.sizes) - costs.index(rows))
