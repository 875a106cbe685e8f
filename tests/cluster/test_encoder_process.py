"""The loop of an encoder process."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from baton.encode_worker.process import EncoderLoop
from baton.encode_worker.serving import ServedEmbeddings
from baton.rpc import worker_pb2 as pb
from baton.vision.encoder import Encoder
from baton.vision.turns import Turns
from baton.worker import messages
from baton.worker.ipc import ServiceLink
from baton.worker.messages import Origin
from tests.router_messages import cancel, failures_told
from tests.stand_in import stand_in
from tests.within import WITHIN


def encode(number: int, tenant: bytes, image: int, pixels: bytes) -> messages.FromRouter:
    origin = Origin(bytes([number]) * 16, "r", "", 0.0)
    asked = pb.Image(name=bytes([image]) * 32, rows=1, columns=1)
    submit = pb.SubmitEncode(encode_id=origin.attempt_id, image=asked, tenant=tenant)
    message = pb.RouterMessage(encode=submit)
    return messages.FromRouter(1, message.SerializeToString(), origin, [pixels])


class Process:
    """An encoder whose images wait for `go_on`. The service sends `submits` with the next turn."""

    def __init__(self) -> None:
        self.go_on, self.order = threading.Event(), list[int]()
        self.encoder = Encoder(self._made, Turns())
        self.submits, self.told = list[messages.ToEngine](), list[messages.FromEngine]()
        link = stand_in(ServiceLink, receive_all=self._received, send=self.told.append)
        served = stand_in(
            ServedEmbeddings, poll=lambda: None, encoded=lambda name, tokens: None, close=lambda: None
        )
        self.loop = EncoderLoop(link, self.encoder, served)

    def _received(self) -> list[messages.ToEngine]:
        received, self.submits = self.submits, []
        return received

    def _made(self, pixels: bytes, rows: int, columns: int) -> np.ndarray:
        assert self.go_on.wait(WITHIN)
        self.order.append(pixels[0])
        self.encoder.turns.seconds += 1.0
        return np.zeros((rows * columns, 8), np.uint8)

    def turn(self, *submits: messages.ToEngine) -> bool:
        self.submits += submits
        return self.loop.turn()

    def encode_all(self) -> None:
        self.go_on.set()
        self.encoder.forget()  # returns when all is encoded
        assert self.turn()

    @property
    def answered(self) -> list[int]:
        return [each.origin.attempt_id[0] for each in self.told if isinstance(each, messages.Encoded)]


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.loop.close()


def test_an_image_is_asked_for_again_by_another_key_and_answered_once(process: Process) -> None:
    submits = [encode(number, b"many", number, bytes([number])) for number in range(4)]
    assert process.turn(*submits, encode(3, b"few", 3, b""))
    process.encode_all()
    assert process.order == process.answered == [0, 3, 1, 2]
    assert len(process.told) == 2 * len(process.order)


def test_an_image_that_no_router_wants_any_more_is_not_encoded(process: Process) -> None:
    """Two routers want the second one, so it is encoded for the other."""
    submits = [encode(number, b"key", number, bytes([number])) for number in range(4)]
    assert process.turn(*submits, encode(9, b"key", 1, b""))
    assert process.turn(cancel(1, bytes([1]) * 16), cancel(1, bytes([2]) * 16), cancel(2, bytes([3]) * 16))
    process.encode_all()
    assert process.order == [0, 1, 3]
    assert sorted(process.answered) == [0, 3, 9]


def test_an_encoder_that_stops_tells_routers_of_their_images(process: Process) -> None:
    assert process.turn(*(encode(number, b"key", number, bytes([number])) for number in range(2)))
    assert not process.turn(messages.Stop())
    assert [failure.code for failure in failures_told(process.told)] == [pb.FAILURE_CODE_DRAINING] * 2
    assert isinstance(process.told[-1], messages.Stopped)
    process.go_on.set()
