"""The keys of an encrypted lane."""

from __future__ import annotations

import hashlib
import hmac

import msgspec

FRAMES_OF_A_KEY = 1 << 20


class DirectionKey(msgspec.Struct, array_like=True):
    """The key of one direction of a lane, and how many frames have used it."""

    key: bytes
    frames: int = 0

    def next(self) -> tuple[bytes, bytes]:
        """The key and the nonce of the next frame."""
        if self.frames == FRAMES_OF_A_KEY:  # so that no key encrypts too many bytes
            self.key, self.frames = hmac.digest(self.key, b"baton kv next key", hashlib.sha256), 0
        nonce = self.frames.to_bytes(12, "little")
        self.frames += 1
        return self.key, nonce


class LaneKeys(msgspec.Struct, array_like=True):
    """Of one lane, as one of its ends sees it. They move with the lane to another process."""

    outgoing: DirectionKey
    incoming: DirectionKey
