"""A worker publishes what enters and leaves its prefix cache, as vLLM documents it."""

import random
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from baton.engine import CachedBlock, Moved
from baton.kv_names import Tier
from baton.system.addresses import free_port
from baton.worker.engine_process.kv_events import KVEvents, all_blocks_cleared
from baton.worker.service_process.kv_events import KVEventPublisher
from tests.cluster_helpers import attached, request, sampling, start_worker, tiny_model
from tests.within import WITHIN, within

BLOCK = 16
TOPIC = "kv@worker"


def name(number: int) -> bytes:
    return number.to_bytes(8) + b"the rest"


def block(number: int, before: int = 0, salt: bytes = b"") -> CachedBlock:
    return CachedBlock(name(number), (), 0, salt, name(before) if before else b"", [number] * BLOCK)


class Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


_batch = msgspec.msgpack.Decoder(tuple[float, list[Stored | Removed | Cleared], int], strict=True).decode


def events_of(batch: bytes | None) -> list[Stored | Removed | Cleared]:
    """Reads a batch of rank 0 as strictly as routers of others: with all that vLLM requires, and no more."""
    assert batch is not None
    _, events, rank = _batch(batch)
    assert rank == 0
    return events


def test_neighbours_are_one_event_and_their_order_is_kept() -> None:
    events = KVEvents()
    assert events.take() is None
    events.read([block(7), block(8, 7), Moved(name(7), Tier.HOST), block(2, 1)])
    events.read([Moved(name(5), None), Moved(name(6), None)])
    events.read([block(9, 8, b"salt"), block(4, 0, b"salt")])
    assert events_of(events.take()) == [
        Stored([7, 8], None, [7] * 16 + [8] * 16, BLOCK, None, "GPU", None),
        Stored([2], 1, [2] * 16, BLOCK, None, "GPU", None),
        Removed([5, 6], "GPU"),
        Stored([9], 8, [9] * 16, BLOCK, None, "GPU", None),
        Stored([4], None, [4] * 16, BLOCK, None, "GPU", None, extra_keys=[[b"salt".hex()]]),
    ]
    assert events.take() is None
    assert events_of(all_blocks_cleared()) == [Cleared()]


@pytest.mark.parametrize(
    ("endpoint", "hosts"), [("[::]", ("127.0.0.1", "[::1]")), ("0.0.0.0", ("127.0.0.1",))]
)
def test_subscribers_of_both_families(endpoint: str, hosts: tuple[str, ...]) -> None:
    port = free_port("::")
    publisher = KVEventPublisher(f"tcp://{endpoint}:{port}")
    try:
        for host in hosts:
            with closing(socket.create_connection((host.strip("[]"), port), WITHIN)) as subscriber:
                assert subscriber.recv(1) == b"\xff", "ZeroMQ greets"
    finally:
        publisher.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--advanced.kv-events-endpoint tcp://192\.0\.2\.1:5557: "):
        KVEventPublisher("tcp://192.0.2.1:5557")


MAIN = {None, "full_attention", "mla_attention", "sink_full_attention"}
"""Groups of layers that have all tokens of a prompt. Dynamo and llm-d leave out the events of others."""


class Subscriber:
    """A router of others: it knows which blocks a worker has, and their tokens."""

    def __init__(self, endpoint: str, block_size: int, first: int | None = 0) -> None:
        """`first`: number of the first batch that comes. None: any."""
        self._block_size = block_size
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(TOPIC.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(endpoint)
        self._next = first
        self.children: dict[tuple[int | bytes | None, tuple[int, ...]], int | bytes] = {}
        self.kinds: dict[int | None, str | None] = {}  # by group. What leaves is told by group alone

    async def connected(self) -> None:
        await self._monitor.recv_multipart()
        self._socket.disable_monitor()

    async def follow(self) -> None:
        topic, number, batch = await self._socket.recv_multipart()
        assert topic == TOPIC.encode()
        assert self._next in (int.from_bytes(number), None)
        self._next = int.from_bytes(number) + 1
        for event in events_of(batch):
            if isinstance(event, Cleared):
                self.children.clear()
                continue
            if isinstance(event, Stored):
                self.kinds[event.group_idx] = event.kv_cache_spec_kind
            if self.kinds.get(event.group_idx) not in MAIN:
                continue
            if isinstance(event, Removed):
                gone = set(event.block_hashes)
                self.children = {key: child for key, child in self.children.items() if child not in gone}
                continue
            parent, tokens, size = event.parent_block_hash, event.token_ids, event.block_size
            for i, child in enumerate(event.block_hashes):
                self.children[parent, tuple(tokens[i * size : (i + 1) * size])] = child
                parent = child

    def hit(self, prompt: list[int]) -> int:
        """Tokens of a prompt that the worker has cached."""
        parent: int | bytes | None = None
        size = self._block_size
        for start in range(0, len(prompt), size):
            if (parent := self.children.get((parent, tuple(prompt[start : start + size])))) is None:
                return start
        return len(prompt)

    def close(self) -> None:
        self._monitor.close()
        self._context.destroy(linger=0)


async def test_a_subscriber_sees_hits(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    engine = {"load_format": "dummy", "num_blocks": 20, "enable_prefix_caching": True, "block_size": BLOCK}
    worker = start_worker(
        "prefill", tiny_model(tmp_path / "model"), tmp_path, engine=engine,
        kv_events_endpoint=endpoint, kv_events_topic=TOPIC,
    ).wait_ready()  # fmt: skip
    subscriber = Subscriber(endpoint, BLOCK)
    await within(subscriber.connected())
    prompts = [random.Random(seed).choices(range(500), k=200) for seed in range(2)]
    async with attached(worker) as stream:
        for prompt in prompts:
            prefill_id = await stream.submit_prefill(request(prompt, sampling(max_tokens=1)), handover=False)
            await stream.tokens(prefill_id)
            while subscriber.hit(prompt) < 192:
                await within(subscriber.follow())
    assert subscriber.hit(prompts[1] + prompts[0]) == 192
    assert subscriber.hit(prompts[0]) < 192, "the second prompt took blocks of the first"
    subscriber.close()
    assert worker.stop() == 0
