"""The loop of an encoder process."""

import threading

import numpy as np

from baton.encode_worker.process import EncoderLoop
from baton.encode_worker.serving import ServedEmbeddings
from baton.rpc import worker_pb2 as pb
from baton.vision.encoder import Encoder
from baton.vision.turns import Turns
from baton.worker import messages
from baton.worker.ipc import ServiceLink
from baton.worker.messages import Origin
from tests.stand_in import stand_in
from tests.within import WITHIN


def encode(number: int, tenant: bytes, image: int, pixels: bytes) -> messages.FromRouter:
    origin = Origin(bytes([number]) * 16, "r", "", 0.0)
    asked = pb.Image(name=bytes([image]) * 32, rows=1, columns=1)
    submit = pb.SubmitEncode(encode_id=origin.attempt_id, image=asked, tenant=tenant)
    message = pb.RouterMessage(encode=submit)
    return messages.FromRouter(1, message.SerializeToString(), origin, [pixels])


def test_an_image_is_asked_for_again_by_another_key_and_answered_once() -> None:
    go_on, order = threading.Event(), list[int]()

    def made(pixels: bytes, rows: int, columns: int) -> np.ndarray:
        assert go_on.wait(WITHIN)
        order.append(pixels[0])
        encoder.turns.seconds += 1.0
        return np.zeros((rows * columns, 8), np.uint8)

    encoder = Encoder(made, Turns())
    submits = [encode(number, b"many", number, bytes([number])) for number in range(4)]
    submits.append(encode(3, b"few", 3, b""))
    told = list[messages.FromEngine]()
    link = stand_in(ServiceLink, receive_all=lambda: [submits.pop(0) for _ in submits[:]], send=told.append)
    served = stand_in(
        ServedEmbeddings, poll=lambda: None, encoded=lambda name, tokens: None, close=lambda: None
    )
    loop = EncoderLoop(link, encoder, served)
    assert loop.turn()
    go_on.set()
    encoder.forget()  # returns when all is encoded
    assert loop.turn()
    assert order == [0, 3, 1, 2]
    answered = [each.origin.attempt_id[0] for each in told if isinstance(each, messages.Encoded)]
    assert answered == order
    assert len(told) == 2 * len(order)
    loop.close()
