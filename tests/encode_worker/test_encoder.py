"""What an encoder keeps and holds."""

import threading

import numpy as np
import pytest

from baton.encode_worker.encoder import Encoder
from baton.encode_worker.turns import Turns
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
