"""Drafts for the requests of a step, and what became of them. Pure.

    schedule ─▶ draft: how many, which ─▶ the step samples all rows ─▶ record: how many were right

A token is a function of seed, position and logits. So a draft is accepted exactly if it is the token that the
step samples before it: drafts change no stream, only its speed (Leviathan 2023, for such a sampler).

A state cannot be cut to fewer tokens. So a request with states keeps those before its drafts. If a draft is
wrong, it goes on with these, and the next step computes the right tokens again. Its drafts come only after
tokens that the host knows, and a draft head has made them after these.
"""

from collections.abc import Sequence

import numpy as np

from baton.engine.api.config import SpeculativeConfig
from baton.engine.api.stats import SpeculationStats
from baton.engine.core.draft_counts import StepCosts, draft_counts
from baton.engine.core.live_request import LiveRequest
from baton.engine.core.request_memory import RequestMemory
from baton.engine.core.request_states import RequestStates
from baton.engine.core.step_builder import Schedule
from baton.engine.step_drafts import Draft

FORGET = 0.98
"""Factor on the weight of what became of drafts, with each later step. So a request without drafts gets some
again."""
PRIOR = 0.5
"""Acceptance of a drafter of which nothing is known."""


class PromptLookup:
    """Finds the last tokens earlier in prompt or output, and proposes what followed there (Saxena 2023).

    It takes the place where most tokens before are the same, up to a limit, and of these the last one. If
    that is near the end, what followed repeats."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.prompt_lookup_max
        self._least = config.prompt_lookup_min

    def propose(self, live: LiveRequest, drafts: Sequence[int], count: int) -> Sequence[int]:
        """`count` guesses of what follows the known tokens of a request and these drafts; or none."""
        known = np.frombuffer(live.token_ids, np.int32)[: live.num_known]
        tokens = np.append(known, np.array(drafts, np.int32)) if len(drafts) else known
        places = np.flatnonzero(tokens[self._least - 1 : -1] == tokens[-1]) + self._least - 1
        for before in range(1, min(self._most, len(tokens) - 1)):
            same = places[places >= before]
            same = same[tokens[same - before] == tokens[-1 - before]]
            if len(same):
                places = same
            elif before < self._least:
                return ()
            else:
                break
        if not len(places):
            return ()
        follows = tokens[places[-1] + 1 :]
        return np.resize(follows, count).tolist()


class Speculation:
    """Chooses the drafts of each step, and learns from what became of them."""

    def __init__(self, drafter: PromptLookup | None, most: int, sizes: Sequence[int]) -> None:
        """`drafter` None: a draft head on the device. `most`: drafts of a request in a step. `sizes`: as in
        `StepCosts`; the last one is the most tokens of a step with drafts."""
        self.drafter = drafter
        self.waits = False
        """The next step may have drafts if the tokens of the step under way are known before."""
        self.costs = StepCosts(sizes)
        self._steps = self._drafts = self._accepted = 0
        self._most = most
        self._guesses = 0  # of a draft head in the newest step
        self._tested = self._right = 0.0  # of all requests, recent ones

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats(self._steps, self._drafts, self._accepted)

    def draft(self, schedule: Schedule, memory: RequestMemory) -> None:
        """Adds drafts to a step, and notes what comes after drafts. Takes blocks only if they are spare."""
        for live in schedule.chunks:
            if live.slack:
                schedule.drafts[live] = Draft((), 0, live.slack)
        schedule.guesses, self.waits = self._guesses, False
        if schedule.prompts or schedule.preempted:
            return  # prompts fill the step
        self._tested *= FORGET
        self._right *= FORGET
        requests = [live for live in schedule.chunks if live.num_left == 1]
        limits = [self._limit(live) for live in requests]
        if (states := memory.states) is not None:
            requests = [live for live, chunk in schedule.chunks.items() if chunk.stop == len(live.token_ids)]
            limits = [
                min(self._limit(live), states.most_drafts(live, schedule.chunks[live])) for live in requests
            ]
        rows = sum(map(len, schedule.chunks.values()))
        counts = draft_counts([self._acceptance(live) for live in requests], limits, rows, self.costs)
        if self.drafter is None:
            schedule.guesses = self._guesses = max(counts, default=0)
        for live, count in zip(requests, counts, strict=True):
            # The guesses of a draft head have KV, too.
            most = live.asked.longest - len(live.token_ids)
            if count <= 0 or not memory.has_room_for(live, min(live.slack + count + schedule.guesses, most)):
                continue
            if states is not None:
                self._propose_known(live, count, schedule, states)
            else:
                self._propose(live, count, schedule)

    def _limit(self, live: LiveRequest) -> int:
        """The last token of a request is no draft: nothing comes after it."""
        if live.num_computable < 1:
            return 0
        return max(0, min(self._most, live.asked.longest - 1 - len(live.token_ids) - live.slack))

    def _acceptance(self, live: LiveRequest) -> float:
        prior = (self._right + PRIOR) / (self._tested + 1)
        live.guesses.tested *= FORGET
        live.guesses.accepted *= FORGET
        return (live.guesses.accepted + prior) / (live.guesses.tested + 1)

    def _propose(self, live: LiveRequest, count: int, schedule: Schedule) -> None:
        """Guesses the tokens that the step may sample. If a step is under way, also those that this one may
        give. A draft head has made the guesses in the step before, or makes them in the one under way."""
        if self.drafter is None:
            guesses = None if live.pending else live.guesses.of(live.num_known, count)
            count = min(count, live.making) if guesses is None else len(guesses)
            if count:
                schedule.drafts[live] = Draft(guesses, count, live.slack)
            return
        under_way = live.guesses.of(live.num_known, live.slack)
        wanted = count + live.pending
        proposed = self.drafter.propose(live, under_way, wanted)
        if len(proposed) < wanted:
            return
        guesses = [*under_way, *proposed][live.pending :]
        schedule.drafts[live] = Draft(guesses, count, live.slack)
        live.guesses.tokens, live.guesses.position = guesses, len(live.token_ids)

    def _propose_known(
        self, live: LiveRequest, count: int, schedule: Schedule, states: RequestStates
    ) -> None:
        """As `_propose`, for a request with states."""
        if self.drafter is None:
            guesses, self.waits = live.guesses.of(live.num_known, count), True
        else:
            guesses = self.drafter.propose(live, (), count)
            self.waits = self.waits or bool(guesses)
        if guesses and not live.pending and states.keep(live):
            schedule.drafts[live] = Draft(guesses, len(guesses))
            live.guesses.tokens, live.guesses.position = guesses, len(live.token_ids)

    def learn_cost(self, schedule: Schedule, seconds: float) -> None:
        """Learns how long a step took that only decodes. The time of a draft head is that of drafts."""
        has_drafts = len(schedule.sampled) > len(schedule.chunks)
        if self.drafter is not None or has_drafts == (schedule.guesses > 0):
            drafts = sum(draft.count for draft in schedule.drafts.values())
            self.costs.record(sum(map(len, schedule.chunks.values())) + drafts, seconds)

    def record(self, live: LiveRequest, count: int, accepted: int, guesses: Sequence[int] = ()) -> None:
        """Learns that the first `accepted` of `count` drafts were right. `guesses`: what a draft head says of
        the tokens that come next."""
        if guesses and not live.handover:
            live.guesses.tokens, live.guesses.position = guesses, live.num_known
        if not count:
            return
        self._steps += 1
        self._drafts += count
        self._accepted += accepted
        tested = accepted + (accepted < count)
        live.guesses.tested += tested
        live.guesses.accepted += accepted
        self._tested += tested
        self._right += accepted
