"""The images of one prompt: which of its tokens may be computed now, and what a step computes in their place.
Pure.

An image is encoded when the tokens before it are next. A step computes no token of an image that is not
encoded yet, so the text before it does not wait. What the prefix cache has needs no embedding.

A chunk may end inside an image, unless tokens of an image see all of it (Gemma 3). Then a chunk with a token
of an image has the rest of it, too. If the step has no room for that, the image waits for the next one. A
prefix may end inside an image, since its name stands for the whole image.

In some models, rotation has three positions for a token of an image: in time, from the top and from the left
(M-RoPE, Qwen2-VL 2024). Text has three equal ones. They go on behind the longest side of an image, also in an
answer that begins right behind an image. There `generate` of transformers counts on from the last token of
the image, by axis, and so differs from its own computation of the same tokens as a prompt.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from baton.engine.api.request import Image
from baton.engine.step import NO_SHIFT, ImageInputs, Pieces, Step

Encode = Callable[[Image[bytes]], "Future[np.ndarray]"]
"""Asks for the embeddings of an image: [tokens, bytes] uint8."""


class PromptImages:
    """Of one request.

    Attributes:
        failure: why an image cannot be encoded. Empty: nothing is known to be wrong.
        asked_at: when its first image was asked for (time.monotonic()). 0: none was.
        encoded_at: when the last image that was asked for so far was encoded. 0: none was.
    """

    def __init__(
        self, images: Sequence[Image[bytes]], encode: Encode, *, grid: bool = True, sees_whole: bool = False
    ) -> None:
        """`grid`: rotation has three positions. `sees_whole`: tokens of an image see all of it."""
        self.failure = ""
        self._grid, self._sees_whole = grid, sees_whole
        self.asked_at = self.encoded_at = 0.0
        self._images = images
        self._encode = encode
        self._embeddings: dict[int, Future[np.ndarray]] = {}  # by image: those asked for, until they are used
        self._stops = np.array([image.stop for image in images])
        saved = [max(image.rows, image.columns) - image.rows * image.columns for image in images]
        self._shifts = np.cumsum([0, *saved]).astype(np.int32)  # in front of each image, and behind the last

    def computable(self, start: int, count: int) -> int:
        """How many of the `count` tokens from position `start` on may be computed now. Asks for the
        embeddings that are missing next."""
        if start >= self._stops[-1]:
            return count
        for i in range(int(np.searchsorted(self._stops, start, side="right")), len(self._images)):
            image = self._images[i]
            if image.start >= start + count:
                break
            asked, tokens = self._asked(i), image.stop - image.start
            if asked.done() and asked.exception() is None and len(asked.result()) == tokens:
                continue
            if asked.done():
                why = asked.exception() or f"another image of this name has {len(asked.result())} tokens"
                self.failure = f"images[{i}]: {why}"
            elif i + 1 < len(self._images):
                self._asked(i + 1)
            return max(0, image.start - start)
        return count

    def chunk(self, start: int, count: int, most: int) -> int:
        """The tokens of a chunk from position `start` on, if it should have `count`, and may have `most`. 0:
        none, since an image comes first that has no room."""
        if not self._sees_whole or count <= 0:
            return count
        i = int(
            np.searchsorted(self._stops, start + count, side="left")
        )  # the first that ends there or later
        if i == len(self._images) or (image := self._images[i]).start >= start + count:
            return count
        if image.start > start and image.stop > start + count:
            return image.start - start
        left = image.stop - start
        return left if count >= left or left <= most else 0

    def _asked(self, i: int) -> "Future[np.ndarray]":
        if i not in self._embeddings:
            self.asked_at = self.asked_at or time.monotonic()
            self._embeddings[i] = self._encode(self._images[i])
            self._embeddings[i].add_done_callback(self._encoded)
        return self._embeddings[i]

    def _encoded(self, _: "Future[np.ndarray]") -> None:
        """Runs in the thread of the encoder, or at once if the embeddings are kept."""
        self.encoded_at = time.monotonic()

    def shift(self, positions: np.ndarray) -> np.ndarray | None:
        """As `Step.rotary_shift`, for tokens at these positions. None: rotation has one position."""
        return None if not self._grid else self._shifts[np.searchsorted(self._stops, positions, side="right")]

    def inputs(self, positions: range) -> list["_ImagePart"]:
        """What a step computes at these positions, which are computable, by image. Rows count from the first
        of them. Embeddings that no later position needs are dropped here."""
        parts: list[_ImagePart] = []
        first = int(np.searchsorted(self._stops, positions.start, side="right"))
        for i, image in enumerate(self._images[first:], first):
            start, stop = max(image.start, positions.start), min(image.stop, positions.stop)
            if start >= stop:
                break
            embeddings = self._embeddings[i].result()[start - image.start : stop - image.start]
            index = np.arange(start, stop) - image.start
            top, left = np.divmod(index, image.columns)
            places = np.stack((np.zeros_like(index), top, left), axis=1) + image.start + self._shifts[i]
            rows = np.arange(start, stop) - positions.start
            seen_whole = np.array([[0, image.start, image.stop]] * self._sees_whole, np.int64).reshape(-1, 3)
            parts.append(_ImagePart(rows, embeddings, places, seen_whole))
            if stop == image.stop:
                del self._embeddings[i]
        return parts


def with_images(step: Step, chunks: Sequence[tuple[PromptImages | None, range]]) -> Step:
    """The step with the images of its requests: of each one its images and its positions, in the order of the
    step. Drafts may follow these positions."""
    if all(images is None for images, _ in chunks):
        return step
    shift = NO_SHIFT
    inputs: list[_ImagePart] = []
    ends = np.cumsum(step.query_lengths)
    begins = ends - step.query_lengths
    for request, ((images, positions), begin, end) in enumerate(zip(chunks, begins, ends, strict=True)):
        if images is None:
            continue
        if (of_request := images.shift(step.positions[begin:end])) is not None:
            shift = shift if len(shift) else np.zeros(len(step.positions), dtype=np.int32)
            shift[begin:end] = of_request
        chunk = request - step.num_decodes
        for each in images.inputs(positions):
            inputs.append(
                each._replace(rows=each.rows + begin, seen_whole=each.seen_whole + np.array([chunk, 0, 0]))
            )
    if not inputs:
        return replace(step, rotary_shift=shift)
    rows, embeddings, positions, seen_whole = zip(*inputs, strict=True)
    rows, index = np.concatenate(rows), np.full(len(step.positions), -1, dtype=np.int32)
    index[rows] = np.arange(len(rows))
    together = Pieces(embeddings), np.concatenate(positions), np.concatenate(seen_whole)
    return replace(step, rotary_shift=shift, images=ImageInputs(index, *together))


class _ImagePart(NamedTuple):
    """The tokens of one image in a step: their rows, and the rest as in `ImageInputs`."""

    rows: np.ndarray
    embeddings: np.ndarray
    positions: np.ndarray
    seen_whole: np.ndarray
