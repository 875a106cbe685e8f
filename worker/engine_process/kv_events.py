"""Events about the prefix cache in the format of vLLM (`vllm/distributed/kv_events.py`), for routers of
others: which blocks entered it, with their tokens, and which left it.

The service process publishes a batch after each step (`service_process/kv_events.py`). A block counts as
cached while it is in any tier, and its medium is always "GPU".
"""

import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

from baton.engine import CacheChange, CachedBlock, Moved
from baton.kv_names import NAME_BYTES


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
    """Reads the changes of the prefix cache. Collects events until `take`, which the loop calls once per
    step."""

    def __init__(self) -> None:
        self._events: list[BlockStored | BlockRemoved] = []

    def read(self, changes: Iterable[CacheChange]) -> None:
        for change in changes:
            match change:
                case CachedBlock():
                    self._stored(change)
                case Moved(name, None):
                    self._removed(_number(name))

    def _stored(self, block: CachedBlock) -> None:
        parent = _number(block.before) if block.before else None
        match self._events:
            case [*_, BlockStored() as event] if event.block_hashes[-1] == parent:
                if event.extra_keys is not None:
                    event.extra_keys.append(None)
            case _:
                is_salted = block.salt and parent is None
                keys: list[tuple[str] | None] | None = [(block.salt.hex(),)] if is_salted else None
                event = BlockStored([], parent, [], len(block.token_ids), None, _MEDIUM, None, keys)
                self._events.append(event)
        event.block_hashes.append(_number(block.name))
        event.token_ids.extend(block.token_ids)

    def _removed(self, number: int) -> None:
        match self._events:
            case [*_, BlockRemoved(hashes)]:
                hashes.append(number)
            case _:
                self._events.append(BlockRemoved([number], _MEDIUM))

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
    hashed = name if len(name) == NAME_BYTES else blake2b(name, digest_size=8).digest()
    return int.from_bytes(hashed[:8])
