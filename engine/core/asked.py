"""What the client of a request asks for, as steps need it. Pure."""

import math
from array import array
from typing import NamedTuple

import numpy as np

from baton.content import packed
from baton.engine.api.request import EngineRequest

DRAW = np.dtype(
    [("seed", "u8"), ("temperature", "f4"), ("top_k", "i4"), ("top_p", "f4"), ("min_p", "f4")], align=True
)
"""Sampling parameters of one request as a record. Joining the records of a batch gives one array."""


class Asked(NamedTuple):
    """Never changes."""

    longest: int
    """Number of tokens, prompt included, at which the request ends."""
    plain_from: float
    """Number of tokens from which on `draw` alone says how the next token is chosen."""
    draw: bytes
    """A `DRAW` record."""
    repetitions: "array[int]"
    """Each token of the prompt once, if a repetition penalty asks for them. No other penalty does."""
    scores_to: int
    """Positions [0, scores_to) predict a token of the prompt whose log probability is asked for."""
    due: float
    """When the prompt should be computed; infinite if it is in no hurry."""


def asked_of(request: EngineRequest, max_model_len: int) -> Asked:
    p, prompt = request.sampling, len(request.prompt_ids)
    penalised = p.repetition_penalty != 1 or bool(p.presence_penalty or p.frequency_penalty)
    special = penalised or p.has_grammar or p.logit_bias or p.logprobs is not None
    seed = p.seed & (1 << 64) - 1
    return Asked(
        longest=min(prompt + p.max_tokens, max_model_len),
        plain_from=math.inf if special else prompt + p.min_tokens,
        draw=np.array((seed, p.temperature, p.top_k, p.top_p, p.min_p), DRAW).tobytes(),
        repetitions=packed(list({*request.prompt_ids}) if p.repetition_penalty != 1 else []),
        scores_to=0 if p.prompt_logprobs is None else prompt - 1,
        due=request.arrived + request.first_token_within,
    )
