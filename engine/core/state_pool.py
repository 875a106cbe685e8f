"""The slots of the states of a model with state layers. Pure bookkeeping; the memory itself is
`Engine.kv_cache`.

A request has one slot as long as it has blocks: it gets and returns both together.
"""


class StatePool:
    """Owns all slots that no request owns."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of slots that `allocate` can give out now."""
        return len(self._free)

    def allocate(self) -> int:
        """Returns a slot with undefined content."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Takes back the slot of a request."""
        assert slot not in self._free, "a slot has one owner"
        self._free.append(slot)

    def assert_whole(self) -> None:
        """Asserts that no request has a slot."""
        assert sorted(self._free) == list(range(self.num_slots)), "a slot was left behind"
