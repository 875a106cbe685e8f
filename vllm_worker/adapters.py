"""The adapters (LoRA) that vLLM has loaded, and the names of their files. Without vLLM itself.

vLLM knows an adapter by a number, and loads it again by its path where it has dropped it. The files may be
others then. So it has room for all adapters that are loaded here, and drops none by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

FILES = "adapter_config.json", "adapter_model.safetensors"
"""As PEFT writes them. Pickled weights (`adapter_model.bin`) are refused."""
MAX_CONFIG_BYTES = 1 << 20


@dataclass(slots=True)
class LoadedAdapter:
    number: int
    """Of vLLM. No two adapters of an engine have the same one."""
    path: str
    unloads: bool = False
    """No request will name it any more."""


class Adapters:
    """
    Args:
        add: loads an adapter into vLLM: its fingerprint, number and path. Raises an error of vLLM.
        remove: drops the adapter with this number.
        most: adapters that vLLM has room for.

    Attributes:
        move_seconds: in which vLLM lately moved an adapter to the device. 0: not known.
    """

    def __init__(
        self,
        add: Callable[[bytes, int, str], Awaitable[None]],
        remove: Callable[[int], Awaitable[None]],
        most: int,
    ) -> None:
        self._add = add
        self._remove = remove
        self.most = most
        self._loaded: dict[bytes, LoadedAdapter] = {}
        self._numbers = 0
        self._on_device = frozenset[int]()
        self.move_seconds = 0.0

    @property
    def on_device(self) -> list[bytes]:
        """The fingerprints of those that vLLM has on the device."""
        return [each for each, loaded in self._loaded.items() if loaded.number in self._on_device]

    def moved(self, numbers: Iterable[int], seconds: float) -> None:
        """vLLM has moved an adapter to the device in so many seconds. These are there now."""
        self._on_device = frozenset(numbers)
        self.move_seconds = (self.move_seconds + seconds) / 2 if self.move_seconds else seconds

    def of(self, fingerprint: bytes) -> LoadedAdapter:
        """That of a request."""
        return self._loaded[fingerprint]

    async def load(self, name: str, path: str) -> bytes:
        """Returns the fingerprint of the adapter. Raises ValueError if it cannot be loaded."""
        fingerprint = await asyncio.to_thread(fingerprint_of, name, path)
        if (known := self._loaded.get(fingerprint)) is not None:
            known.unloads = False
            return fingerprint
        if len(self._loaded) >= self.most:
            raise ValueError(
                f"requests still use an adapter that was unloaded, and there is room for {self.most}"
            )
        self._numbers += 1
        loaded = self._loaded[fingerprint] = LoadedAdapter(self._numbers, path)
        try:
            await self._add(fingerprint, loaded.number, path)
            if fingerprint != await asyncio.to_thread(fingerprint_of, name, path):
                await self._remove(loaded.number)
                raise ValueError(f"its files in {path} changed while they were read")
        except BaseException:
            del self._loaded[fingerprint]
            raise
        return fingerprint

    async def unload(self, fingerprint: bytes, unused: Callable[[], Awaitable[None]]) -> None:
        """Drops the adapter when `unused` returns, unless it is loaded again meanwhile."""
        loaded = self._loaded[fingerprint]
        loaded.unloads = True
        await unused()
        if loaded.unloads and self._loaded.get(fingerprint) is loaded:
            del self._loaded[fingerprint]
            await self._remove(loaded.number)


def fingerprint_of(name: str, path: str) -> bytes:
    """Returns 16 bytes that adapters of other names or with other files do not have. Raises ValueError."""
    digest = hashlib.blake2b(name.encode(), digest_size=16)
    for file in (Path(path) / each for each in FILES):
        try:
            if not file.is_file():
                raise ValueError(f"there is no file {file}; save the adapter with PEFT, as safetensors")
            if file.name == FILES[0] and file.stat().st_size > MAX_CONFIG_BYTES:
                raise ValueError(f"{file} has more than {MAX_CONFIG_BYTES} bytes")
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "blake2b").digest())
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    return digest.digest()
