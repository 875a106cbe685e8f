"""Builds chat and text completions: POST /v1/chat/completions and /v1/completions."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import msgspec.structs

from baton.router import prompt_logprobs
from baton.router.active_request import ActiveRequest
from baton.router.api.bodies import ChatOptions, CompletionOptions
from baton.router.endpoints.builders.base import LogprobEntries, OutputParser, encode, event
from baton.router.errors import ApiError
from baton.router.generation.output import Delta
from baton.router.prompt_logprobs import PromptLogprob
from baton.router.text.detokenizer import Detokenizer
from baton.router.tools.parser import Part
from baton.rpc import worker_pb2 as pb

_DONE = b"data: [DONE]\n\n"
_TEXT = "\0"
"""Stands for the text in a template."""


@dataclass(slots=True)
class ChoicePart:
    """A part of one choice: one delta, or all deltas so far."""

    texts: list[str]
    token_ids: list[int]
    logprobs: list[Any]
    """Results of `_logprob`; empty unless the client asked for logprobs."""
    last: Delta
    parts: list[Part]
    """The texts, divided into reasoning, content and calls."""


class ChoicesBuilder:
    """Builds completions. `id` and `created` are the same in all chunks of a stream."""

    kind: str  # "object" of a whole response
    chunk_kind: str  # "object" of a chunk
    prefix: str  # of the response's id

    def __init__(self, request: ActiveRequest) -> None:
        self._request = request
        self._entries = LogprobEntries(request, kept=not request.options.stream)
        self._token_ids = request.options.return_token_ids
        model, now = request.model, int(time.time())  # noqa: TID251 - a timestamp
        self._frame = {"id": f"{self.prefix}{request.entry.name}", "created": now, "model": model}
        self._logprobs = request.options.logprobs_wanted is not None
        self._generates = request.options.max_tokens_wanted != 0
        self._prompt_top = request.options.prompt_logprobs
        # Nothing comes before the first token, so it has no probability.
        self._prompt_logprobs: list[list[msgspec.Raw | None]] = [[None] for _ in request.choices]
        forced = request.services.config.enable_force_include_usage
        self._usage_at_the_end = forced or request.options.usage_at_the_end
        self._usage_in_each_chunk = forced or request.options.usage_in_each_chunk
        self._parts: dict[int, ChoicePart] = {}
        self._uniform = not (self._logprobs or self._token_ids or self._usage_in_each_chunk)
        self._opens = True  # the first chunk of a choice has more than the text of its token
        self._templates: dict[tuple[int, str], list[bytes]] = {}
        self._plain: dict[int, list[bytes]] = {}
        """The template of a choice whose texts are all content."""

    def add_prompt(self, index: int, part: pb.PromptLogprobs) -> None:
        """Adds log probabilities of the next tokens of the prompt, before the first delta of the choice."""
        prompt = self._request.prompts[index // self._request.options.n]
        of_tokens = zip(prompt[part.position :], prompt_logprobs.read(part), strict=False)
        for token_id, logprob in of_tokens:
            self._add_prompt_token(index, token_id, logprob)

    def _add_prompt_token(self, index: int, token_id: int, logprob: PromptLogprob) -> None:
        if self._prompt_top is not None:
            entry = self._entries.of_prompt(token_id, logprob, self._prompt_top)
            self._prompt_logprobs[index].append(entry)

    def add(self, index: int, delta: Delta) -> None:
        new, part = self._part(index, delta, self._said(index, delta)), self._parts.get(index)
        if part is None:
            self._parts[index] = new
            return
        part.texts += new.texts
        part.token_ids += new.token_ids
        part.logprobs += new.logprobs
        part.last = delta
        part.parts += new.parts

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(index, part, complete=True) for index, part in sorted(self._parts.items())]
        return {
            **self._frame,
            "object": self.kind,
            "choices": choices,
            "usage": self._usage(),
            **self._timing(),
            **self._extra(),
        }

    def events(self, index: int, delta: Delta) -> bytes:
        if delta.finish_reason is None and (pieces := self._plain.get(index)) is not None:
            return encode(delta.text).join(pieces)
        parts = self._said(index, delta)
        opens = self._opens and delta.first
        if self._uniform and not opens and delta.finish_reason is None:
            if not parts:
                return b""  # a parser hides the text, or holds it back
            if len(parts) == 1 and parts[0].kind != "call":
                return encode(parts[0].text).join(self._template(index, parts[0].kind, delta))
        chunk = self._chunk([self._choice(index, self._part(index, delta, parts), complete=False)])
        if delta.first:
            chunk |= self._extra()
        if self._usage_in_each_chunk:
            chunk["usage"] = self._usage()
        return event(chunk)

    def _template(self, index: int, kind: Literal["reasoning", "content"], delta: Delta) -> list[bytes]:
        """Returns the pieces between the texts in the event of a delta like this one.

        To build each event anew would take ten times as long."""
        pieces = self._templates.get((index, kind))
        if pieces is None:
            like = msgspec.structs.replace(delta, text=_TEXT)
            choice = self._choice(index, self._part(index, like, [Part(kind, _TEXT)]), complete=False)
            pieces = self._templates[index, kind] = event(self._chunk([choice])).split(encode(_TEXT))
            if self._is_plain(index):
                self._plain[index] = pieces
        return pieces

    def _is_plain(self, index: int) -> bool:
        """Whether all texts of the choice are content."""
        return True

    def end(self) -> bytes:
        """With the usage, if the client asked for it, as a chunk without a choice."""
        if not self._usage_at_the_end:
            return _DONE
        return event({**self._chunk([]), "usage": self._usage(), **self._timing()}) + _DONE

    def _timing(self) -> dict[str, Any]:
        timing = self._request.timing() if self._request.services.config.enable_per_request_metrics else None
        return {} if timing is None else {"metrics": timing}

    def failed(self, error: ApiError) -> bytes:
        return event(error.body) + _DONE

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._frame, "object": self.chunk_kind, "choices": choices}
        return chunk | {"usage": None} if self._usage_at_the_end else chunk

    def _part(self, index: int, delta: Delta, parts: list[Part]) -> ChoicePart:
        if not self._generates:
            return ChoicePart([], [], [], delta, parts)
        logprobs = [self._logprob(index, delta)] if self._logprobs else []
        return ChoicePart([delta.text], [delta.token_id], logprobs, delta, parts)

    def _said(self, index: int, delta: Delta) -> list[Part]:
        """Returns the parts that a delta adds to the output. A token that has no text yet, as of half a
        character, adds an empty part where nothing hides texts, as in vLLM: clients that measure gaps between
        tokens count chunks."""
        return [Part("content", delta.text)]

    def _extra(self) -> dict[str, Any]:
        """Returns further fields of a whole response, and of the first chunk of each choice."""
        return {}

    def _usage(self) -> dict[str, Any]:
        used = self._request.usage()
        more: dict[str, Any] = {"numerics_changed": True} if used.numerics_changed else {}
        if used.accepted_drafts or used.rejected_drafts:
            more["completion_tokens_details"] = {
                "accepted_prediction_tokens": used.accepted_drafts,
                "rejected_prediction_tokens": used.rejected_drafts,
            }
        of_prompt: dict[str, Any] = {"cached_tokens": used.cached_tokens}
        if used.image_tokens:
            of_prompt["multimodal_tokens"] = {"image": used.image_tokens}
        return {
            "prompt_tokens": used.prompt_tokens,
            "completion_tokens": used.completion_tokens,
            "total_tokens": used.prompt_tokens + used.completion_tokens,
            "prompt_tokens_details": of_prompt,
            **more,
            **used.weights,
        }

    def _choice(self, index: int, part: ChoicePart, *, complete: bool) -> dict[str, Any]:
        """Returns a choice of a response that is `complete`, or of a chunk."""
        raise NotImplementedError

    def _logprob(self, index: int, delta: Delta) -> Any:
        raise NotImplementedError


COLUMNS = "tokens", "token_logprobs", "top_logprobs", "text_offset"
Entry = tuple[str, float | None, msgspec.Raw | None, int]
"""Of one token: its value in each of the columns."""


class CompletionBuilder(ChoicesBuilder):
    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, request: ActiveRequest) -> None:
        super().__init__(request)
        options = request.options
        assert isinstance(options, CompletionOptions)
        self._echo = request.prepared.echoes
        self._opens = bool(self._echo)
        self._n = options.n
        lengths = map(len, self._echo) if self._echo else [0] * len(request.prompts)
        self._offsets = [length for length in lengths for _ in range(options.n)]
        tokenizer, skip = request.services.tokenizer, options.skip_special_tokens
        self._detokenizers = [Detokenizer(tokenizer, skip_special_tokens=skip) for _ in request.choices]
        self._echo_top = options.logprobs_wanted if options.echo else None
        self._echo_logprobs: list[list[Entry]] = [[] for _ in request.choices]
        if self._echo_top is not None:
            for index in range(len(request.choices)):
                self._add_echo(index, request.prompts[index // options.n][0], None)

    def _add_prompt_token(self, index: int, token_id: int, logprob: PromptLogprob) -> None:
        super()._add_prompt_token(index, token_id, logprob)
        if self._echo_top is not None:
            self._add_echo(index, token_id, logprob)

    def _add_echo(self, index: int, token_id: int, logprob: PromptLogprob | None) -> None:
        """Adds the next token of the prompt. The first one has no logprob."""
        echoed, of_prompt = self._echo_logprobs[index], index // self._n
        start = self._request.prepared.echo_starts[of_prompt][len(echoed)]
        first = not self._echo[of_prompt].startswith(self._entries.spelled(token_id), start)
        name = self._entries.name(token_id, first=first)
        if logprob is None:
            echoed.append((name, None, None, start))
        else:
            top = logprob.top[: self._echo_top]
            echoed.append((*self._entries.of_completion(token_id, logprob.logprob, top, name), start))

    def _choice(self, index: int, part: ChoicePart, *, complete: bool) -> dict[str, Any]:
        last, text = part.last, "".join(part.texts)
        first = complete or last.first
        if first and self._echo:
            text = self._echo[index // self._n] + text
        logprobs: dict[str, Any] | None = None
        if self._logprobs:
            entries = [*self._echo_logprobs[index], *part.logprobs] if first else part.logprobs
            columns = zip(*entries, strict=True) if entries else [()] * len(COLUMNS)
            logprobs = dict(zip(COLUMNS, columns, strict=True))
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": last.finish_reason,
            **last.stops,
        }
        if complete:
            scored = self._prompt_top is not None
            choice["prompt_logprobs"] = self._prompt_logprobs[index] if scored else None
            choice |= {"token_ids": None, "prompt_token_ids": None}
        if self._token_ids:
            choice["token_ids"] = part.token_ids
            if first:
                choice["prompt_token_ids"] = self._request.prompts[index // self._n].tolist()
        return choice

    def _logprob(self, index: int, delta: Delta) -> Entry:
        token_id, logprobs = delta.token_id, delta.logprobs or pb.TokenLogprobs()
        top, name = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True), self._entries.name(token_id)
        offset = self._offsets[index]  # where the token begins in the text of its choice
        self._offsets[index] += len(self._detokenizers[index].push(token_id))
        return *self._entries.of_completion(token_id, logprobs.logprob, top, name), offset


class ChatBuilder(ChoicesBuilder):
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, request: ActiveRequest) -> None:
        super().__init__(request)
        self._parsers = [OutputParser(request) for _ in request.choices]
        options = request.options
        assert isinstance(options, ChatOptions)
        self._functions = options.calls_functions
        self._called = "function_call" if self._functions else "tool_calls"

    def _extra(self) -> dict[str, Any]:
        ids = self._request.prompts[0].tolist() if self._token_ids else None
        if self._request.options.stream:
            return {"prompt_token_ids": ids} if self._token_ids else {}
        logprobs = None if self._prompt_top is None else self._prompt_logprobs[0]
        return {"prompt_token_ids": ids, "prompt_logprobs": logprobs}

    def _choice(self, index: int, part: ChoicePart, *, complete: bool) -> dict[str, Any]:
        if complete:
            return self._whole_choice(index, part)
        delta, parts = part.last, part.parts
        reasoning, content = _text(parts, "reasoning"), _text(parts, "content")
        calls = [_tool_call(part) for part in parts if part.kind == "call"]
        message: dict[str, Any] = {"role": "assistant"} if delta.first else {}
        message["reasoning_content"] = None  # clients of DeepSeek's API read it from each delta
        if reasoning:
            message |= _reasoning(reasoning)
        if content or not (calls or reasoning):
            message["content"] = content
        if calls:
            message |= self._calls(calls)
        return {"index": index, "delta": message, **self._rest(index, part)}

    def _whole_choice(self, index: int, part: ChoicePart) -> dict[str, Any]:
        parts = part.parts
        reasoning, content, calls = _text(parts, "reasoning"), _text(parts, "content"), _whole_calls(parts)
        if calls or reasoning:
            content = content or None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= _reasoning(reasoning or None)
        if calls:
            message |= self._calls(calls)
        return {"index": index, "message": message, "token_ids": None, **self._rest(index, part)}

    def _calls(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the member of a message with its calls. There is one call of a function at most."""
        return {"function_call": calls[0]["function"]} if self._functions else {"tool_calls": calls}

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._parsers[0].reasons:
            counted = sum(parser.text.reasoning_tokens for parser in self._parsers)
            details = usage.setdefault("completion_tokens_details", {})
            details["reasoning_tokens"] = counted
        return usage

    def _said(self, index: int, delta: Delta) -> list[Part]:
        if self._is_plain(index):
            return super()._said(index, delta)
        return self._parsers[index].push(delta.text, last=delta.finish_reason)

    def _is_plain(self, index: int) -> bool:
        return self._parsers[index].text.is_plain

    def _rest(self, index: int, part: ChoicePart) -> dict[str, Any]:
        last = part.last
        # OpenAI's and vLLM's reason is "stop" if the client named the tool.
        called = last.finish_reason == "stop" and self._parsers[index].chose_to_call
        fields: dict[str, Any] = {
            "logprobs": {"content": part.logprobs} if self._logprobs else None,
            "finish_reason": self._called if called else last.finish_reason,
            **last.stops,
        }
        if self._token_ids:
            fields["token_ids"] = part.token_ids
        return fields

    def _logprob(self, index: int, delta: Delta) -> msgspec.Raw:
        return self._entries.of_chat(delta)


def _reasoning(text: str | None) -> dict[str, str | None]:
    """Returns vLLM's field, and that of DeepSeek and SGLang. Most clients know one of them."""
    return {"reasoning": text, "reasoning_content": text}


def _text(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def _tool_call(part: Part) -> dict[str, Any]:
    """Returns one entry of a delta's `tool_calls`. The first part of a call has its id and name."""
    if part.name is None:
        return {"index": part.call, "function": {"arguments": part.text}}
    function = {"name": part.name, "arguments": part.text}
    return {"index": part.call, "id": part.call_id, "type": "function", "function": function}


def _whole_calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the calls of a whole response."""
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for part in parts:
        if part.name is not None:
            calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name}})
            arguments.append([])
        if part.kind == "call":
            arguments[-1].append(part.text)
    for call, texts in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(texts)
    return calls
