"""What an encoder keeps and holds."""

import threading
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from baton.vision.encoder import Encoder
from baton.vision.turns import Turns
from tests.within import WITHIN

TOKEN_BYTES = 8
IMAGES = [bytes([i]) * 32 for i in range(4)]


def encode(pixels: bytes, rows: int, columns: int) -> np.ndarray:
    return np.full((rows * columns, TOKEN_BYTES), pixels[0], np.uint8)


def encoder_of(images: int, hold_seconds: float) -> Encoder:
    """It keeps so many images of one token."""
    return Encoder(encode, Turns(), images * TOKEN_BYTES, hold_seconds)


def test_embeddings_are_not_dropped_before_a_worker_has_them() -> None:
    encoder = encoder_of(2, WITHIN)
    futures = [encoder.embeddings(name, name, 1, 1) for name in IMAGES]
    for future in futures[:2]:
        future.result(WITHIN)
    assert not futures[2].done(), "there is no room"
    encoder.release(IMAGES[0])
    futures[2].result(WITHIN)
    assert [encoder.kept(name) is not None for name in IMAGES] == [False, True, True, False]
    assert encoder.kept_bytes == 2 * TOKEN_BYTES
    encoder.release(IMAGES[2])  # the later one was fetched first
    futures[3].result(WITHIN)
    assert [encoder.kept(name) is not None for name in IMAGES] == [False, True, False, True]
    encoder.close()


def test_embeddings_that_no_worker_fetches_are_held_for_a_time() -> None:
    encoder = encoder_of(1, 1e-3)
    for name in IMAGES:
        encoder.embeddings(name, name, 1, 1).result(WITHIN)
    assert encoder.kept_bytes == TOKEN_BYTES
    encoder.close()


def test_what_is_asked_for_again_is_held_again() -> None:
    encoder = encoder_of(2, WITHIN)
    for name in (IMAGES[0], IMAGES[0], IMAGES[1]):
        encoder.embeddings(name, name, 1, 1).result(WITHIN)
        encoder.release(name)
    encoder.embeddings(IMAGES[0], b"", 1, 1).result(0)
    encoder.embeddings(IMAGES[2], IMAGES[2], 1, 1).result(WITHIN)
    assert [encoder.kept(name) is not None for name in IMAGES[:3]] == [True, False, True]
    encoder.close()


def test_an_image_without_pixels_waits_for_them() -> None:
    """One that nothing waits for is forgotten, and pixels that nothing waits for are encoded all the same."""
    encoder = encoder_of(4, 0.0)
    with pytest.raises(ValueError, match="pixels of an image are missing"):
        encoder.embeddings(IMAGES[0], b"", 1, 1).result(WITHIN)
    wanted = list[bytes]()
    encoder.wants = wanted.append
    waiting = [encoder.embeddings(IMAGES[1], b"", 1, 1) for _ in range(2)]
    assert (wanted, encoder.waiting) == ([IMAGES[1]] * 2, 1)
    assert encoder.wait(0), "an engine that has nothing else to do waits for them"
    encoder.embeddings(IMAGES[1], IMAGES[1], 1, 1)
    assert [each.result(WITHIN).tolist() for each in waiting] == [[[1] * TOKEN_BYTES]] * 2
    encoder.embeddings(IMAGES[1], b"", 1, 1).result(0)
    encoder.embeddings(IMAGES[2], b"", 1, 1)
    assert wanted == [IMAGES[1], IMAGES[1], IMAGES[2]]
    assert encoder.waiting == 0, "nothing waits for it"
    encoder.embeddings(IMAGES[2], IMAGES[2], 1, 1).result(WITHIN)
    failing = encoder.embeddings(IMAGES[3], b"", 1, 1)
    encoder._encode = lambda *_: 1 / 0  # type: ignore[assignment]
    encoder.embeddings(IMAGES[3], IMAGES[3], 1, 1)
    with pytest.raises(ZeroDivisionError):
        failing.result(WITHIN)
    encoder.close()


class Busy:
    """An encoder whose first image waits for `go_on`. `order`: of the images; each takes its key a second."""

    def __init__(self) -> None:
        self.order, self.go_on = list[int](), threading.Event()
        self.encoder = Encoder(self._encode, Turns())
        self.first = self.encoder.embeddings(b"first" * 7, bytes([99]), 1, 1, b"other")

    def _encode(self, pixels: bytes, rows: int, columns: int) -> np.ndarray:
        assert self.go_on.wait(WITHIN)
        self.order.append(pixels[0])
        self.encoder.turns.seconds += 1.0
        return encode(pixels, rows, columns)

    def ask(self, image: int, tenant: bytes) -> Future[np.ndarray]:
        return self.encoder.embeddings(bytes([image]) * 32, bytes([image]), 1, 1, tenant)


def test_keys_take_turns_at_an_encoder() -> None:
    """One key has many images, and another one comes with two: it waits for one of them before each."""
    busy = Busy()
    many = [busy.ask(image, b"many") for image in range(10)]
    few = [busy.ask(image, b"few") for image in (20, 21)]
    busy.go_on.set()
    for each in (*many, *few):
        each.result(WITHIN)
    assert busy.order == [99, 0, 20, 1, 21, *range(2, 10)]
    busy.encoder.close()


def test_an_image_is_encoded_in_the_first_turn_of_the_keys_that_want_it() -> None:
    busy = Busy()
    many = [busy.ask(image, b"many") for image in range(6)]
    assert busy.ask(5, b"few") is many[5]
    busy.encoder.wants = lambda name: None
    early = [busy.encoder.embeddings(bytes([30]) * 32, b"", 1, 1, key) for key in (b"third", b"many")]
    assert busy.ask(30, b"many") is early[0] is early[1], "its pixels come in the turn of another key"
    busy.go_on.set()
    for each in (*many, early[0]):
        each.result(WITHIN)
    assert busy.order == [99, 0, 5, 30, 1, 2, 3, 4]
    assert (busy.encoder.encoded, busy.encoder.queue_seconds) == (8, 0.0)
    busy.encoder.close()


def test_what_was_asked_for_is_encoded_before_weights_change() -> None:
    """Also what keys ask for out of turn: what is kept after that is of the new weights."""
    busy = Busy()
    asked = [busy.ask(image % 5, key) for image, key in enumerate((b"a", b"b", b"a", b"c", b"b", b"c", b"a"))]
    assert asked[0].cancel()
    busy.go_on.set()
    busy.encoder.forget()
    assert all(each.done() for each in asked)
    assert (busy.encoder.waiting, busy.encoder.kept_bytes) == (0, 0)
    busy.encoder.close()


def test_an_encoder_that_ends_cancels_what_waits() -> None:
    busy = Busy()
    asked = [busy.ask(image, key) for image, key in enumerate((b"a", b"b", b"a"))]
    closing = threading.Thread(target=busy.encoder.close)
    closing.start()
    for each in asked:
        with pytest.raises(CancelledError):
            each.result(WITHIN)
    busy.go_on.set()
    closing.join(WITHIN)
    assert not closing.is_alive()
    assert busy.order == [99]


def test_an_encoder_that_waits_for_room_ends() -> None:
    encoder = encoder_of(1, WITHIN)
    first, second = (encoder.embeddings(name, name, 1, 1) for name in IMAGES[:2])
    first.result(WITHIN)
    closing = threading.Thread(target=encoder.close)
    closing.start()
    closing.join(WITHIN)
    assert not closing.is_alive()
    assert second.done()


def test_an_encoder_for_its_own_process_holds_nothing() -> None:
    encoder = encoder_of(1, 0.0)
    for name in IMAGES:
        encoder.embeddings(name, name, 1, 1).result(WITHIN)
    assert encoder.kept(IMAGES[-1]) is not None
    assert encoder.kept_bytes == TOKEN_BYTES
    encoder.close()
