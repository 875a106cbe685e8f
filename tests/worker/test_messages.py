"""Encoding and decoding keeps every type that a message embeds."""

import dataclasses
from typing import Any

import pytest

from baton.engine import (
    EngineStats,
    ExpertStats,
    MemoryStats,
    MixedStep,
    OffloadStats,
    SpeculationStats,
)
from baton.kv_names import Tier
from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import StepModel
from baton.worker import messages
from baton.worker.messages import FromEngine, ToEngine
from baton.worker.stats import RequestCounts
from tests.layouts import kv_layout

ID = bytes(range(16))
ORIGIN = messages.Origin(ID, "name", "", 2.5)


FIELDS = [field.name for field in dataclasses.fields(EngineStats) if field.type is int]
COUNTS: dict[str, Any] = {name: number for number, name in enumerate(FIELDS, 1) if name != "decode_context"}


@pytest.mark.parametrize(
    "message",
    [
        messages.FromRouter(1, b"bytes", ORIGIN, [b"", b"pixels"]),
        messages.FromRouter(1, b"bytes"),
        messages.Detached(1),
        messages.Exit(),
    ],
)
def test_messages_to_the_engine_survive_encoding(message: ToEngine) -> None:
    assert messages.decode_to_engine(messages.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        messages.ToRouter(3, b"bytes"),
        messages.Failed(ORIGIN, pb.FAILURE_CODE_KV_FAILED, "why"),
        messages.ToRouter(None, b"bytes"),
        messages.EngineStatus(
            1,
            EngineStats(
                step_seconds=0.25,
                fastest_step_seconds=0.125,
                prefill_tokens_per_s=0.5,
                prefill_position=4096.0,
                long=MixedStep(9, 0.75),
                step_table=StepModel((1, 8), (0.25, 0.5), 0.125, (16,), (0.5,), 0.0, 1.0),
                step_factors=(2.0, 0.5),
                decode_context=100,
                gap_cost=2.5,
                experts=ExpertStats([1, 2], 1.5, 2.0),
                offload=[OffloadStats(Tier.HOST, 1, 2, 0.5, 3, 4, 5, 6, 7)],
                speculation=SpeculationStats(3, 9, 5),
                memory=MemoryStats(300, 200, 150, 100, 50, 0.25),
                **COUNTS,
            ),
            RequestCounts(1, 2, 3, 4, 5),
            pb.WorkerStatus(prefix_links=[pb.PrefixLink(incarnation=1, tier=pb.TIER_DISK, wait=0.5)]),
        ),
        messages.EngineReady(
            pb.WorkerDescription(model_fingerprint="model", adapters=[pb.Adapter(name="a")]),
            kv_layout(2, 4, 8, "float32"),
        ),
    ],
)
def test_messages_from_the_engine_survive_encoding(message: FromEngine) -> None:
    assert messages.decode_from_engine(messages.encode(message)) == message
