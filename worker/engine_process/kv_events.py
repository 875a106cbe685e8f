"""Events about the prefix cache in the format of vLLM (`vllm/distributed/kv_events.py`), for routers of
others: which blocks entered it, with their tokens, and which left it.

The service process publishes a batch after each step (`service_process/kv_events.py`). A block counts as
cached while it is in any tier, and its medium is always "GPU".
"""

import time
from collections.abc import Iterable, Sequence

import msgspec

from baton.engine import CachedBlock


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Neighbouring blocks of a prompt."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]  # of all these blocks
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[tuple[str] | None] | None = None
    """Of each block. That of the first one of a prompt is the salt of the request."""


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block is cached any more."""


class KVEvents:
    """Collects events by the engine's `Hooks` until `take`, which the loop calls once per step."""

    def __init__(self) -> None:
        self._events: list[BlockStored | BlockRemoved] = []

    def cached(self, blocks: Iterable[CachedBlock]) -> None:
        before = None
        for block in blocks:
            event = self._events[-1] if before is not None and block.before == before else None
            if not isinstance(event, BlockStored):
                parent = _number(block.before) if block.before else None
                is_salted = block.salt and parent is None
                keys: list[tuple[str] | None] | None = [(block.salt.hex(),)] if is_salted else None
                event = BlockStored([], parent, [], len(block.token_ids), None, _MEDIUM, None, keys)
                self._events.append(event)
            elif event.extra_keys is not None:
                event.extra_keys.append(None)
            event.block_hashes.append(_number(block.name))
            event.token_ids.extend(block.token_ids)
            before = block.name

    def evicted(self, name: bytes) -> None:
        match self._events:
            case [*_, BlockRemoved(hashes)]:
                hashes.append(_number(name))
            case _:
                self._events.append(BlockRemoved([_number(name)], _MEDIUM))

    def take(self) -> bytes | None:
        """Returns the batch of events since the last call. None: there are none."""
        if not self._events:
            return None
        events, self._events = self._events, []
        return _batch(events)


def all_blocks_cleared() -> bytes:
    """Returns the batch that says so."""
    return _batch([AllBlocksCleared()])


_MEDIUM = "GPU"
_RANK = 0
"""Of data parallelism, which Baton's engine does not have. vLLM numbers ranks from 0, and readers with fixed
fields (Dynamo's indexer 1.6) refuse a batch without one."""
_encode = msgspec.msgpack.Encoder().encode


def _batch(events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared]) -> bytes:
    return _encode((time.time(), events, _RANK))  # noqa: TID251  as in vLLM


def _number(name: bytes) -> int:
    """vLLM's hash of a block: 64 bits."""
    return int.from_bytes(name[:8])
