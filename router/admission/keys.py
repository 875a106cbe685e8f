"""API keys: which clients may use the router, and what each may use of it and uses now.

A key file is TOML with one table for each key. The table's name is the key's name in logs and errors:

    [alice]
    key = "sk-…"                # or sha256 = "…", in hex, so that the file holds no secret
    max-requests = 8            # at the same time; this and the following are optional
    tokens-per-minute = 100000  # prompt and output together
    min-priority = 0            # the lowest `priority` that counts beside the requests of other keys
    salt = "team a"             # only keys with the same salt share cached prefixes

The router keeps only the SHA-256 of a key, which is safe for long random keys. It follows the file: a key
that is gone from it is refused within seconds.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import math
import os
import re
import time
import tomllib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from baton.router.admission.expected_wait import UncachedShare
from baton.router.admission.key_counts import KeyCounts
from baton.router.errors import RateLimited, Unauthorized

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
POLL_SECONDS = 1.0
"""Between two looks at the file. A Secret that Kubernetes mounts changes without a signal."""
MAX_HEADER = 4096


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One client. `name` is unique."""

    name: str
    sha256: bytes
    max_requests: int | None = None
    tokens_per_minute: int | None = None
    min_priority: int = 0
    """Of its requests beside those of other keys. A lower `priority` orders only the key's own requests."""
    cache_salt: bytes = b""
    """At most 32 bytes."""

    @property
    def tenant(self) -> bytes:
        """The key's id at the workers, which give tenants equal shares of their prefill steps."""
        return hashlib.blake2b(self.name.encode(), digest_size=8).digest()

    @property
    def account(self) -> int:
        """The id of its account. With other limits it is another one: the level of a bucket rests on its
        rate."""
        limits = f"{self.name}\0{self.max_requests}\0{self.tokens_per_minute}".encode()
        return 1 + int.from_bytes(hashlib.blake2b(limits, digest_size=7).digest())

    @classmethod
    def of(cls, name: str, key: str, **limits: Any) -> "ApiKey":
        """Raises ValueError for an empty key."""
        if not key.strip():
            raise ValueError(f"API key {name!r}: a key cannot be empty")
        return cls(name, hashlib.sha256(key.strip().encode()).digest(), **limits)


ANY_CLIENT = ApiKey("", b"")
"""The client of a router without keys."""


def api_keys(plain: Sequence[str], path: str | None) -> tuple[ApiKey, ...]:
    """Returns the keys of --api-key, named 1, 2, …, and those of a key file. Raises ValueError."""
    keys_of_flag = tuple(ApiKey.of(str(number), key) for number, key in enumerate(plain, 1))
    keys = keys_of_flag if path is None else keys_of_flag + read_key_file(path)
    KeyRing(keys)
    return keys


def read_key_file(path: str) -> tuple[ApiKey, ...]:
    """Raises ValueError that names the file, the key and the field."""
    source = f"--api-key-file {path}"
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"{source} is longer than {MAX_FILE_BYTES} bytes")
    try:
        tables = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        # The parser's message may quote a line that holds a key.
        raise ValueError(f'{source} is not valid TOML; it takes tables like [name] with key = "…"') from None
    if not tables:
        raise ValueError(f'{source} holds no keys; it takes tables like [name] with key = "…"')
    return tuple(_key(f"{source}: [{name}]", name, table) for name, table in tables.items())


class _Table(msgspec.Struct, forbid_unknown_fields=True, rename=lambda field: field.replace("_", "-")):
    """A table of a key file."""

    key: str | None = None
    sha256: str | None = None
    max_requests: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=1)] | None = None
    min_priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] = 0
    salt: str | None = None


def _key(source: str, name: str, table: Any) -> ApiKey:
    try:
        row = msgspec.convert(table, _Table)
    except msgspec.ValidationError as error:
        fields = ", ".join(_Table.__struct_encode_fields__)
        raise ValueError(f"{source}: {error}; a table has the fields {fields}") from error
    if (row.key is None) == (row.sha256 is None):
        raise ValueError(f"{source} needs either key or sha256")
    if row.key is not None:
        sha256 = ApiKey.of(source, row.key).sha256
    elif re.fullmatch("[0-9a-fA-F]{64}", row.sha256 or ""):
        sha256 = bytes.fromhex(row.sha256 or "")
    else:
        raise ValueError(f"{source} sha256 must be 64 hexadecimal digits: printf %s KEY | sha256sum")
    salt = b"" if row.salt is None else hashlib.blake2b(row.salt.encode(), digest_size=16).digest()
    return ApiKey(name, sha256, row.max_requests, row.tokens_per_minute, row.min_priority, salt)


def to_json(keys: Sequence[ApiKey]) -> bytes:
    """For another process of the router."""
    return msgspec.json.encode(keys)


def from_json(text: bytes) -> tuple[ApiKey, ...]:
    return msgspec.json.decode(text, type=tuple[ApiKey, ...])


async def follow_keys(
    read_keys: Callable[[], tuple[ApiKey, ...]],
    path: str,
    use: Callable[[tuple[ApiKey, ...]], Awaitable[None]],
    signalled: asyncio.Event,
) -> None:
    """Reads the keys again when the file `path` has changed, or `signalled` is set, and gives them to `use`.

    Both may raise ValueError for a mistake, which changes nothing and stands in the log. The first look reads
    the keys in any case: they may have changed since the router began to start.
    """
    read_version: tuple[int, ...] | None = None
    while True:
        version = await asyncio.to_thread(_version, path)
        if version != read_version or signalled.is_set():
            read_version = version
            signalled.clear()
            try:
                keys = await asyncio.to_thread(read_keys)
                await use(keys)
            except ValueError as error:
                log.error("the API keys stay as they are: %s", error)
            else:
                log.info("%d API keys", len(keys))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await signalled.wait()


def _version(path: str) -> tuple[int, ...]:
    """Changes when the file does. Empty if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


class KeyRing:
    """All keys of a router. Without keys any client is accepted.

    Raises ValueError if two keys have the same name or value.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = tuple(keys)
        for field, values in (("name", [k.name for k in keys]), ("key", [k.sha256 for k in keys])):
            if len(set(values)) < len(values):
                raise ValueError(f"--api-key, --api-key-file: two keys have the same {field}")

    def authorize(self, authorization: str) -> ApiKey:
        """Returns the key in the value of an Authorization header. Raises Unauthorized."""
        if not self._keys:
            return ANY_CLIENT
        scheme, _, key = authorization[:MAX_HEADER].partition(" ")
        sent = hashlib.sha256(key.strip().encode(errors="replace")).digest()
        matching = None
        for api_key in self._keys:  # compares all keys, so that the time does not reveal which matched
            if hmac.compare_digest(sent, api_key.sha256):
                matching = api_key
        if scheme.lower() != "bearer" or matching is None:
            raise Unauthorized("send a valid API key as `Authorization: Bearer KEY`, or as x-api-key")
        return matching


MAX_RETRY_AFTER = 60
_MINUTE = 60.0

Clock = Callable[[], float]


class Account:
    """The use of one key: its limits, in all router processes of the host, and what it has in this process.

    The token limit is a token bucket that holds one minute. It may go below zero: a request is accepted while
    anything is left, and the next ones wait for the refill. So no request is too long for a key.

    Attributes:
        share: the part of the workers' capacity for this process.
        requests: requests that entered and have not left.
        body_bytes: bytes of their bodies, until each is prepared.
        waiting_tokens: prompt tokens of generations without a first token.
        uncached_tokens: the part of these that workers do not have in their caches, as far as known.
        uncached_share: that part of its recent prompts.
        in_window: what the prompts of these that workers have take of the window.
        running: generations that workers have.
        positions: KV positions of these generations, prompt and output.
    """

    def __init__(self, key: ApiKey, counts: KeyCounts | None = None, clock: Clock = time.monotonic) -> None:
        """`counts`: those of the host, to which the key was added. None: there is no other process."""
        if counts is None:
            counts = KeyCounts()
            counts.add([key.account])
        self.key = key
        self.share = 1 / counts.processes
        self.requests = self.body_bytes = self.waiting_tokens = self.in_window = 0
        self.running = self.positions = self.uncached_tokens = 0
        self.uncached_share = UncachedShare()
        self._clock = clock
        self._per_minute = key.tokens_per_minute
        self._use = counts.of(key.account)

    def uncached_of(self, tokens: int) -> int:
        """What workers will likely compute of a prompt of which nothing else is known."""
        return math.ceil(tokens * self.uncached_share.value)

    def among_keys(self, priority: int) -> int:
        """Returns what a priority counts beside the requests of other keys."""
        return max(priority, self.key.min_priority)

    def enter(self) -> None:
        """Counts a request, which must `leave`. Raises RateLimited."""
        name, most, use = self.key.name, self.key.max_requests, self._use
        use.add_requests(1)
        running = use.requests - 1
        if most is not None and running >= most:
            use.add_requests(-1)
            text = f"key {name!r} has {running} requests running, and may have {most}"
            raise RateLimited(text, retry_after=1)
        if self._per_minute is not None and (tokens := self.tokens_left) <= 0:
            use.add_requests(-1)
            wait = -tokens / self._per_minute * _MINUTE
            seconds = max(1, min(MAX_RETRY_AFTER, round(wait + 0.5)))
            text = f"key {name!r} has used its {self._per_minute} tokens per minute"
            raise RateLimited(text, retry_after=seconds)
        self.requests += 1

    def leave(self) -> None:
        self.requests -= 1
        self._use.add_requests(-1)

    @property
    def tokens_left(self) -> float:
        """Tokens in the bucket; infinite without a limit."""
        if self._per_minute is None:
            return math.inf
        return self._use.left(self._refilled(self._per_minute), self._per_minute)

    def spend(self, tokens: int) -> None:
        """Takes tokens from the bucket. A negative number gives them back."""
        if self._per_minute is not None:
            self._use.spend(tokens, self._refilled(self._per_minute))

    def _refilled(self, per_minute: int) -> float:
        return self._clock() / _MINUTE * per_minute  # the clock is that of all processes of the host
