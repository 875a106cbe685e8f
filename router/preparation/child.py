"""Prepares bodies, large ones in a child process. This module is also the process that forks the children.

A frame is a body to prepare: a line of JSON, then the history, then files, then the client's bytes. The line
is [kind, model names, context length, most images, key of reasoning and salt in hexadecimal, bytes of the
history, {URL: bytes of its file}]. An answer is the bytes of a response, an array of the fields of
`Prepared`, or an object with the URLs of the files that the router has to fetch.
"""

import asyncio
import gc
import json
import sys
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from typing import Any

from baton.router.admission.keys import ApiKey
from baton.router.admission.slots import Slots
from baton.router.api.bodies import ChatOptions, CompletionOptions
from baton.router.api.openai_responses.tools import Called
from baton.router.child_pool import ChildPool, ForkServer
from baton.router.errors import InvalidRequest, Unsupported
from baton.router.preparation import pipe
from baton.router.preparation.demand import Question
from baton.router.preparation.images import PlacedImage, pillow
from baton.router.preparation.prepare import (
    NO_FILES,
    Kind,
    NeedsChild,
    NeedsFiles,
    Prepared,
    Served,
    prepare,
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
"""Limit for the fields beside the prompt, because the router parses them on the event loop."""
MAX_OPTIONS_VALUES = 1 << 16
"""Limit for the commas and brackets in them: each value becomes an object. Tools have one in 20 bytes."""
_PROMPT = {"messages", "prompt", "chat_template_kwargs", "bad_words"}
assert array("I").itemsize == 4


class Preparer:
    """Prepares small bodies in a thread, and larger ones in child processes. It owns both."""

    def __init__(self, tokenizer: ModelTokenizer, server: ForkServer, processes: int = 1) -> None:
        """`processes`: how many of a router have such children."""
        self._tokenizer = tokenizer
        self._limits = f"{CPU_SECONDS} s or {child_bytes(processes) >> 20} MiB"
        self._children = ChildPool(server, "bodies", CHILDREN, long_bytes=LONG_BYTES)
        self._thread = ThreadPoolExecutor(1, "prepare")
        self._turns = Slots(1)  # of the thread

    async def prepare(
        self,
        kind: Kind,
        raw: bytes | bytearray,
        served: Served,
        key: ApiKey,
        history: bytes = b"",
        expect: Callable[[int], None] = lambda tokens: None,
        files: Mapping[str, bytes] = NO_FILES,
    ) -> Prepared | bytes:
        """Does the same as `prepare.prepare`. `key` is the client's. Raises ApiError and NeedsFiles.

        `expect` is told the tokens of the prompts before this process makes lists of them, which take nine
        times their bytes. It may refuse them."""
        if len(raw) + len(history) <= SMALL_BYTES and not files:
            tokenizer, salt = self._tokenizer, key.cache_salt
            small = partial(prepare, kind, raw, tokenizer, served, history, salt, in_child=False)
            in_thread = asyncio.get_running_loop().run_in_executor
            with suppress(NeedsChild):
                return await self._turns.run(key.name, partial(in_thread, self._thread, small))
        head = request_head(kind, served, history, key.cache_salt, files)
        too_much = InvalidRequest(f"the preparation of this request takes more than {self._limits}")
        parts = head, *files.values(), raw
        answer, pixels = await self._children.ask(key.name, *parts, too_much=too_much)
        return read_prepared(answer, expect, pixels)

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
    """The process that forks children, also those of `grammar_checker`. `fd`: as of ForkServer."""
    memory = str(child_bytes(processes))
    return ForkServer([sys.executable, "-m", __name__, title, memory], tokenizer.state, fd)


def request_head(
    kind: Kind,
    served: Served,
    history: bytes = b"",
    salt: bytes = b"",
    files: Mapping[str, bytes] = NO_FILES,
) -> bytes:
    """Returns what precedes the files and the client's bytes."""
    sizes = {url: len(file) for url, file in files.items()}
    head = [kind, *astuple(served), salt.hex(), len(history), sizes]
    return json.dumps(head).encode() + b"\n" + history


def read_prepared(
    answer: Any, expect: Callable[[int], None] = lambda tokens: None, pixels: bytes | memoryview = b""
) -> Prepared | bytes:
    """`pixels`: of all images that have only a length in the answer. Raises NeedsFiles."""
    if isinstance(answer, bytes):
        return answer
    if isinstance(answer, dict):
        raise NeedsFiles(answer["urls"])
    is_chat, options, *ids, texts, of_tools, flags, question, images = answer
    (echoes, starts, beginning, repeated), (called, unenforced), (seals, marks) = texts, of_tools, flags
    expect(sum(map(len, ids[0])) // 4)
    kind = ChatOptions if is_chat else CompletionOptions
    prompts, bad_words = ([array("I", each).tolist() for each in listed] for listed in ids)
    chosen = kind.model_validate_json(options)
    unread = memoryview(pixels)
    placed = list[list[PlacedImage]]()
    for of_prompt in images:
        placed.append([])
        for image in of_prompt:
            if isinstance(size := image[-1], int):
                image[-1], unread = unread[:size], unread[size:]
            placed[-1].append(PlacedImage(*image))
    calls = {name: Called(*call) for name, call in called.items()}
    asked = None if question is None else Question(*question)
    return Prepared(
        chosen, prompts, echoes, starts, beginning, repeated, calls, unenforced, seals, marks, placed,
        bad_words, asked,
    )  # fmt: skip


def main(title: str, memory_bytes: str, control: str) -> None:
    from baton.router.preparation import grammar_child  # the compiler takes memory that routers do not need

    tokenizer = ModelTokenizer.restored(sys.stdin.buffer.read())

    def serve() -> None:
        pipe.serve(lambda request: share_pixels(answer_to(tokenizer, request)), CPU_SECONDS)

    if tokenizer.images is not None:
        with suppress(Unsupported):  # each request with an image is told
            pillow()
    gc.freeze()
    kinds = {"bodies": serve, "grammars": grammar_child.serve}
    pipe.fork_children(int(control), title, kinds, int(memory_bytes))


def answer_to(tokenizer: ModelTokenizer, request: bytes) -> list[Any] | dict[str, Any] | bytes:
    """Raises InvalidRequest and ModelNotFound."""
    head, _, payload = request.partition(b"\n")
    kind, model_names, context, max_images, seal_key, salt, length, sizes = json.loads(head)
    served = Served(tuple(model_names), context, max_images, seal_key)
    history, files = payload[:length], {}
    for url, size in sizes.items():
        files[url] = payload[length : length + size]
        length += size
    try:
        return _sent(prepare(kind, payload[length:], tokenizer, served, history, bytes.fromhex(salt), files))
    except NeedsFiles as needed:
        return {"urls": needed.urls}


def share_pixels(answer: list[Any] | dict[str, Any] | bytes) -> list[Any] | dict[str, Any] | bytes:
    """Leaves the pixels of an answer for the router, and their lengths in their places."""
    if isinstance(answer, list) and answer[-1]:
        with open(pipe.SHARED, "wb", buffering=0, closefd=False) as file:
            file.seek(0)
            for of_prompt in answer[-1]:
                for number, image in enumerate(of_prompt):
                    written = 0
                    while written < len(image.pixels):
                        written += file.write(memoryview(image.pixels)[written:])
                    of_prompt[number] = image._replace(pixels=written)
    return answer


def _sent(prepared: Prepared | bytes) -> list[Any] | bytes:
    """Raises InvalidRequest when the fields beside the prompt are too large."""
    if isinstance(prepared, bytes):
        return prepared
    chosen = prepared.options
    options = chosen.model_dump_json(
        by_alias=True,
        exclude_unset=True,
        exclude=_PROMPT,
        warnings=False,  # about values of a PlainValidator, which pydantic writes nevertheless
    ).encode()
    if len(options) > MAX_OPTIONS_BYTES:
        text = f"the fields beside the prompt take {len(options)} bytes, more than {MAX_OPTIONS_BYTES}"
        raise InvalidRequest(text)
    if (values := sum(map(options.count, b",[{"))) > MAX_OPTIONS_VALUES:
        text = (
            f"the fields beside the prompt have {values} commas and brackets, more than {MAX_OPTIONS_VALUES}"
        )
        raise InvalidRequest(text)
    ids = (
        [array("I", each).tobytes() for each in listed] for listed in (prepared.prompts, prepared.bad_words)
    )
    is_chat = isinstance(chosen, ChatOptions)
    texts = prepared.echoes, prepared.echo_starts, prepared.beginning, prepared.repeated
    of_tools = prepared.called, prepared.unenforced
    flags = prepared.seals_reasoning, prepared.marks_cache
    return [is_chat, options, *ids, texts, of_tools, flags, prepared.question, prepared.images]


if __name__ == "__main__":
    main(*sys.argv[1:])
