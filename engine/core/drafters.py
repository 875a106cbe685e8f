"""Guesses the next tokens of a request. Pure.

A guess is never wrong for the stream: the engine compares it with the token that it samples
(`engine.core.speculation`).
"""

from collections.abc import Sequence

import numpy as np

from baton.engine.api.config import SpeculativeConfig
from baton.engine.core.live_request import LiveRequest


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
