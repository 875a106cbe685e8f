"""A step of requests with one, two, five and 300 tokens: by graphs, by ranks, and kernel by kernel.

It gives the tokens of transformers."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.engine import Engine
from baton.engine.arrange import arrange
from baton.engine.execution.runner import ModelRunner
from baton.engine.step import Draws, Step, Variant
from tests.engine.conftest import MakeEngine, save_tiny

BLOCK = 16
LENGTHS = np.array([1, 2, 5, 300])
STOPS = np.array([41, 9, 64, 320])
"""Of the four requests. The last one is a prompt, the others decode."""
TOKENS = [np.random.default_rng(i).integers(3, 199, stop).tolist() for i, stop in enumerate(STOPS)]
CONFIG: dict[str, Any] = {
    "block_size": BLOCK,
    "num_blocks": 40,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
}
TABLES = [array("i", blocks) for blocks in ([9, 2, 4], [3], [5, 38, 0, 1], range(10, 30))]
SAMPLED = 5
"""Rows of a request that get a token, at most."""


def step(runner: ModelRunner, starts: Sequence[int], stops: Sequence[int], num_decodes: int) -> Step:
    """A step that samples the last rows of each request."""
    lengths = np.subtract(stops, starts)
    ends = np.cumsum(lengths)
    rows = [np.arange(end - min(n, SAMPLED), end) for n, end in zip(lengths, ends, strict=True)]
    types = np.float32, np.int32, np.int32, np.float32, np.float32
    made = arrange(
        [token for i, tokens in enumerate(TOKENS) for token in tokens[starts[i] : stops[i]]],
        starts, stops, TABLES,
        [], Variant.GREEDY, Draws(*(np.zeros(sum(map(len, rows)), dtype) for dtype in types)),
        num_decodes=num_decodes, hands_over=False, block_size=BLOCK, table_width=runner.cache.table_width,
    )  # fmt: skip
    return replace(made, sampled_rows=np.concatenate(rows))


def tokens_of(engine: Engine, *, by_graph: bool = False) -> list[int]:
    """The tokens that the step samples, after a step that computes what is before it."""
    runner = engine.runner
    starts = (STOPS - LENGTHS).tolist()
    tokens: list[int] = []
    for made in (step(runner, [0] * 4, starts, 0), step(runner, starts, STOPS.tolist(), 3)):
        launched = runner.run(made, lambda _: None)
        assert (launched.size is not None) == by_graph
        runner.sample(launched, None)
        tokens = launched.wait()
    engine.close()
    return tokens


@pytest.fixture(scope="module", params=["Llama", "DeepseekV3"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, list[int]]:
    """A model, and the tokens that transformers finds the most likely. Chunks of latents attend between
    graphs."""
    path = tmp_path_factory.mktemp("model")
    reference = save_tiny(path, request.param, max_position_embeddings=512)
    expected: list[int] = []
    for length, tokens in zip(LENGTHS, TOKENS, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens])).logits[0, -min(length, SAMPLED) :]
        expected += logits.argmax(dim=-1).tolist()
    return path, expected


@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_one_rank(model: tuple[Path, list[int]], tiny_engine: MakeEngine, graphs: bool) -> None:
    path, expected = model
    engine = tiny_engine(model=str(path), cuda_graphs=graphs, **CONFIG)
    assert tokens_of(engine, by_graph=graphs) == expected


def test_two_ranks(model: tuple[Path, list[int]], ranks: MakeEngine) -> None:
    path, expected = model
    assert tokens_of(ranks(path, 2, **CONFIG)) == expected
