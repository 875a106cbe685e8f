"""Checks of the tokens and rates that workers report."""

import math

import pytest

from baton.router.workers.checks import clear_invalid_rates, token_defect
from baton.rpc import worker_pb2 as pb


def token(token_id: int = 1, **logprobs) -> pb.TokenEvent:
    return pb.TokenEvent(token_id=token_id, logprobs=pb.TokenLogprobs(**logprobs))


@pytest.mark.parametrize(
    ("event", "named"),
    [
        (token(logprob=math.nan), "not a number"),
        (token(logprob=math.inf), "infinite"),
        (token(top_ids=[1, 2], top_logprobs=[-1.0, math.nan]), "not a number"),
        (token(top_ids=[1, 2], top_logprobs=[-1.0]), "2 top_ids and 1 top_logprobs"),
        (token(100), "token 100 is beyond the vocabulary of 100"),
        (token(top_ids=[100], top_logprobs=[-1.0]), "token 100"),
    ],
)
def test_an_invalid_token_is_found(event: pb.TokenEvent, named: str):
    assert named in token_defect(event, 100)


def test_a_valid_token_passes():
    assert not token_defect(pb.TokenEvent(token_id=99), 100)
    assert not token_defect(token(99, logprob=-math.inf, top_ids=[0], top_logprobs=[-math.inf]), 100)


def test_invalid_rates_become_unknown():
    status = pb.WorkerStatus(prefill_tokens_per_s=math.inf, step_seconds=0.5, chunk_seconds=math.nan)
    assert clear_invalid_rates(status) == ["prefill_tokens_per_s inf", "chunk_seconds nan"]
    assert status == pb.WorkerStatus(step_seconds=0.5)
