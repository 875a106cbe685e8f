"""Images of requests: their tokens, the time of an encoder, and whether encoders of their own pay.

A worker that encodes computes images and prompts with the same GPU, so each token of such a prompt takes its
share of the images, too. Encoders of their own take images in the order of their arrival. A prompt then waits
for its last image. That is an upper bound: a worker computes the text before an image, and the images that it
has, meanwhile.
"""

import heapq
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from baton.cluster.options.clients import SizingOptions
from baton.cluster.tools.sizing.answer import GROWTH, Answer, Pools, Targets, answer
from baton.cluster.tools.sizing.simulated import SEED
from baton.cluster.tools.sizing.speeds import Speeds
from baton.engine.model_config import ModelConfig, VisionConfig
from baton.steps.quantiles import percentile
from baton.system.words import counted

SLOWER = 2.0
"""Times that an encoder takes as long for a multiplication as prompts do. The kernels of Qwen3-VL-8B's took
47 ms for 2,040 tokens on an H200: its layers are narrow, and its heads have 72 numbers."""
REQUESTS = 2_000
"""Simulated, for the wait at encoders."""
MOST_ENCODERS, MOST_TRIED = 256, 3
"""Where workers that encode miss the targets; and how many numbers of encoders that leave time are tried."""


@dataclass(frozen=True, slots=True)
class Images:
    """Of a request.

    Attributes:
        tokens: of one image.
        seconds: of an encoder for one image.
        measured: the seconds were.
    """

    count: int
    tokens: int
    seconds: float
    measured: bool

    @property
    def all_seconds(self) -> float:
        return self.count * self.seconds


class Choice(NamedTuple):
    """The pools, how many encoders of their own they have, and why, for people."""

    answer: Answer
    encoders: int
    why: str


def images_of(sizing: SizingOptions, model: ModelConfig, speeds: Speeds) -> Images | None:
    """None: the load has none. `speeds`: of a prefill worker. Raises ValueError with the flag."""
    if not sizing.images:
        return None
    if sizing.agents is not None:
        raise ValueError("--advanced.images: agents send none; leave out --agents")
    if (vision := model.vision) is None:
        raise ValueError(
            f"--advanced.images: {sizing.model} takes no images; --model must be a directory, or a name on "
            "the hub, of a model that does, such as Qwen/Qwen3-VL-8B-Instruct"
        )
    match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", sizing.image_size)
    width, height = map(int, match.groups()) if match else (0, 0)
    if not width or not height:
        raise ValueError(
            f"--advanced.image-size {sizing.image_size}: give width and height in pixels, as 1920x1080"
        )
    try:
        rows, columns = vision.settings.grid(*vision.settings.size(height, width))
    except ValueError as error:
        raise ValueError(f"--advanced.image-size {sizing.image_size}: {error}") from error
    tokens = rows * columns
    measured = speeds.encode_token_seconds * tokens
    return Images(sizing.images, tokens, measured or estimated(vision, tokens, speeds), bool(measured))


def estimated(vision: VisionConfig, tokens: int, speeds: Speeds) -> float:
    """Seconds of an encoder, from the speed of the model's prompts: for the multiplications of its layers,
    and for those of its attention, in which each patch sees all others."""
    settings, patches = json.loads(vision.tower), tokens * vision.settings.merge_size**2
    tower = settings.get("vision_config", settings)
    depth = tower.get("depth") or tower["num_hidden_layers"]
    hidden = tower.get("embed_dim") or tower["hidden_size"]
    wide = tower.get("intermediate_size") or hidden * tower["mlp_ratio"]
    products = depth * (4 * hidden**2 + 2 * hidden * wide) * patches
    attention = depth * hidden * patches**2 * speeds.pair_seconds_of_number
    return SLOWER * (products / speeds.products_per_s + attention)


def with_images(load: SizingOptions, images: Images | None) -> SizingOptions:
    """The load, whose prompts have the tokens of their images."""
    return load if images is None else replace(load, input_len=load.input_len + images.count * images.tokens)


def encoding(speeds: Speeds, load: SizingOptions, images: Images) -> Speeds:
    """A worker that encodes the images of its prompts. `load` has their tokens."""
    return speeds.encoding(images.all_seconds / load.input_len)


def choose(
    of_prefill: Speeds, of_decode: Speeds, load: SizingOptions, targets: Targets, images: Images
) -> Choice:
    """Workers that encode, unless encoders of their own meet the targets with fewer GPUs in all.

    `load` has the tokens of images, and the speeds are those of workers that encode nothing. Raises
    ValueError if neither meets the targets.
    """
    inside, refused = None, ValueError()
    colocated = encoding(of_prefill, load, images), encoding(of_decode, load, images)
    try:
        inside = answer(colocated[0], colocated[1], load, targets)
    except ValueError as error:
        refused = error

    def gpus(pools: Pools) -> int:
        return pools.prefill * of_prefill.ranks + pools.decode * of_decode.ranks

    most = MOST_ENCODERS if inside is None else gpus(inside.pools) - 3
    for count, remaining in islice(_numbers(load, targets, images, most), MOST_TRIED):
        try:
            apart = answer(of_prefill, of_decode, load, remaining)
        except ValueError:  # so little time is left
            continue
        if inside is None:
            return Choice(apart, count, f"a pool of their own pays: else {refused}")
        if (few := gpus(apart.pools) + count) < (many := gpus(inside.pools)):
            why = f"{counted(few, 'GPU')} with --encode {count}, {many} with workers that encode"
            return Choice(apart, count, f"a pool of their own pays: {why}")
    if inside is None:
        raise refused
    why = (
        f"workers that encode need {counted(gpus(inside.pools), 'GPU')}, and no fewer are enough with a pool"
    )
    return Choice(inside, 0, f"a pool of their own does not pay: {why}")


def _numbers(
    load: SizingOptions, targets: Targets, images: Images, most: int
) -> Iterator[tuple[int, Targets]]:
    """Numbers of encoders that leave time for prompts, and the targets of the other workers."""
    count = math.floor(load.rate * images.all_seconds)  # with no more their queue grows without bound
    while (count := count + max(1, count // GROWTH)) <= most:
        seconds = targets.ttft - encoded_within(images, load.rate, count)
        if seconds > 0:
            yield count, targets._replace(ttft=seconds)


def encoded_within(images: Images, rate: float, count: int) -> float:
    """p99 of the seconds until all images of a request are encoded. Requests arrive at random (Poisson)."""
    rng, now, end, free = random.Random(SEED), 0.0, 0.0, [0.0] * count
    waits = list[float]()
    for _ in range(REQUESTS):
        now += rng.expovariate(rate)
        for _ in range(images.count):
            end = max(now, free[0]) + images.seconds
            heapq.heapreplace(free, end)
        waits.append(end - now)
    return percentile(waits, 0.99)
