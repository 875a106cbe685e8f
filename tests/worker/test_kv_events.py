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

from baton.engine import CachedBlock
from baton.machine.system import free_port
from baton.worker.engine_process.kv_events import KVEvents
from baton.worker.service_process.kv_events import KVEventPublisher
from tests.cluster_helpers import attached, request, sampling, start_worker, tiny_model
from tests.within import WITHIN, within

BLOCK = 16
TOPIC = "kv@worker"


def name(number: int) -> bytes:
    return number.to_bytes(8) + b"the other"


def block(number: int, before: int = 0, salt: bytes = b"") -> CachedBlock:
    return CachedBlock(name(number), (), 0, salt, name(before) if before else b"", [number] * BLOCK)


def events_of(batch: bytes | None) -> list[dict[str, Any]]:
    assert batch is not None
    _, events, *_ = msgspec.msgpack.decode(batch)  # vLLM adds a rank
    return events


def test_neighbours_are_one_event_and_their_order_is_kept() -> None:
    events = KVEvents()
    assert events.take() is None
    events.cached([block(7), block(8, 7), block(2, 1)])
    events.evicted(name(5))
    events.evicted(name(6))
    events.cached([block(9, 8, b"salt"), block(4, 0, b"salt")])
    stored = {"type": "BlockStored", "block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None}
    assert events_of(events.take()) == [
        {**stored, "block_hashes": [7, 8], "parent_block_hash": None, "token_ids": [7] * 16 + [8] * 16},
        {**stored, "block_hashes": [2], "parent_block_hash": 1, "token_ids": [2] * 16},
        {"type": "BlockRemoved", "block_hashes": [5, 6], "medium": "GPU"},
        {**stored, "block_hashes": [9], "parent_block_hash": 8, "token_ids": [9] * 16},
        {
            **stored, "block_hashes": [4], "parent_block_hash": None, "token_ids": [4] * 16,
            "extra_keys": [[b"salt".hex()]],
        },
    ]  # fmt: skip
    assert events.take() is None


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
    with pytest.raises(ValueError, match=r"--kv-events-endpoint tcp://192\.0\.2\.1:5557: "):
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
        self.children: dict[tuple[int | None, tuple[int, ...]], int] = {}
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
            if event["type"] == "AllBlocksCleared":
                self.children.clear()
                continue
            group = event.get("group_idx")
            if event["type"] == "BlockStored":
                self.kinds[group] = event.get("kv_cache_spec_kind")
            if self.kinds.get(group) not in MAIN:
                continue
            if event["type"] == "BlockRemoved":
                gone = set(event["block_hashes"])
                self.children = {key: child for key, child in self.children.items() if child not in gone}
                continue
            parent, tokens, size = event["parent_block_hash"], event["token_ids"], event["block_size"]
            for i, child in enumerate(event["block_hashes"]):
                self.children[parent, tuple(tokens[i * size : (i + 1) * size])] = child
                parent = child

    def hit(self, prompt: list[int]) -> int:
        """Tokens of a prompt that the worker has cached."""
        parent, size = None, self._block_size
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
