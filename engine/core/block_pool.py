"""The KV block pool: who owns which block. Pure bookkeeping; the memory itself is `Engine.kv_cache`.

A block is always in exactly one of four states:

    free ──allocate──▶ private (one request's) ──publish──▶ cached, referenced ◀──share── cached, unreferenced
      ▲                    │ release                            └────────release──────────────▶ │
      └────────────────────┴──────────────────────────── allocate (evicts the least recently used)

A cached block is full, immutable, and found by the hash of all tokens up to its end (vLLM's hash chain), so a
prefix is shared block by block. "Free" counts the unreferenced cached blocks: they can be had at once.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from hashlib import blake2b
from itertools import chain


def extend_hash_chain(
    chain: list[bytes], token_ids: Sequence[int], count: int, block_size: int, root: bytes
) -> None:
    """Appends to `chain`, in place, the hashes of the full blocks of the first `count` of `token_ids` that it
    does not have yet.

    A cryptographic hash, since a collision would serve one request another's KV. `root` stands for all else
    that KV depends on: the model, a salt.
    """
    for index in range(len(chain), count // block_size):
        tokens = array("I", token_ids[index * block_size : (index + 1) * block_size])
        parent = chain[-1] if chain else root
        chain.append(blake2b(tokens.tobytes(), key=parent[:64], digest_size=16).digest())


def salted_root(root: bytes, salt: bytes) -> bytes:
    """Where the chains of requests with this salt start: no other salt's chains ever meet them."""
    return blake2b(salt, key=root[:64], digest_size=32).digest() if salt else root


def _nobody(_: bytes) -> None:
    pass


class BlockPool:
    """`on_evicted` is told the hash of each block that leaves the cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evicted: Callable[[bytes], None] = _nobody
        self._free = list(range(num_blocks - 1, -1, -1))
        self._private: set[int] = set()
        self._references: dict[int, int] = {}  # cached block → requests that hold it
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached blocks nobody holds, LRU first
        self._block_of: dict[bytes, int] = {}  # hash → cached block
        self._hash_of: dict[int, bytes] = {}  # cached block → hash

    @property
    def free(self) -> int:
        """Blocks that `allocate` can give out now."""
        return len(self._free) + len(self._unreferenced)

    @property
    def cached(self) -> int:
        """Blocks that hold a cached prefix, referenced or not."""
        return len(self._hash_of)

    def allocate(self, count: int) -> list[int]:
        """`count` private blocks with undefined content."""
        assert count <= self.free, f"{count} blocks wanted, {self.free} free"
        while len(self._free) < count:
            evicted, _ = self._unreferenced.popitem(last=False)
            evicted_hash = self._hash_of.pop(evicted)
            del self._block_of[evicted_hash]
            self.on_evicted(evicted_hash)
            self._free.append(evicted)
        blocks = [self._free.pop() for _ in range(count)]
        self._private.update(blocks)
        return blocks

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix of a hash chain; takes no reference."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks are counted in `free`, hence would be missing after `share`."""
        return sum(block in self._unreferenced for block in blocks)

    def free_after(self, released: Iterable[Sequence[int]], keep: Collection[int]) -> int:
        """Blocks that `allocate` could give out once these tables are released, without those to `keep`."""
        holders = Counter(chain.from_iterable(released))
        back = sum(
            block in self._private or self._references[block] == count
            for block, count in holders.items()
            if block not in keep
        )
        return self.free + back - self.unreferenced(keep)

    def share(self, blocks: Sequence[int]) -> None:
        """One more request holds these cached blocks."""
        for block in blocks:
            if block in self._unreferenced:
                del self._unreferenced[block]
            self._references[block] = self._references.get(block, 0) + 1

    def publish(self, block: int, block_hash: bytes) -> bool:
        """A private block became full, and its KV good: the cache owns it, its request keeps a reference.

        False: another block with the same content is cached already, and this one stays private.
        """
        if block not in self._private or block_hash in self._block_of:
            return False
        self._private.remove(block)
        self._references[block] = 1
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """A request gives back all its blocks: private ones become free, cached ones lose a reference."""
        for block in reversed(
            blocks
        ):  # the end of a prefix is of use to fewer than its beginning: evict it first
            if block in self._private:
                self._private.remove(block)
                self._free.append(block)
                continue
            self._references[block] -= 1
            if self._references[block] == 0:
                del self._references[block]
                self._unreferenced[block] = None

    def assert_consistent(self) -> None:
        """Every block is in exactly one state, and the hash maps mirror each other."""
        states = [*self._free, *self._private, *self._references, *self._unreferenced]
        assert sorted(states) == list(range(self.num_blocks)), "a block was lost or has two owners"
        assert all(count > 0 for count in self._references.values())
        assert self._hash_of == {block: block_hash for block_hash, block in self._block_of.items()}
        assert self._hash_of.keys() == self._references.keys() | self._unreferenced.keys()

    def assert_whole(self) -> None:
        """Nobody holds a block."""
        self.assert_consistent()
        assert not self._private, f"private blocks left: {sorted(self._private)}"
        assert not self._references, f"cached blocks still referenced: {sorted(self._references)}"
