"""Embeddings of images from an encoder to a worker, over the transfer processes of both."""

import gc
import itertools
import select
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import baton.kv_transfer as kv
from baton.encode_worker.serving import ServedEmbeddings
from baton.rpc import worker_pb2 as pb
from baton.vision.embeddings import EmbeddingFormat
from baton.vision.encoder import Encoder
from baton.vision.turns import Turns
from baton.worker.engine_process.embeddings import FetchedEmbeddings, embedding_layout
from baton.worker.ipc import ServiceLink
from baton.worker.messages import decode_from_engine
from tests.kv_transfer.transfer_process import TransferProcess
from tests.router_messages import told
from tests.within import WITHIN

TOKEN_BYTES = 24
MADE = EmbeddingFormat("images=1", "float32", TOKEN_BYTES, 1000)


def encode(pixels: bytes, rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(list(pixels))
    return rng.integers(0, 256, (rows * columns, TOKEN_BYTES), dtype=np.uint8)


class Pair:
    """An encoder and a worker. `told`: what the worker says to its service."""

    def __init__(self, directory: Path) -> None:
        layout = embedding_layout(MADE)
        self.processes = [TransferProcess(layout, name=f"worker {i}") for i in range(2)]
        ends = [
            kv.Transport(process.sending, process.receiving, kv.TraceWriter(None, "test"))
            for process in self.processes
        ]
        self.encoder = Encoder(encode, Turns(), hold_seconds=WITHIN)
        self.served = ServedEmbeddings(ends[0], MADE, self.encoder)
        self.told = zmq.Context.instance().socket(zmq.PAIR)
        self.told.bind(f"ipc://{directory}/engine")
        self.link = ServiceLink(f"ipc://{directory}/engine")
        self.fetched = FetchedEmbeddings(ends[1], MADE, self.link)
        encoder = self.processes[0]
        self.source: dict[str, Any] = {"kv_address": encoder.address, "incarnation": encoder.incarnation}
        assert self.processes[1].port

    def encode(self, name: bytes, rows: int, columns: int) -> np.ndarray:
        """The encoder has the image."""
        found = self.encoder.embeddings(name, name, rows, columns).result(WITHIN)
        self.served.encoded(name, rows * columns)
        return found

    def until(self, future: Future[np.ndarray]) -> np.ndarray:
        """Both ends go on until the embeddings are there."""
        while not future.done():
            readable, _, _ = select.select([self.served, self.fetched], [], [], WITHIN)
            assert readable, "neither end has anything to do"
            self.go_on()
        return future.result()

    def go_on(self) -> None:
        self.served.poll()
        self.fetched.report()

    def settle(self) -> None:
        """The encoder learns that all has come."""
        while not (self.served.idle and self.fetched.idle):
            select.select([self.served, self.fetched], [], [], 0.01)
            self.go_on()

    def wanted(self) -> pb.ImageWanted:
        """What the worker says next."""
        poller = zmq.Poller()
        for each in (self.told, self.served.fileno(), self.fetched.fileno()):
            poller.register(each, zmq.POLLIN)
        while not self.told.poll(0):
            assert poller.poll(int(1000 * WITHIN)), "neither end has anything to do"
            self.go_on()
        message = decode_from_engine(self.told.recv())
        [said] = told([message])
        return said.image_wanted

    def end(self) -> None:
        self.fetched.close()
        self.served.close()
        self.encoder.close()
        for process in self.processes:
            process.service.close()
            process.process.wait(WITHIN)
        self.link.close()
        self.told.close(0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("embeddings"))
    yield pair
    pair.end()


names = (bytes([i]) * 32 for i in itertools.count(1))


@pytest.mark.all
def test_a_worker_gets_the_bytes_of_an_encoder_once(pair: Pair) -> None:
    name = next(names)
    expected = pair.encode(name, 10, 17)  # 170 tokens: the last chunk is not full
    future = pair.fetched.embeddings(name, b"", 10, 17)
    assert pair.wanted() == pb.ImageWanted(name=name, lost=False)
    pair.fetched.tell(pb.ImageReady(name=name, **pair.source))
    assert np.array_equal(pair.until(future), expected)
    assert pair.fetched.embeddings(name, b"", 10, 17).result(0) is future.result()
    assert pair.served.fetched == 1
    pair.settle()


def test_an_encoder_that_serves_as_many_as_it_can_is_asked_again(pair: Pair) -> None:
    """This one serves two at a time. More are asked for at once."""
    images, before = [next(names) for _ in range(8)], pair.served.fetched
    expected = [pair.encode(name, 1, 70) for name in images]
    for name in images:
        pair.fetched.tell(pb.ImageReady(name=name, **pair.source))
    futures = [pair.fetched.embeddings(name, b"", 1, 70) for name in images]
    for future, embeddings in zip(futures, expected, strict=True):
        assert np.array_equal(pair.until(future), embeddings)
    pair.settle()
    assert pair.served.fetched == before + len(images)


@pytest.mark.parametrize("last", [b"one", b"many"])
def test_tenants_take_turns_when_memory_is_short(pair: Pair, last: bytes) -> None:
    """There is memory for two images of this size. Some more may come before the last tenant asks. The first
    turn of an image is that of any tenant that wants it."""
    tenants = [b"many"] * 12 + [last]
    images, came = [next(names) for _ in tenants], list[int]()
    for name in images:
        pair.encode(name, 1, 1000)
        pair.fetched.tell(pb.ImageReady(name=name, **pair.source))
    futures = [
        pair.fetched.embeddings(name, b"", 1, 1000, tenant)
        for name, tenant in zip(images, tenants, strict=True)
    ]
    assert pair.fetched.embeddings(images[-1], b"", 1, 1000, b"one") is futures[-1]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: came.append(number))
    for future in futures:
        pair.until(future)
    assert came.index(len(images) - 1) <= 6, f"only what was under way is before it: {came}"
    pair.settle()


def test_what_an_encoder_lacks_is_asked_for_again(pair: Pair) -> None:
    name = next(names)
    pair.fetched.tell(pb.ImageReady(name=name, **pair.source))
    future = pair.fetched.embeddings(name, b"", 1, 5)
    assert pair.wanted() == pb.ImageWanted(name=name, lost=True)
    expected = pair.encode(name, 1, 5)
    pair.fetched.tell(pb.ImageReady(name=name, **pair.source))
    assert np.array_equal(pair.until(future), expected)


def test_an_image_that_no_request_waits_for_is_forgotten(pair: Pair) -> None:
    name = next(names)
    future = pair.fetched.embeddings(name, b"", 1, 5)
    assert pair.wanted() == pb.ImageWanted(name=name, lost=False)
    assert pair.fetched.waiting == 1
    del future
    gc.collect()
    assert pair.fetched.waiting == 0
    # Another request asks again, though the first question was not answered.
    future = pair.fetched.embeddings(name, b"", 1, 5)
    assert pair.wanted() == pb.ImageWanted(name=name, lost=False)
    # And so does one beside it: the router of the first one may have forgotten it.
    pair.fetched.embeddings(name, b"", 1, 5)
    assert pair.wanted() == pb.ImageWanted(name=name, lost=False)
    assert not future.done()
