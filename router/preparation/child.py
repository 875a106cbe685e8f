"""Prepares bodies, large ones in a child process. This module is also the process that forks the children.

A frame is a body to prepare: a line of JSON (`_Head`), then the history, then files, then the client's bytes.
An answer is the bytes of a response, `Prepared`, or the URLs of the files that the router has to fetch.
"""

import asyncio
import gc
import sys
from array import array
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain
from typing import Any

import msgspec

from baton.processes.sandbox import helper
from baton.processes.sandbox.client import ForkServer
from baton.router import child_pool
from baton.router.admission.keys import ApiKey
from baton.router.admission.slots import Slots
from baton.router.api.bodies import ChatOptions, CompletionOptions
from baton.router.api.messages import Function, Tool
from baton.router.child_pool import ChildPool
from baton.router.errors import InvalidRequest, Unsupported
from baton.router.preparation.images import pillow
from baton.router.preparation.prepare import (
    NO_FILES,
    Kind,
    NeedsChild,
    NeedsFiles,
    Preparation,
    Prepared,
    Served,
)
from baton.router.text.tokenizer import ModelTokenizer
from baton.system import memory_share

SMALL_BYTES = 16 << 10
"""A body up to this size takes 10 ms at most. A thread prepares it, which saves the way to a child. Most of
that time the tokenizer computes without the GIL, and the event loop writes tokens meanwhile."""
LONG_BYTES = 256 << 10
"""A body above this size may take half a second or more."""
CHILDREN = 3
"""Of one key two work at most, and one of them on a body above `LONG_BYTES`."""
CPU_SECONDS = 20
"""Of one body. A signal then ends the process, and the router starts another."""
MEMORY_BYTES = 4 << 30
"""Of one body."""
MAX_OPTIONS_BYTES = 512 << 10
"""Limit for the fields beside the prompt, because the router reads them on the event loop."""
MAX_OPTIONS_VALUES = 1 << 16
"""Limit for the commas and brackets in them: each value becomes an object. Tools have one in 20 bytes."""


class Preparer:
    """Prepares small bodies in a thread, and larger ones in child processes. It owns both."""

    def __init__(self, tokenizer: ModelTokenizer, server: ForkServer, processes: int = 1) -> None:
        """`processes`: how many of a router have such children."""
        self._tokenizer = tokenizer
        self._limits = f"{CPU_SECONDS} s or {child_bytes(processes) >> 20} MiB"
        self._children = ChildPool(server, "bodies", CHILDREN, decode, long_bytes=LONG_BYTES)
        self._thread = ThreadPoolExecutor(1, "prepare")
        self._turns = Slots(1)  # of the thread

    async def run(
        self,
        kind: Kind,
        raw: bytes | bytearray,
        served: Served,
        key: ApiKey,
        history: bytes = b"",
        files: Mapping[str, bytes] = NO_FILES,
    ) -> Prepared | bytes:
        """Runs `Preparation.prepare`. `key` is the client's. Raises ApiError and NeedsFiles."""
        if len(raw) + len(history) <= SMALL_BYTES and not files:
            here = Preparation(self._tokenizer, served, history, key.cache_salt, in_child=False)
            small = partial(here.prepare, kind, raw)
            in_thread = asyncio.get_running_loop().run_in_executor
            with suppress(NeedsChild):
                return await self._turns.run(key.name, partial(in_thread, self._thread, small))
        head = request_head(kind, served, history, key.cache_salt, files)
        too_much = InvalidRequest(f"the preparation of this request takes more than {self._limits}")
        parts = head, *files.values(), raw
        answer, pixels = await self._children.ask(key.name, *parts, too_much=too_much)
        return read_prepared(answer, pixels)

    async def close(self) -> None:
        await self._turns.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._children.close()


def child_bytes(processes: int) -> int:
    """What a child may have: each router process has three for bodies, and they have half of the memory."""
    return memory_share(6 * processes, MEMORY_BYTES)


def fork_server(
    title: str, tokenizer: ModelTokenizer, fd: int | None = None, processes: int = 1
) -> ForkServer:
    """The process that forks children, also those of `GrammarChecker`. `fd`: as of ForkServer."""
    memory = str(child_bytes(processes))
    return ForkServer(["-m", __name__, title, memory], tokenizer.state, fd)


Answer = Prepared | bytes | tuple[str, list[str]]
"""A tuple: what `NeedsFiles` has."""


_Head = tuple[Kind, Served, bytes, int, dict[str, int]]
"""The first line of a request: what it asks for, the salt of its API key, and the bytes of the history and of
each file, by URL."""


def request_head(
    kind: Kind,
    served: Served,
    history: bytes = b"",
    salt: bytes = b"",
    files: Mapping[str, bytes] = NO_FILES,
) -> bytes:
    """Returns what precedes the files and the client's bytes."""
    sizes = {url: len(file) for url, file in files.items()}
    return msgspec.json.encode((kind, served, salt, len(history), sizes)) + b"\n" + history


def read_prepared(answer: Answer, pixels: bytes | memoryview = b"") -> Prepared | bytes:
    """`pixels`: those of `Prepared.pixel_bytes`. Raises NeedsFiles."""
    if isinstance(answer, tuple):
        raise NeedsFiles(*answer)
    if isinstance(answer, Prepared) and answer.pixel_bytes:
        sizes, shared = answer.pixel_bytes, memoryview(pixels)
        if len(sizes) != sum(map(len, answer.images)) or min(sizes) < 0 or sum(sizes) > len(shared):
            raise ValueError("a child has not left the pixels of its images")
        ends = accumulate(sizes)
        views = (shared[end - size : end] for end, size in zip(ends, sizes, strict=True))
        answer.images = [[image._replace(pixels=next(views)) for image in each] for each in answer.images]
        answer.pixel_bytes = []
    return answer


def main(title: str, memory_bytes: str, control: str) -> None:
    from baton.router.preparation import grammar_child  # the compiler takes memory that routers do not need

    tokenizer = ModelTokenizer.restored(sys.stdin.buffer.read())

    def serve() -> None:
        child_pool.serve(lambda request: encode(share_pixels(answer_to(tokenizer, request))), CPU_SECONDS)

    if tokenizer.images is not None:
        with suppress(Unsupported):  # each request with an image is told
            pillow()
    gc.freeze()
    kinds = {"bodies": serve, "grammars": grammar_child.serve}
    helper.fork_children(int(control), title, kinds, int(memory_bytes))


def answer_to(tokenizer: ModelTokenizer, request: bytes) -> Answer:
    """Raises InvalidRequest and ModelNotFound."""
    line, _, payload = request.partition(b"\n")
    kind, served, salt, end, sizes = msgspec.json.decode(line, type=_Head)
    history, files = payload[:end], dict[str, bytes]()
    for url, size in sizes.items():
        files[url] = payload[end : end + size]
        end += size
    try:
        return Preparation(tokenizer, served, history, salt, files).prepare(kind, payload[end:])
    except NeedsFiles as needed:
        return needed.field, needed.urls


def share_pixels(answer: Answer) -> Answer:
    """Leaves the pixels of an answer for the router."""
    if isinstance(answer, Prepared) and answer.images:
        with open(helper.SHARED, "wb", buffering=0, closefd=False) as file:
            file.seek(0)
            for image in chain(*answer.images):
                unread = memoryview(image.pixels)
                while unread:
                    unread = unread[file.write(unread) :]
        answer.pixel_bytes = [len(image.pixels) for image in chain(*answer.images)]
        answer.images = [[image._replace(pixels=memoryview(b"")) for image in each] for each in answer.images]
    return answer


_Function = tuple[str, dict[str, Any] | None, bool | None]
"""What a router reads of a tool."""


def _plain(value: Any) -> Any:
    """What msgspec writes for a value of another type."""
    if isinstance(value, array):
        return value.tobytes()
    if isinstance(value, Tool):
        return value.function.name, value.function.parameters, value.function.strict
    assert isinstance(value, ChatOptions | CompletionOptions), value
    prompt_and_tools = {"messages", "prompt", "tools"}
    fields = value.model_dump(exclude=prompt_and_tools, exclude_none=True, warnings=False)
    return fields | ({"tools": value.tools} if isinstance(value, ChatOptions) else {})


def _rich(kind: type, value: Any) -> Any:
    """Undoes `_plain`. Raises ValueError."""
    if kind is array:
        (ids := array("I")).frombytes(value)
        return ids
    options = ChatOptions if "tools" in value else CompletionOptions
    if not value.keys() <= options.model_fields.keys():
        raise ValueError("options have other fields")
    if (tools := value.get("tools")) is not None:
        value["tools"] = [
            Tool.model_construct(
                function=Function.model_construct(name=name, parameters=parameters, strict=strict)
            )
            for name, parameters, strict in msgspec.convert(tools, list[_Function])
        ]
    return options.model_validate(value)


_as_json = msgspec.json.Encoder(enc_hook=_plain).encode
_packed = msgspec.msgpack.Encoder(enc_hook=_plain).encode


def encode(answer: Answer) -> bytes:
    """Returns an answer as a child writes it. Raises InvalidRequest when the fields beside the prompt are too
    large."""
    if isinstance(answer, Prepared):
        options = _as_json(answer.options)
        if len(options) > MAX_OPTIONS_BYTES:
            text = f"the fields beside the prompt take {len(options)} bytes, more than {MAX_OPTIONS_BYTES}"
            raise InvalidRequest(text)
        if (values := sum(map(options.count, b",[{"))) > MAX_OPTIONS_VALUES:
            text = f"the fields beside the prompt have {values} commas and brackets, more than"
            raise InvalidRequest(f"{text} {MAX_OPTIONS_VALUES}")
    return _packed(answer)


decode = msgspec.msgpack.Decoder(Answer, dec_hook=_rich).decode
"""Reads what a child wrote."""


if __name__ == "__main__":
    main(*sys.argv[1:])
