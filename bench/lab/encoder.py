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
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch

from baton.bench.lab import driver
from baton.bench.lab.driver import report_of
from baton.bench.lab.shapes import SEEING, SHAPES, write_shape
from baton.bench.report import Report, Row
from baton.engine.execution.image_encoder import tower_graphs
from baton.engine.loader.hf_config import read_config
from baton.vision.tower import Tower
from baton.vision.turns import Turns

SHAPE = {"cpu": "small-qwen3-vl", "cuda": SEEING}
PIXELS = {"cpu": (320, 240), "cuda": (1920, 1080)}
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


def encoders(model: Path, device: str, width: int, height: int, report: Report) -> dict[str, Encode]:
    """By how they compute. Each is warm."""
    vision, on = read_config(model).vision, torch.device(device)
    assert vision is not None, "a model that takes images"
    settings = vision.settings
    rows, columns = max(1, height // settings.side), max(1, width // settings.side)
    count = settings.pixel_bytes(rows, columns)
    pixels = np.random.default_rng(0).integers(0, 256, count, dtype=np.uint8).tobytes()
    encodes: dict[str, Encode] = {}
    for name in ("launched", "replayed") if device in REPLAYED_ON else ("launched",):
        graphs = tower_graphs(settings, on) if name == "replayed" else None
        tower = Tower(settings, vision.tower, {}, on, DTYPE[device], Turns(), graphs=graphs)

        def encode(tower: Tower = tower) -> np.ndarray:
            return tower.encode(pixels, rows, columns)

        warm_seconds, before = list[float](), _reserved(device)
        for _ in range(WARM):
            warm_seconds.append(seconds(encode))
        encodes[name] = encode
        if graphs is not None:
            report.add(Row("encoder.captured", 1e3 * warm_seconds[1], "ms"))
            report.add(Row("encoder.kept", (_reserved(device) - before) / 1e9, "GB"))
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


def measure(encode: dict[str, Encode], images: int, report: Report) -> None:
    for name, load in (("alone", nullcontext), ("busy", busy)):
        times: dict[str, list[float]] = {each: [] for each in encode}
        for _ in range(images):
            for each, compute in encode.items():
                with load():
                    times[each].append(seconds(compute))
        report.add_median(f"encoder.launched.{name}", times["launched"], "ms", scale=1e3)
        if "replayed" in times:
            row, to = f"encoder.replayed.{name}", "launched"
            report.add_ratio(row, times["replayed"], "ms", times["launched"], to, scale=1e3)
    if "replayed" in encode:
        differ = np.count_nonzero(encode["replayed"]() != encode["launched"]())
        report.add(Row("encoder.differ", float(differ), "bytes", goal=0.0))


def main() -> int:
    p = driver.parser(__doc__ or "")
    p.add_argument(
        "--model-shape", choices=SHAPES, metavar="NAME", help="default: qwen3-vl-8b; small on CPUs"
    )
    p.add_argument(
        "--pixels", metavar="WIDTHxHEIGHT", help="of the image (default: 1920x1080; 320x240 on CPUs)"
    )
    args = driver.with_counts(p, images=(20, driver.MIN_PAIRS))
    width, height = map(int, args.pixels.split("x")) if args.pixels else PIXELS[args.device]
    report = report_of("encoder", args)
    with tempfile.TemporaryDirectory(prefix="baton-encoder-") as temporary:
        model = write_shape(args.model_shape or SHAPE[args.device], Path(temporary), tokenizer=True)
        measure(encoders(model, args.device, width, height, report), args.images, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
