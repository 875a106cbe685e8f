"""What an engine gives back to its device for a while, such as for a trainer, and takes again."""

from collections.abc import Collection, Mapping

import torch

from baton.engine.api.config import MemoryTag
from baton.engine.core.request_lives import RequestLives
from baton.engine.execution.commands import Commands
from baton.engine.execution.elastic_cache import Releasable
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
        memory: Mapping[MemoryTag, Releasable],
        lives: RequestLives,
        loop: StepLoop,
        followers: Commands | None,
        encoder: Encoder | None,
    ) -> None:
        """`memory`: of `EngineConfig.enable_memory_saver`; else empty. `followers`: the other ranks.
        `encoder`: of images. None: there is none."""
        self.released: set[MemoryTag] = set()
        self.lost_weights = False
        self._memory = memory
        self._lives = lives
        self._loop = loop
        self._followers = followers
        self._encoder = encoder
        self._lacking: set[MemoryTag] = set()
        """What this rank has released. The others may lack it longer."""

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
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for tag in [tag for tag in tags if tag not in self.released]:
            if tag == "kv_cache":
                assert not self.uses_kv(), "a request would lose its KV"
                if self._lives.cache is not None:
                    self._lives.cache.clear_device()
            else:
                self.lost_weights = True
            self.released.add(tag)
            if tag not in self._lacking:
                self._memory[tag].release()
                self._lacking.add(tag)
            if self._followers is not None:
                self._followers.memory(tag, release=True)
        torch.cuda.empty_cache()

    def resume(self, tags: Collection[MemoryTag]) -> None:
        """Takes this memory again. Raises `MemoryError` if a device has not as much; what came
        before is there then. The call can be repeated."""
        for tag in [tag for tag in tags if tag in self.released]:
            if self._followers is not None:
                self._followers.memory(tag, release=False)
            if tag in self._lacking:
                self._memory[tag].resume()
                self._lacking.remove(tag)
            self.released.remove(tag)
