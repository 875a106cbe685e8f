"""How long an image takes the encoder, launched operation by operation and replayed by CUDA graphs.

Both take turns, alone and beside a thread that computes Python, as the thread of a busy engine does: each
launch may wait for Python's lock.

    encoder.launched.alone  an image, each operation launched
    encoder.replayed.alone  the same image by CUDA graphs, ÷ launched. Only on GPUs, like all of `replayed`
    encoder.launched.busy   beside a thread that holds Python's lock for most of the time
    encoder.replayed.busy   the same by CUDA graphs, ÷ launched
    encoder.captured        the image of a size in which graphs are captured
    encoder.kept            memory of the GPU that graphs keep
    encoder.differ          bytes of embeddings that differ between launched and replayed: 0

On a GPU, with dummy weights of Qwen3-VL-8B and an image of 1080p. On a CPU with a tiny model.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch

from baton.bench.lab.driver import MIN_PAIRS, Bench, Option, Run, in_turns
from baton.bench.lab.shapes import SEEING_ON, SHAPES, write_shape
from baton.bench.report import Row
from baton.engine.execution.image_encoder import tower_graphs
from baton.engine.loader.hf_config import read_config
from baton.vision.tower import Tower
from baton.vision.turns import Turns

DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
REPLAYED_ON = ("cuda",)
WARM = 3
"""Images before the measured ones. Graphs are captured in the second one."""
HELD, FREE = 0.5e-3, 0.1e-3
"""Seconds that the busy thread computes, and sleeps, in turns."""

Encode = Callable[[], np.ndarray]


@contextmanager
def busy() -> Iterator[None]:
    """A thread that computes Python meanwhile."""
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            until = time.monotonic() + HELD
            while time.monotonic() < until:
                pass
            time.sleep(FREE)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def encoders(run: Run, model: Path, width: int, height: int) -> dict[str, Encode]:
    """By how they compute. Each is warm."""
    vision, on = read_config(model).vision, torch.device(run.device)
    assert vision is not None, "a model that takes images"
    settings = vision.settings
    rows, columns = max(1, height // settings.side), max(1, width // settings.side)
    count = settings.pixel_bytes(rows, columns)
    pixels = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8).tobytes()
    encodes: dict[str, Encode] = {}
    for name in ("launched", "replayed") if run.device in REPLAYED_ON else ("launched",):
        graphs = tower_graphs(settings, on) if name == "replayed" else None
        tower = Tower(settings, vision.tower, {}, on, DTYPE[run.device], Turns(), graphs=graphs)
        encodes[name] = partial(tower.encode, pixels, rows, columns)
        before = _reserved(run.device)
        warm_seconds = [seconds(encodes[name]) for _ in range(WARM)]
        if graphs is not None:
            run.add(Row("encoder.captured", 1e3 * warm_seconds[1], "ms"))
            run.add(Row("encoder.kept", (_reserved(run.device) - before) / 1e9, "GB"))
    return encodes


def _reserved(device: str) -> int:
    """Without what could be given back."""
    if device == "cpu":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def seconds(encode: Encode) -> float:
    began = time.monotonic()
    encode()
    return time.monotonic() - began


def measure(run: Run) -> None:
    width, height = map(int, run.args.pixels.split("x"))
    model = write_shape(run.args.model_shape, run.directory, tokenizer=True)
    encode = encoders(run, model, width, height)
    for name, load in (("alone", nullcontext), ("busy", busy)):

        def beside(encode: Encode, load: Callable[[], AbstractContextManager[None]] = load) -> float:
            with load():
                return seconds(encode)

        times = in_turns(*(partial(beside, each) for each in encode.values()), rounds=run.args.images)
        run.add_median(f"encoder.launched.{name}", times[0], "ms", scale=1e3)
        if "replayed" in encode:
            run.add_ratio(f"encoder.replayed.{name}", times[1], "ms", times[0], "launched", scale=1e3)
    if "replayed" in encode:
        differ = np.count_nonzero(encode["replayed"]() != encode["launched"]())
        run.add(Row("encoder.differ", float(differ), "bytes", goal=0.0))


BENCH = Bench(
    "encoder",
    measure,
    __doc__,
    options=(
        Option("--model-shape", default=SEEING_ON, choices=SHAPES, metavar="NAME"),
        Option("--pixels", "of the image", {"cpu": "320x240", "cuda": "1920x1080"}, metavar="WIDTHxHEIGHT"),
        Option("--images", default=20, short=MIN_PAIRS),
    ),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
