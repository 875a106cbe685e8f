"""Graphs of a tower: an image has the same embeddings as without them. On a CPU a replay runs again what was
captured, on the same memory."""

import json
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.execution.graphs import LateCapture
from baton.vision import tower_graphs
from baton.vision.encoder import Encoder
from baton.vision.tower import Tower
from baton.vision.tower_graphs import Capture, TowerGraphs
from baton.vision.turns import Turns
from tests.device import DEVICE
from tests.engine import replays
from tests.vision.towers import SETTINGS, SIZES, TOWERS

CAPTURE: Callable[[], Capture] = replays.Capture if DEVICE == "cpu" else LateCapture
ROUNDS = {"gemma4"} if DEVICE == "cuda" else set()
"""On a GPU their attention has another kernel while it is captured (torch 2.11), so they are launched."""
MOST_TOKENS = 16
LAYERS = 2


class Counted(Turns):
    """Counts layers."""

    layers = 0

    def next_layer(self) -> None:
        self.layers += 1
        super().next_layer()


class Captures:
    """Counts pools, and graphs by their pool."""

    def __init__(self) -> None:
        self.graphs = Counter[int]()

    def __call__(self) -> Capture:
        pool, capture = len(self.graphs), CAPTURE()
        self.graphs[pool] = 0

        def counted(work: Any) -> Any:
            graphs = capture(work)
            self.graphs[pool] += len(graphs)
            return graphs

        return counted


def tower_of(kind: str, graphs: TowerGraphs | None = None, turns: Turns | None = None) -> Tower:
    config, device = json.dumps(TOWERS[kind] | {"model_type": kind}), torch.device(DEVICE)
    return Tower(SETTINGS, config, {}, device, torch.float32, turns or Turns(), graphs=graphs)


def graphs_of(new_pool: Callable[[], Capture] = CAPTURE) -> TowerGraphs:
    return TowerGraphs(new_pool, MOST_TOKENS, SETTINGS.pixel_bytes(1, 1), torch.device(DEVICE))


def image_of(seed: int, rows: int, columns: int) -> tuple[bytes, int, int]:
    pixels = np.random.default_rng(seed).integers(0, 256, SETTINGS.pixel_bytes(rows, columns), dtype=np.uint8)
    return pixels.tobytes(), rows, columns


@pytest.mark.parametrize("kind", TOWERS)
def test_replayed_images_have_the_same_embeddings(kind: str) -> None:
    """Sizes share the memory of their graphs. Each layer waits for its turn, as without them."""
    captures, turns = Captures(), Counted()
    tower, plain = tower_of(kind, graphs_of(captures), turns), tower_of(kind)
    sizes = [(4, 4)] if kind in SIZES else [(2, 5), (3, 1), (4, 4)]
    for seed in range(4 * len(sizes)):
        image, before = image_of(seed, *sizes[seed % len(sizes)]), turns.layers
        np.testing.assert_array_equal(tower.encode(*image), plain.encode(*image))
        if kind not in ROUNDS:
            assert turns.layers - before == (2 if seed // len(sizes) == 1 else 1) * LAYERS
    assert captures.graphs == {0: len(sizes if kind not in ROUNDS else sizes[:1]) * (1 + LAYERS)}


def test_graphs_use_weights_that_changed_in_place() -> None:
    tower, plain = tower_of("qwen3_vl", graphs_of()), tower_of("qwen3_vl")
    for seed in range(3):
        before = tower.encode(*image_of(seed, 2, 2))
    for each in (tower, plain):
        for values in each._model.parameters():
            values.mul_(1.5)
    image = image_of(2, 2, 2)
    assert not np.array_equal(before, plain.encode(*image))
    np.testing.assert_array_equal(tower.encode(*image), plain.encode(*image))


def test_large_images_have_no_graphs() -> None:
    captures = Captures()
    tower = tower_of("qwen3_5", graphs_of(captures))
    for seed in range(3):
        tower.encode(*image_of(seed, 4, MOST_TOKENS // 4 + 1))
    assert not captures.graphs


def test_few_sizes_have_graphs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tower_graphs, "MOST_SIZES", 2)
    monkeypatch.setattr(tower_graphs, "MOST_SEEN", 1)
    captures = Captures()
    tower, plain = tower_of("qwen3_5", graphs_of(captures)), tower_of("qwen3_5")

    def encode(*columns: int) -> None:
        for seed, each in enumerate(columns):
            image = image_of(seed, 1, each)
            np.testing.assert_array_equal(tower.encode(*image), plain.encode(*image))

    encode(1, 2, 1, 2, 1, 2)
    assert not captures.graphs, "more sizes come between than are remembered"
    encode(3, 3, 3, 4, 4, 4)
    assert captures.graphs == {0: 2 * (1 + LAYERS)}
    encode(5, 5, 5)
    assert captures.graphs == {0: 2 * (1 + LAYERS), 1: 1 + LAYERS}, "all are dropped for the third size"
    encode(3, 3, 3)
    assert captures.graphs[1] == 2 * (1 + LAYERS)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Tensor]]:
    """The memory that graphs have, in the order in which they took it."""
    made, empty = list[weakref.ref[Tensor]](), torch.empty

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "empty", noted)
    return lambda: [tensor for ref in made if (tensor := ref()) is not None and tensor.nbytes]


def test_an_encoder_gives_back_the_memory_of_graphs(memory: Callable[[], list[Tensor]]) -> None:
    captures = Captures()
    tower, plain = tower_of("qwen3_5", graphs_of(captures)), tower_of("qwen3_5")
    encoder = Encoder(tower.encode, Turns(), 0, give_back=tower.give_back)
    images = [image_of(seed, 2, 2) for seed in range(6)]

    def encode(numbers: range) -> None:
        for i in numbers:
            found = encoder.embeddings(bytes([i]) * 32, *images[i]).result()
            np.testing.assert_array_equal(found, plain.encode(*images[i]))

    encode(range(3))
    assert len(memory()) == 2
    encoder.give_back()
    assert not memory()
    encode(range(3, 6))
    assert captures.graphs == {0: 1 + LAYERS, 1: 1 + LAYERS}
    encoder.close()


def test_a_tower_that_cannot_be_captured_is_launched(caplog: pytest.LogCaptureFixture) -> None:
    asked = list[int]()

    def fails(_: Any) -> Any:
        asked.append(1)
        raise RuntimeError("the host reads what the device computes")

    is_launched(graphs_of(lambda: fails), caplog, "the host reads what the device computes")
    assert len(asked) == 1


def test_a_tower_whose_graphs_round_in_another_way_is_launched(
    memory: Callable[[], list[Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[int]()

    def rounds(work: Any) -> Any:
        asked.append(1)

        def other(cut: Any) -> None:
            work(cut)
            memory()[-1].bitwise_xor_(1)

        return CAPTURE()(other)

    is_launched(graphs_of(lambda: rounds), caplog, "another way")
    assert len(asked) == 1
    assert not memory()


def is_launched(graphs: TowerGraphs, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """A tower with these graphs computes as without them, and says once why it has none."""
    tower, plain = tower_of("qwen3_5", graphs), tower_of("qwen3_5")
    with caplog.at_level(logging.WARNING):
        for seed in range(5):
            image = image_of(seed, 2, 2)
            np.testing.assert_array_equal(tower.encode(*image), plain.encode(*image))
    assert len(caplog.records) == 1
    assert reason in caplog.text
