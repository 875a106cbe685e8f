"""What vLLM's scheduler tells the process with the KV: which blocks to send, and which to fill. Pure.

The scheduler allocates the blocks of a prompt chunk by chunk, and may take them away again (preemption). So
each step's `StepMetadata` names the blocks of all prompts that it computes for decode servers. A prompt that
starts again after a preemption gets a new prefill id: nothing of the old one can be mixed with it.

A router draws ids of prefills and decodes (`prefill_id`, `decode_id`, `attempt` in kv_transfer_params), and
submits to both sides at once. So a FETCH may come before its prompt is scheduled. A preemption ends a prefill
with an id of a router: the worker hands it back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from baton.kv_names import CHUNK_TOKENS
from baton.kv_names.cache_kinds import Window
from baton.vllm_worker.mixed_steps import EncoderStats, StepStats

Ended = Literal["finished", "cancelled"]
"""Why a prefill is not handed over. "finished": its first token is the last."""
Blocks = Sequence[Sequence[int]]
"""Of a request, by group of layers."""
NULL_BLOCK = 0
"""vLLM's, which no request reads."""
REJECTED = "its grammar rejects the first token"
"""vLLM's `stop_reason` of such a request, which was begun elsewhere."""
log = logging.getLogger("vllm.baton")
"""Below vLLM's logger, so its lines look like vLLM's."""


@dataclass(frozen=True, slots=True)
class Source:
    """The held prefill that a request continues."""

    kv_address: str
    incarnation: int
    """Drawn at the start of the server: KV of an earlier one is never mistaken for it."""
    prefill_id: bytes

    @classmethod
    def parse(cls, params: dict[str, Any]) -> Source:
        """Raises ValueError for parameters that `params` has not made."""
        try:
            host, port = str(params["remote_host"]), int(params["remote_port"])
            incarnation = int(params["remote_engine_id"], 16)
            prefill_id = bytes.fromhex(params["remote_request_id"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{error!r}; the prefill server must have Baton's connector, too") from error
        wrong = not 0 < port < 1 << 16 or not 0 <= incarnation < 1 << 64 or len(prefill_id) != 16
        if wrong or len(host) > 256:  # a FETCH must fit into a message to the transfer process
            raise ValueError(f"{params!r:.500} names no prefill of Baton's connector")
        return cls(f"{host}:{port}", incarnation, prefill_id)

    @property
    def params(self) -> dict[str, Any]:
        """`kv_transfer_params` with which a decode server fetches the prefill. Names are NixlConnector's."""
        host, _, port = self.kv_address.rpartition(":")
        return {
            "do_remote_prefill": True, "do_remote_decode": False,
            "remote_engine_id": f"{self.incarnation:016x}", "remote_request_id": self.prefill_id.hex(),
            "remote_host": host, "remote_port": int(port), "remote_block_ids": [],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks that a request has of a group of layers."""

    block_size: int
    """Tokens of a block."""
    states: bool = False
    """A block holds the states after its last token, and the last block those after all tokens."""
    pieces: int = 1
    """Blocks of the kernel in a block."""
    window: Window | None = None
    """What a token reads. None: all tokens before it."""

    @property
    def complete(self) -> bool:
        """A request keeps the blocks of all its tokens."""
        return not self.states and self.window is None

    def first_read(self, position: int) -> int:
        """The first block that the token at this position reads, which begins a block."""
        if self.states:
            return position // self.block_size - 1
        return 0 if self.window is None else self.window.first_read(position) // self.block_size

    def entries(self, num_tokens: int) -> int:
        return 1 if self.states else -(-num_tokens // self.block_size) * self.pieces

    def of(self, blocks: Sequence[int], num_tokens: int) -> Sequence[int]:
        """What KV transfer reads: blocks of the kernel, or the slot of the states after `num_tokens`."""
        if self.states:
            return blocks[: -(-num_tokens // self.block_size)][-1:]
        if self.pieces == 1:
            return blocks
        return [block * self.pieces + i for block in blocks for i in range(self.pieces)]


def block_ids(tables: Sequence[BlockTable], blocks: Blocks, num_tokens: int, start: int = 0) -> list[int]:
    """Returns the block tables of a request behind each other, equally long (`PagedKV.num_tables`). Blocks
    that are not allocated yet, or are not kept, are the null block. So are blocks that end up to `start`."""
    entries, found = max(table.entries(num_tokens) for table in tables), list[int]()
    for table, of_group in zip(tables, blocks, strict=True):
        row = table.of(of_group, num_tokens)[:entries]
        left_out = 0 if table.states else start // table.block_size * table.pieces
        found += [*[NULL_BLOCK] * left_out, *row[left_out:], *[NULL_BLOCK] * (entries - len(row))]
    return found


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions of a prompt that the step computes. Those of the prefix cache are in the first chunk: another
    prompt of the same step may compute them."""

    prefill_id: bytes
    blocks: Blocks
    """Of all positions up to `stop`."""
    start: int
    stop: int
    num_tokens: int
    """Of the prompt."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Positions [start, stop) that a decode server takes from a prefill server, or that a worker takes from
    the prefix cache of another one."""

    request_id: str
    decode_id: bytes
    attempt: int
    """Among the decode attempts of the request."""
    source: Source
    blocks: Blocks
    start: int
    stop: int
    chunks: Sequence[bytes] = ()
    """Of a prefix: the names of all chunks up to `stop`. Then `source` names no prefill."""

    def behind(self, tokens: int) -> int:
        """The position behind so many tokens of a prefix. Full chunks come."""
        return self.start // CHUNK_TOKENS * CHUNK_TOKENS + tokens


@dataclass(frozen=True, slots=True)
class Pinned:
    """Cached positions [start, stop) that another worker reads. `start` is `stop`: there are none."""

    request_id: str
    pin_id: bytes
    blocks: Blocks
    """Up to `stop`. Those before `start` mean nothing."""
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A request whose KV has come, in its first step."""

    blocks: Blocks
    num_tokens: int
    """That are in its blocks. The rest of its last blocks has what was there before."""


class _Told(msgspec.Struct, array_like=True, tag=True):
    """Base of what the engine process of a worker is told, as `Local`."""


class Started(_Told):
    """The first chunk of a prefill is in the step. From then on `Released` follows when nothing reads its
    blocks."""

    prefill_id: bytes


class Costs(_Told):
    """What steps cost now."""

    costs: StepStats


class Encoded(_Told):
    """What vLLM's encoder was given since the start, and how long that took. vLLM does not tell what its
    encoder keeps, and no image waits for it: its prompt does."""

    stats: EncoderStats


class Blind(_Told):
    """vLLM has preempted a decode, and its images must be encoded to compute it again, but they are not here.
    It waits until it is aborted."""

    decode_id: bytes


FromScheduler = Started | Costs | Encoded | Blind


@dataclass(slots=True)
class StepMetadata:
    """The metadata of one step, from vLLM's scheduler to each of its workers."""

    expected: list[bytes] = field(default_factory=list)
    """Prefill ids of routers, of prompts that wait to be scheduled."""
    opened: dict[bytes, str] = field(default_factory=dict)
    """Prefill ids of prompts that start, and their requests."""
    chunks: list[Chunk] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    declined: list[Fetch] = field(default_factory=list)
    """Of requests that need no KV of their prefills any more. They have no blocks."""
    begun: list[Begun] = field(default_factory=list)
    """If blocks that vLLM does not fill must be cleared."""
    stateless: list[Blocks] = field(default_factory=list)
    """Blocks of requests that begin with a chunk of one token: it reads their states."""
    committed: dict[bytes, int | None] = field(default_factory=dict)
    """First tokens of prompts that have finished. None: the worker sends it."""
    preempted: list[bytes] = field(default_factory=list)
    """Prefill ids that have lost their blocks: nothing may read these when the step begins."""
    aborted: dict[bytes, Ended] = field(default_factory=dict)
    """Prefill ids that nothing more is sent of."""
    pinned: list[Pinned] = field(default_factory=list)
    first_tokens: dict[str, int] = field(default_factory=dict)
    """By request id: outputs with which requests begin. Every rank needs them."""
    number: int = 0
    """Of the step."""
    told: list[FromScheduler] = field(default_factory=list)
    """For the engine process of a worker."""


@dataclass(slots=True)
class _Prompt:
    """A prompt that a decode server will fetch."""

    num_tokens: int
    fixed_id: bytes
    """Drawn by a router. Empty: ids are drawn here."""
    prefill_id: bytes = b""
    """Empty until the first chunk is scheduled, and after a preemption."""
    blocks: list[list[int]] = field(default_factory=list)
    preempted: bool = False
    worker_commits: bool = False
    """The worker sends its first token."""


@dataclass(slots=True)
class _Unseen:
    """A request whose images are not here, since their KV comes from another worker."""

    decode_id: bytes
    end: int
    """The position behind the last one."""
    lost: bool = False
    """Its worker was told that it cannot be computed here."""


class ConnectorScheduler:
    """The connector's half in vLLM's scheduler."""

    def __init__(
        self,
        *,
        named: bool = False,
        recomputed: int = 0,
        clears: bool = False,
        new_id: Callable[[], bytes] = lambda: os.urandom(16),
    ) -> None:
        """`named`: requests come from a router, with ids of prefills and decodes. Else clients send them.
        `recomputed`: positions at the end of a prompt that a decode server computes again, and does not
        fetch. `clears`: as vLLM clears blocks that it fills itself."""
        self.address: tuple[str, int] | None = None
        """Where KV of this server can be fetched, and its incarnation. Set once its workers have started.
        None: routers know it."""
        self._named = named
        self._recomputed = recomputed
        self._clears = clears
        self._fetched: dict[str, int] = {}  # tokens of requests until their first step, if it `clears`
        self._new_id = new_id
        self._requests: dict[str, _Prompt | Fetch] = {}  # a fetch: until it has blocks
        self._unseen: dict[str, _Unseen] = {}
        self._image_tokens: dict[str, Sequence[int]] = {}
        self.images = self.image_tokens = 0
        self._metadata = StepMetadata()

    def expect(
        self,
        request_id: str,
        params: dict[str, Any] | None,
        prompt_tokens: int,
        image_tokens: Sequence[int] = (),
    ) -> None:
        """vLLM has a new request. A client may send any `params`: with wrong ones, all is computed here.
        `image_tokens`: of each of its images."""
        params = params or {}
        if self._named and image_tokens:
            self._image_tokens[request_id] = image_tokens
            if "unseen_until" in params:
                unseen = _Unseen(bytes.fromhex(params["decode_id"]), params["unseen_until"])
                self._unseen[request_id] = unseen
        if params.get("do_remote_decode"):
            fixed_id = bytes.fromhex(params["prefill_id"]) if self._named else b""
            self._requests[request_id] = _Prompt(
                prompt_tokens,
                fixed_id,
                worker_commits=self._named and params.get("worker_commits", False),
            )
            if fixed_id:
                self._metadata.expected.append(fixed_id)
        elif params.get("do_remote_prefill"):
            try:
                source = Source.parse(params)
            except ValueError as error:
                log.warning("%s: kv_transfer_params: %s; the prompt is computed here", request_id, error)
                return
            decode_id, attempt = self._new_id(), 1
            if self._named:
                decode_id, attempt = bytes.fromhex(params["decode_id"]), params["attempt"]
            names = params.get("chunks", ()) if self._named else ()
            chunks = tuple(bytes.fromhex(name) for name in names)
            stop = len(chunks) * CHUNK_TOKENS or prompt_tokens - self._recomputed
            self._requests[request_id] = Fetch(request_id, decode_id, attempt, source, (), 0, stop, chunks)

    def to_fetch(self, request_id: str, computed: int) -> int:
        """Returns how many tokens of a prompt come from the prefill server, beyond those computed here."""
        fetch = self._requests.get(request_id)
        return max(0, fetch.stop - computed) if isinstance(fetch, Fetch) else 0

    def waits(self, request_id: str, computed: int) -> bool:
        """Whether the request cannot go on here after the `computed` tokens that it has, or will fetch: its
        images are on another worker. Its own worker hands it back."""
        unseen = self._unseen.get(request_id)
        if unseen is None or computed >= unseen.end:
            return False
        if not unseen.lost:
            unseen.lost = True
            self._metadata.told.append(Blind(unseen.decode_id))
        return True

    def encodes(self, request_id: str, images: Sequence[int]) -> int:
        """The encoder is given these images of the request in the step. Returns their tokens."""
        if (all_tokens := self._image_tokens.get(request_id)) is None:
            return 0
        self.images += len(images)
        self.image_tokens += (tokens := sum(all_tokens[i] for i in images))
        return tokens

    def allocated(self, request_id: str, blocks: Blocks, to_fetch: int) -> None:
        """The request has blocks. `to_fetch`: tokens that come from the prefill server, at the end of the
        prompt. After a preemption the prompt is computed here."""
        if not isinstance(fetch := self._requests.get(request_id), Fetch):
            return
        del self._requests[request_id]
        if not to_fetch:
            self._metadata.declined.append(fetch)
        else:
            start = fetch.stop - to_fetch
            self._metadata.fetches.append(replace(fetch, blocks=blocks, start=start))
            if self._clears:
                self._fetched[request_id] = fetch.stop

    def pins(self, request_id: str, params: dict[str, Any], blocks: Blocks, block_size: int) -> None:
        """A request pins these cached blocks, as many of each group, from that with the first position of the
        first chunk on."""
        start = params["first_chunk"] * CHUNK_TOKENS
        first = start // block_size
        end = (first + len(blocks[0])) * block_size
        chunks = min(max(0, end - start) // CHUNK_TOKENS, params["chunks"])
        stop = start + chunks * CHUNK_TOKENS
        if len(blocks) > 1 and stop < end:  # states are those behind the last block
            chunks, stop = 0, start
        tables = [[*[NULL_BLOCK] * first, *of_group] for of_group in blocks]
        self._metadata.pinned.append(
            Pinned(request_id, bytes.fromhex(params["pin_id"]), tables if chunks else (), start, stop)
        )

    def begins_with(self, request_id: str, first_token: int) -> None:
        """The step is the first one of the request, which has this output already."""
        self._metadata.first_tokens[request_id] = first_token

    def scheduled(
        self, request_id: str, new_blocks: Blocks, computed: int, count: int, *, anew: bool
    ) -> None:
        """The step computes `count` tokens of the request after the first `computed`. `anew`: `new_blocks`
        replace the blocks of the request, since it is new or starts again after a preemption."""
        if (fetched := self._fetched.pop(request_id, 0)) and computed == fetched:
            self._metadata.begun.append(Begun(new_blocks, fetched))
        if (computed, count) == (0, 1):
            self._metadata.stateless.append(new_blocks)
        prompt = self._requests.get(request_id)
        if not isinstance(prompt, _Prompt) or (prompt.preempted and prompt.fixed_id):
            return
        if anew or not prompt.blocks:
            prompt.blocks = [[] for _ in new_blocks]
        for blocks, new in zip(prompt.blocks, new_blocks, strict=False):  # none in a step without new ones
            blocks += new
        start, stop = computed, min(computed + count, prompt.num_tokens)
        if not prompt.prefill_id:
            prompt.prefill_id = prompt.fixed_id or self._new_id()
            self._metadata.opened[prompt.prefill_id] = request_id
            if prompt.fixed_id:
                self._metadata.told.append(Started(prompt.prefill_id))
            start = 0
        if start < stop:
            self._metadata.chunks.append(
                Chunk(prompt.prefill_id, tuple(map(tuple, prompt.blocks)), start, stop, prompt.num_tokens)
            )

    def preempted(self, request_id: str) -> None:
        """The blocks of the request are free, from this step on."""
        prompt = self._requests.get(request_id)
        if isinstance(prompt, _Prompt) and prompt.prefill_id:
            self._metadata.preempted.append(prompt.prefill_id)
            prompt.prefill_id, prompt.preempted = b"", True

    def take(self) -> StepMetadata:
        """Returns the metadata of the step."""
        metadata, self._metadata = self._metadata, StepMetadata()
        return metadata

    def finished(
        self, request_id: str, first_token: int | None, reason: Ended = "cancelled"
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended. `first_token`: None if it ended for `reason`, and nothing is handed over.

        Returns whether its blocks must stay until they are sent, and the parameters with which a decode
        server fetches them, if a proxy needs these."""
        self._fetched.pop(request_id, None)
        self._image_tokens.pop(request_id, None)
        self._unseen.pop(request_id, None)
        prompt = self._requests.pop(request_id, None)
        if isinstance(prompt, Fetch):
            self._metadata.declined.append(prompt)
        if not isinstance(prompt, _Prompt):
            return False, None
        if not prompt.prefill_id:
            if prompt.fixed_id and not prompt.preempted:
                self._metadata.aborted[prompt.fixed_id] = reason
            return False, None
        if first_token is None:
            self._metadata.aborted[prompt.prefill_id] = reason
            return True, None
        self._metadata.committed[prompt.prefill_id] = None if prompt.worker_commits else first_token
        if self.address is None:
            return True, None
        return True, Source(*self.address, prompt.prefill_id).params
