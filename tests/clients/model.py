"""A model that follows a script, on fake workers with prefix caches, behind a real router."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
from tokenizers import Tokenizer

from baton.kv_names import CHUNK_TOKENS, prompt_hints
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import worker_pb2 as pb
from baton.rpc.token_ids import unpacked_ids
from tests.fake_worker import EOS, FakeWorker, Outputs
from tests.router.conftest import Cluster, make_cluster

TEMPLATE = Path(__file__).with_name("template.jinja")
CONTEXT = 1 << 18
SAID, FINAL = "I look.", "The note says: it snows."
"""What the model says before each call, and when its script has ended."""


class Call(NamedTuple):
    """A call that the model makes in one turn."""

    name: str
    arguments: dict[str, Any]


def shown_tools(prompt: str) -> list[str]:
    """The names of the tools in a prompt."""
    lines = prompt.partition("<|im_start|>tools\n")[2].partition("<|im_end|>")[0].splitlines()[1:]
    return [json.loads(line)["function"]["name"] for line in lines]


def turn(script: Sequence[Call], prompt: str) -> int | None:
    """Which turn of a script a prompt asks for. None: it is another request, without tools of the script."""
    if not {call.name for call in script} <= {*shown_tools(prompt)}:
        return None
    return prompt.count("<|im_start|>tool\n")


def thought(number: int) -> str:
    """What the model thinks before a call."""
    return f"Turn {number} calls a tool."


def written(script: Sequence[Call], prompt: str) -> str:
    """What the model writes after a prompt: one call each turn, with a thought before it."""
    number = turn(script, prompt)
    if number is None:
        return "A note."
    if number >= len(script):
        return FINAL
    called = json.dumps(script[number]._asdict())
    return f"<think>\n{thought(number)}\n</think>\n\n{SAID}\n<tool_call>\n{called}\n</tool_call>"


class Seen(NamedTuple):
    """A prompt that a worker computed."""

    ids: tuple[int, ...]
    text: str
    output: tuple[int, ...]
    """What the model writes after it, with the token that ends it."""
    cached: int
    """Tokens that this worker had computed before."""


class CachingWorker(FakeWorker):
    """A fake worker that follows a script, and keeps the whole chunks of its prompts."""

    def __init__(
        self, *args: Any, tokenizer: ModelTokenizer, script: Sequence[Call], seen: list[Seen], **flags: Any
    ) -> None:
        super().__init__(*args, **flags)
        self._tokenizer, self._script, self._seen = tokenizer, script, seen
        self._written: dict[bytes, tuple[int, ...]] = {}
        """The outputs of attempts."""
        self._hits: dict[bytes, int] = {}
        """Cached tokens of attempts that computed a prompt."""
        self.cache = set()
        self.max_model_len = CONTEXT
        self.status.prefill_tokens_per_s = 10_000.0
        self.status.blocks_free = self.status.blocks_total = CONTEXT

    async def Describe(
        self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerDescription:
        described = await super().Describe(request, context)
        described.num_blocks = CONTEXT
        return described

    def _take(self, message: pb.RouterMessage, outputs: Outputs) -> None:
        match message.WhichOneof("kind"):
            case "prefill":
                self._compute(message.prefill.prefill_id, message.prefill.request, whole=True)
            case "decode":
                whole = not message.decode.HasField("source")
                self._compute(message.decode.decode_id, message.decode.request, whole=whole)
        super()._take(message, outputs)

    def _compute(self, attempt_id: bytes, request: pb.Request, *, whole: bool) -> None:
        """`whole`: this worker computes the prompt, too."""
        ids = tuple(unpacked_ids(request.prompt_ids))
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        output = (*self._tokenizer.encode(written(self._script, text), add_special_tokens=False), EOS)
        self._written[attempt_id] = output
        if whole:
            assert self.cache is not None
            chunks = prompt_hints(ids, b"", request.cache_salt)
            hits = takewhile(self.cache.__contains__, chunks[: (len(ids) - 1) // CHUNK_TOKENS])
            self._hits[attempt_id] = cached = sum(1 for _ in hits) * CHUNK_TOKENS
            self.change_cache(chunks)
            self._seen.append(Seen(ids, text, output, cached))

    def _token(self, attempt_id: bytes, request: pb.Request, index: int) -> pb.TokenEvent:
        self.output_ids = [*self._written[attempt_id]]
        event = super()._token(attempt_id, request, index)
        event.cached_tokens = self._hits.get(attempt_id, 0)
        return event


def write_model(at: Path, tokenizer: Tokenizer) -> Path:
    """Writes a model with this tokenizer, marks of thinking and calls, and a long context to `at`."""
    at.mkdir()
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.save(str(at / "tokenizer.json"))
    (at / "config.json").write_text(json.dumps({"max_position_embeddings": CONTEXT}))
    described = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE.read_text()}
    (at / "tokenizer_config.json").write_text(json.dumps(described))
    return at


@contextlib.asynccontextmanager
async def following(
    script: Sequence[Call], tokenizer: ModelTokenizer, at: Path
) -> AsyncIterator[tuple[Cluster, list[Seen]]]:
    """A router with two workers of each role that follow a script. Yields the prompts that they compute, too.

    `tokenizer`: that of `write_model`."""
    seen: list[Seen] = []
    new = partial(CachingWorker, tokenizer=tokenizer, script=script, seen=seen)
    async with make_cluster(tokenizer, at, prefill=2, decode=2, new_worker=new) as cluster:
        yield cluster, seen
