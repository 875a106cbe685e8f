"""What builders of responses share: the parts and blocks of an output, and the entries of logprobs."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.router.active_request import ActiveRequest
from baton.router.api.bodies import ChatOptions
from baton.router.generation.output import Delta
from baton.router.prompt_logprobs import PromptLogprob
from baton.router.text.sealed import sealed
from baton.router.tools.output import TextParser
from baton.router.tools.parser import Part
from baton.rpc import worker_pb2 as pb

Event = dict[str, Any]
encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """Returns a server-sent event without a name."""
    return b"data: " + encode(payload) + b"\n\n"


LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON does not have."""


class LogprobEntries:
    """Makes the entries of one request's tokens, encoded one by one.

    To encode all of a response at once would take seconds and block the event loop.
    """

    def __init__(self, request: ActiveRequest, *, kept: bool) -> None:
        """`kept`: the router has the entries until the end of the answer."""
        self._request = request
        self._kept = kept
        self._tokenizer = request.services.tokenizer
        by_default = request.services.config.return_tokens_as_token_ids
        self._as_ids = request.options.return_tokens_as_token_ids or by_default
        self._named = bool(request.options.logprob_token_ids)

    def of_chat(self, delta: Delta) -> msgspec.Raw:
        """Returns the entry of a chat completion, with the alternatives as a list."""
        logprobs = delta.logprobs or pb.TokenLogprobs()
        token = delta.token_id
        top = list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))
        if self._named and token not in logprobs.top_ids:  # as in vLLM, the token itself is among them
            top.insert(0, (token, logprobs.logprob))
        entry = {
            **self._entry(token, logprobs.logprob),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in top],
        }
        return self._encoded(entry, kept=self._kept)

    def of_completion(
        self, token_id: int, logprob: float, top: Iterable[tuple[int, float]], name: str
    ) -> tuple[str, float, msgspec.Raw]:
        """Returns the token's `name`, its logprob, and the alternatives by name."""
        names = {self.name(i): max(other, LOWEST_LOGPROB) for i, other in top if i != token_id}
        logprob = max(logprob, LOWEST_LOGPROB)
        # As in OpenAI's API, the token itself is always among them. As in vLLM, it is the first one.
        names.pop(name, None)
        return name, logprob, self._encoded({name: logprob, **names}, kept=self._kept)

    def of_prompt(self, token_id: int, logprob: PromptLogprob, top: int) -> msgspec.Raw:
        """Returns vLLM's entry for a token of the prompt: the token and `top` alternatives by their ids."""
        ranked = [(token_id, logprob.logprob, logprob.rank)]
        ranked += [(other, value, rank) for rank, (other, value) in enumerate(logprob.top[:top], 1)]
        entry = {
            str(i): {"logprob": max(value, LOWEST_LOGPROB), "rank": rank, "decoded_token": self.spelled(i)}
            for i, value, rank in ranked
        }
        return self._encoded(entry, kept=True)

    def _encoded(self, entry: dict[str, Any], *, kept: bool) -> msgspec.Raw:
        raw = encode(entry)
        if kept:
            self._request.keep(len(raw))
        return msgspec.Raw(raw)

    def spelled(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def name(self, token_id: int, *, first: bool = False) -> str:
        """`first`: as the first token of a text."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return (
            self._tokenizer.first_bytes(token_id).decode("utf-8", "replace")
            if first
            else self.spelled(token_id)
        )


class OutputParser:
    """Parses the text of one choice of a chat.

    Attributes:
        reasons: reasoning is divided from the answer.
        text: divides the text, and counts calls and tokens of reasoning.
    """

    def __init__(self, request: ActiveRequest, *, with_reasoning: bool | None = None) -> None:
        """`with_reasoning`: gives parts of reasoning. None: as the client wants it."""
        options, tokenizer = request.options, request.services.tokenizer
        assert isinstance(options, ChatOptions)
        self._max_calls = 1 if options.parallel_tool_calls is False else None
        self._only_calls = options.must_call
        self._named = options.names_tool
        tool_format = tokenizer.format_of_calls(forced=options.must_call) if options.offered_tools else None
        way = tokenizer.reasoning if options.separate_reasoning else None
        self.reasons = way is not None
        # The grammar of a call that is forced begins behind the reasoning, and allows nothing else there.
        self.text = TextParser(
            request.prepared.beginning, way, tool_format, options.offered_tools,
            calls_in_reasoning=not options.must_call,
        )  # fmt: skip
        self._with_reasoning = options.include_reasoning if with_reasoning is None else with_reasoning
        self._withheld: list[str] | None = None if options.stream_reasoning else []  # reasoning so far

    @property
    def chose_to_call(self) -> bool:
        """True if there was a tool call, and not because `tool_choice` names the tool."""
        return self.text.num_calls > 0 and not self._named

    def push(self, text: str, *, last: str | None) -> list[Part]:
        """Takes the text of the next token. Returns the parts that are certain. `last`: why the output ends
        with it. None: more follows."""
        parts = self.text.push(text)
        if last is not None:
            parts += self.text.finish(ended=last == "stop")
        return list(self._kept(parts, last=last is not None))

    def _kept(self, parts: list[Part], *, last: bool) -> Iterator[Part]:
        if self._withheld is not None:
            self._withheld += (part.text for part in parts if part.kind == "reasoning")
            parts = [part for part in parts if part.kind != "reasoning"]
            if parts or last:
                parts.insert(0, Part("reasoning", "".join(self._withheld)))
                self._withheld = None
        for part in parts:
            if part.kind == "reasoning":
                if self._with_reasoning and part.text:
                    yield part
            elif part.kind == "content":
                # The grammar allows only calls. Other text is the beginning of a call that was cut off.
                if not self._only_calls and part.text:
                    yield part
            elif self._max_calls is None or part.call < self._max_calls:
                yield part


@dataclass
class Block:
    """One piece of reasoning, one piece of content, or one tool call. `index` is its place in the output."""

    head: Part
    """Its first part."""
    index: int
    id: str = field(default_factory=lambda: os.urandom(16).hex())
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """Entries of its tokens."""
    sealed: str = ""

    @property
    def text(self) -> str:
        return "".join(self.texts)


class BlocksBuilder:
    """Follows the blocks of a request's one choice. A subclass turns each change into typed events.

    A block opens, grows, and closes before the next one opens.
    """

    def __init__(self, request: ActiveRequest) -> None:
        self._request = request
        self._model = request.model
        self._parser = OutputParser(request, with_reasoning=request.prepared.seals_reasoning or None)
        self._blocks: list[Block] = []
        self._open: Block | None = None
        self._last: Delta | None = None

    def add(self, index: int, delta: Delta) -> None:
        for _ in self._changes(delta):
            pass

    def events(self, index: int, delta: Delta) -> bytes:
        return self._written(self._changes(delta))

    def _written(self, events: Iterable[Event]) -> bytes:
        return b"".join(sent_events(events))

    def _changes(self, delta: Delta) -> Iterator[Event]:
        self._last = delta
        if delta.first:
            yield from self._begin()
        parts = self._parser.push(delta.text, last=delta.finish_reason)
        self._see(delta, parts)
        for part in parts:
            if self._open is None or (part.kind, part.call) != (self._open.head.kind, self._open.head.call):
                yield from self._end_block(cut=False)
                self._open = Block(part, len(self._blocks))
                self._blocks.append(self._open)
                yield from self._opened(self._open)
            self._open.texts.append(part.text)
            yield from self._grown(self._open, part.text)
        if delta.finish_reason is not None:
            yield from self._end_block(cut=delta.finish_reason == "length")

    def _sealed(self, block: Block) -> str:
        """Returns the text of a block in a form that only the cluster reads, the same each time."""
        if not block.sealed:
            block.sealed = sealed(block.text, self._request.services.config.secret)
        return block.sealed

    def _end_block(self, *, cut: bool) -> Iterator[Event]:
        if self._open is not None:
            yield from self._closed(self._open, cut=cut)
            self._open = None

    def _begin(self) -> Iterator[Event]:
        """Yields the events before the first block."""
        raise NotImplementedError

    def _see(self, delta: Delta, parts: list[Part]) -> None:
        """Is called with each delta and its parts, before they join blocks."""

    def _opened(self, block: Block) -> Iterator[Event]:
        raise NotImplementedError

    def _grown(self, block: Block, text: str) -> Iterator[Event]:
        raise NotImplementedError

    def _closed(self, block: Block, *, cut: bool) -> Iterator[Event]:
        """`cut`: the limit for tokens ended the block."""
        raise NotImplementedError


def sent_events(events: Iterable[Event]) -> list[bytes]:
    """Returns server-sent events, each with its `type` as its name."""
    return [b"event: %b\ndata: %b\n\n" % (e["type"].encode(), encode(e)) for e in events]
