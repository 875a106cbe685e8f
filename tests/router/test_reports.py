"""Checks of the tokens and rates that workers report."""

import math
from typing import Any

import pytest

from baton.router.workers.checks import clear_invalid_rates, step_model, token_defect
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import StepModel


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


def model(**changes: Any) -> pb.StepModel:
    fields: dict[str, Any] = {
        "rows": [1, 8], "decode_seconds": [0.25, 0.5], "tokens": [16, 64, 512],
        "prompt_seconds": [0.5, 0.5, 4], "overlap": 1, "decode_factor": 2, "prompt_factor": 0.5,
    }  # fmt: skip
    return pb.StepModel(**{**fields, **changes})


def test_a_model_of_steps_has_its_factors():
    table = StepModel((1, 8), (0.25, 0.5), 0.125, (16, 64, 512), (0.5, 0.5, 4.0), 2**-20, 1.0)
    assert table.corrected(2.0, 0.5).prompt_seconds == (0.25, 0.25, 2.0)
    assert step_model(model(context_seconds=0.125, pair_seconds=2**-20)) == table.corrected(2.0, 0.5)


def test_the_table_of_steps_is_kept_while_only_factors_change():
    before = step_model(model())
    assert before is not None
    for changes, is_kept in (({"decode_factor": 1}, True), ({"overlap": 0}, False)):
        after = step_model(model(**changes), before)
        assert after is not None
        assert (after.table is before.table, after.table == before.table) == (is_kept, is_kept)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": []},
        {"rows": [0, 8]},
        {"rows": [8, 8]},
        {"rows": [1, 8, 9]},
        {"rows": [], "decode_seconds": []},
        {"tokens": [16, 512, 64]},
        {"rows": range(1, 100), "decode_seconds": [1.0] * 99},
        {"decode_seconds": [0.5, 0.25]},
        {"decode_seconds": [-0.5, 0.25]},
        {"prompt_seconds": [0.5, math.nan, 4]},
        {"prompt_seconds": [math.nan] * 3},
        {"prompt_seconds": [0.5, 0.5, math.inf]},
        {"rows": [1], "decode_seconds": [math.nan]},
        {"context_seconds": -1},
        {"pair_seconds": math.nan},
        {"overlap": 1.5},
        {"overlap": math.nan},
        {"decode_factor": 0},
        {"prompt_factor": math.inf},
        {"prompt_factor": 1e6},
    ],
)
def test_nonsense_is_no_model_of_steps(changes: dict[str, Any]):
    assert step_model(model(**changes)) is None


def test_invalid_rates_become_unknown():
    status = pb.WorkerStatus(prefill_tokens_per_s=math.inf, step_seconds=0.5, long_chunk_seconds=math.nan)
    assert clear_invalid_rates(status) == ["prefill_tokens_per_s inf", "long_chunk_seconds nan"]
    assert status == pb.WorkerStatus(step_seconds=0.5)
