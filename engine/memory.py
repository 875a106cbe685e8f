"""What an engine gives back to its device for a while, such as for a trainer, and takes again."""

from collections.abc import Collection

from baton.engine.api.config import MemoryTag
from baton.engine.core.request_lives import RequestLives
from baton.engine.execution.commands import Commands
from baton.engine.execution.rank_memory import RankMemory
from baton.engine.step_loop import StepLoop
from baton.vision.encoder import Encoder


class EngineMemory:
    """The memory of one engine, whose thread makes all calls.

    Attributes:
        released: what has no memory now. The engine computes nothing meanwhile.
        lost_weights: the weights have been released, and were not replaced since.
    """

    def __init__(
        self,
        memory: RankMemory,
        lives: RequestLives,
        loop: StepLoop,
        followers: Commands | None,
        encoder: Encoder | None,
    ) -> None:
        """`memory`: of this rank. `followers`: the other ranks. `encoder`: of images. None: there is none."""
        self.released: set[MemoryTag] = set()
        self.lost_weights = False
        self._memory = memory
        self._lives = lives
        self._loop = loop
        self._followers = followers
        self._encoder = encoder

    @property
    def is_whole(self) -> bool:
        """Whether the engine can compute."""
        return not self.released and not self.lost_weights

    def check(self) -> None:
        """Raises `ValueError` if nothing can be released."""
        if not self._memory:
            raise ValueError("no memory can be released: start the workers with --enable-memory-saver")

    def uses_kv(self) -> bool:
        """Whether a request, or a copy to a tier, uses memory of the KV cache."""
        return self._lives.some or any(tier.copies for tier in self._lives.offload)

    def release(self, tags: Collection[MemoryTag]) -> None:
        """Gives this memory back. No step is under way, and none begins before `is_whole`. With
        `kv_cache`, nothing `uses_kv`: all that is cached on the device is forgotten. Weights must be replaced
        once their memory is there again."""
        assert self._loop.frozen, "a step would touch the memory"
        assert not self._loop.under_way, "a step touches the memory"
        if self._encoder is not None:
            self._encoder.give_back()
        for tag in [tag for tag in tags if tag not in self.released]:
            if tag == "kv_cache":
                assert not self.uses_kv(), "a request would lose its KV"
                if self._lives.cache is not None:
                    self._lives.cache.clear_device()
            else:
                self.lost_weights = True
            self.released.add(tag)
            self._memory.set(tag, release=True)
            if self._followers is not None:
                self._followers.memory(tag, release=True)

    def resume(self, tags: Collection[MemoryTag]) -> None:
        """Takes this memory again. Raises `MemoryError` if a device has not as much; what came
        before is there then. The call can be repeated."""
        for tag in [tag for tag in tags if tag in self.released]:
            if self._followers is not None:
                self._followers.memory(tag, release=False)
            self._memory.set(tag, release=False)
            self.released.remove(tag)
