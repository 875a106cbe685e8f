"""Makes token ids of the bytes of a client. Pure. The largest bodies take seconds."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from baton.router.api.anthropic.body import CountTokensBody, MessagesBody
from baton.router.api.bodies import (
    ChatBody,
    ChatOptions,
    CompletionBody,
    CompletionOptions,
    DetokenizeBody,
    Options,
    RenderedBody,
    TokenizeBody,
    parse_message,
)
from baton.router.api.fields import MAX_IMAGES, pointer
from baton.router.api.jobs import output_room
from baton.router.api.messages import Message
from baton.router.api.openai_responses.body import ResponsesBody
from baton.router.api.openai_responses.tools import Called
from baton.router.api.queries import PageQuery
from baton.router.api.sampling import Body
from baton.router.api.validation import parse
from baton.router.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Unsupported, about
from baton.router.preparation.demand import NO_PLACES, Question, question_of
from baton.router.preparation.images import decode_images, is_remote, place
from baton.router.preparation.input_items import input_items, peek
from baton.router.text.sealed import unsealed
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.tools.reasoning import Beginning
from baton.vision.images import Image

Raw = bytes | bytearray
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_CUT_TOKENS = 1024
MAX_BAD_WORD_TOKENS = 4096
"""Each choice of a request has them, on its way to a worker and there."""
Generated = Literal["chat", "completion", "responses", "messages", "invocation", "grpc"]
Converted = Literal["tokenize", "detokenize", "count_tokens", "input_tokens", "input_items", "peek"]
Kind = Generated | Converted
"""What the bytes are: the JSON body of an HTTP endpoint, or the message of a gRPC call.

An invocation is a chat or a completion. A peek is the first look at a body of /v1/responses. `input_items`
has the JSON of a `PageQuery` in place of a body.
"""

BODIES: dict[Kind, type[Body]] = {
    "chat": ChatBody,
    "completion": CompletionBody,
    "responses": ResponsesBody,
    "messages": MessagesBody,
    "tokenize": TokenizeBody,
    "detokenize": DetokenizeBody,
    "count_tokens": CountTokensBody,
    "input_tokens": ResponsesBody,
}


@dataclass(frozen=True, slots=True)
class Served:
    """The model that a router serves, and its context length."""

    model_names: tuple[str, ...]
    context: int
    """Tokens of prompt and output together."""
    max_images: int = MAX_IMAGES
    """Of a request."""
    seal_key: bytes = field(default=b"", repr=False)
    """That of `router.text.sealed`."""


if TYPE_CHECKING:
    Ids = array[int]
else:  # as msgspec reads it
    Ids = array
assert array("I").itemsize == 4


class Prepared(msgspec.Struct, forbid_unknown_fields=True):
    """A validated request to generate."""

    options: Options
    """The body without its prompt."""
    prompt_field: str
    prompts: list[Ids]
    """Token ids, four bytes each: in a list they take nine times as much."""
    echoes: list[str] = []
    """The text that the choices of each prompt begin with. Empty unless the client asked for `echo`."""
    echo_starts: list[list[int]] = []
    """Where each token of a prompt begins in that text. Empty unless it also asked for `logprobs`."""
    beginning: Beginning = "answer"
    """Whether the outputs begin with reasoning."""
    repeated: bytes = b""
    """The fields of /v1/responses that the response repeats, as a JSON object."""
    called: dict[str, Called] = {}
    """What calls of functions are to a client of /v1/responses, by the functions' names."""
    unenforced: list[str] = []
    """JSON pointers to the fields that have no effect on what workers enforce."""
    seals_reasoning: bool = False
    """The client gets the reasoning in a form that only the cluster reads."""
    marks_cache: bool = False
    """The client says where the prompt is to be cached, and expects a count of what was new there."""
    images: list[list[Image[memoryview]]] = []
    """Those of each prompt, in order. Empty: there are none."""
    pixel_bytes: list[int] = []
    """Of each image, if the pixels are beside this."""
    bad_words: list[Ids] = []
    """Token ids of each of `bad_words`, at the start of a text and after a space, as in vLLM."""
    question: Question | None = None
    """What the output must be. None: any text."""


class _Invocation(msgspec.Struct):
    """A look at a field of a body, before it is validated. `Raw` skips over the value."""

    messages: msgspec.Raw = msgspec.Raw()


_invocation = msgspec.json.Decoder(_Invocation).decode


def kind_of(raw: Raw) -> Literal["chat", "completion"]:
    """A body with messages is a chat. All others are completions, which refuse what is not valid."""
    try:
        return "chat" if bytes(_invocation(raw).messages) else "completion"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "completion"


class NeedsChild(Exception):
    """A body has images, which only a child process decodes."""


class NeedsFiles(Exception):
    """A body names images by URL. Once their files are known, the body is prepared again."""

    def __init__(self, field: str, urls: list[str]) -> None:
        """`field`: that with the images. `urls`: of http or https, each once."""
        super().__init__(field, urls)
        self.field = field
        self.urls = urls


@dataclass(frozen=True, slots=True)
class Preparation:
    """Makes token ids of bodies. Pure."""

    tokenizer: ModelTokenizer
    served: Served
    history: bytes = b""
    """The earlier inputs and outputs of a request to /v1/responses, as a JSON array of inputs."""
    salt: bytes = b""
    """Of the client's API key."""
    files: Mapping[str, bytes] = field(default_factory=lambda: NO_FILES)
    """Those that the router has fetched, by URL."""
    in_child: bool = True
    """This process may decode images."""

    def prepare(self, kind: Kind, raw: Raw) -> Prepared | bytes:
        """Returns a request to generate, or the JSON response of an endpoint that only counts or converts.
        For a peek returns a `Peek` as MessagePack.

        Raises InvalidRequest and ModelNotFound. Raises NeedsFiles for a body with URLs that are not in
        `files`. Without `in_child`, raises NeedsChild for a body with images.
        """
        if kind == "peek":
            return msgspec.msgpack.encode(peek(raw))
        if kind == "input_items":
            return input_items(self.history, PageQuery.model_validate_json(raw))
        if kind == "invocation":
            kind = kind_of(raw)
        body = parse_message(bytes(raw)) if kind == "grpc" else parse(BODIES[kind], raw)
        if body.model not in (None, *self.served.model_names):
            raise ModelNotFound.of(body.model, self.served.model_names)
        prepared = self._of_body(body, kind)
        if kind == "messages":
            assert isinstance(prepared, Prepared)
            prepared.marks_cache = b'"cache_control"' in raw
        return prepared

    def _of_body(self, body: Body, kind: Kind) -> Prepared | bytes:
        match body:
            case ChatBody():
                prepared = self._chat(body)
            case ResponsesBody():
                prepared = self._responses(body, kind)
            case MessagesBody():
                prepared = self._chat(*body.chat(self._unsealed))
                prepared.seals_reasoning = body.seals_reasoning
            case CompletionBody():
                prepared = self._completion(body)
            case TokenizeBody():
                prepared = self._tokenize(body)
            case DetokenizeBody():
                prepared = self._detokenize(body)
            case CountTokensBody():
                chat, _ = body.chat(self._unsealed)
                prepared = self._count_tokens(chat)
            case _:
                raise AssertionError(body)
        return prepared

    @property
    def context(self) -> int:
        return self.served.context

    def _unsealed(self, signature: str) -> str:
        return unsealed(signature, self.served.seal_key)

    def _responses(self, body: ResponsesBody, kind: Kind) -> Prepared | bytes:
        chat, called = body.chat(self.history, self._unsealed)
        if kind == "input_tokens":
            return self._count_tokens(chat, {"object": "response.input_tokens"})
        may_call = (called[tool.function.name] for tool in chat.callable_tools)
        prepared = self._chat(chat, {name: call.field for name, call in called.items()})
        prepared.repeated, prepared.called = body.repeated, called
        prepared.unenforced = [pointer(call.field) for call in may_call if not call.enforced]
        prepared.seals_reasoning = body.seals_reasoning
        return prepared

    def _chat(self, body: ChatBody, places: Mapping[str, str] = NO_PLACES) -> Prepared:
        """`places`: as of `question_of`."""
        field = body.prompt_field
        if len(body.messages) > self.context:
            count = len(body.messages)
            raise ContextLengthExceeded.of_prompt(field, count, "messages", self.context, self.context)
        messages = self._readable(body.messages)
        images = self._images(messages, field)
        text = self._rendered(body, messages)
        encode = partial(self.tokenizer.chat_encoder.encode, scope=(self.salt, body.cache_salt))
        if body.add_special_tokens:
            encode = self.tokenizer.encode
        if images and body.truncate_prompt_tokens is not None:
            text = "truncate_prompt_tokens is not supported: the messages have images"
            raise Unsupported(text, param="truncate_prompt_tokens")
        with_places = self.tokenizer.with_places(text) if images else text
        prompt = self._encoded(with_places, body, encode)
        prompt, placed = self._placed(prompt, images, field)
        if placed:
            output_room(len(prompt), field, self.context)
        way = self.tokenizer.reasoning
        if body.must_keep_budget and body.reasoning_budget is not None and (way is None or way.in_messages):
            reason = "this model's way to reason is unknown, see --reasoning-parser"
            if way is not None:
                effort = body.named("reasoning_effort")
                reason = f"no single token ends the reasoning of this model; use {effort}"
            budget = body.named("thinking_token_budget")
            raise Unsupported(f"{budget} is not supported: {reason}", param=budget)
        beginning: Beginning = "answer"
        if way is not None:
            if not body.continue_final_message:
                beginning = way.beginning_after(text)
            elif isinstance(last := body.messages[-1].content, str) and way.continues_reasoning(last):
                beginning = "reasoning"
        return Prepared(
            body.without_prompt(),
            field,
            [array("I", prompt)],
            beginning=beginning,
            images=[placed] if placed else [],
            bad_words=self._bad_words(body),
            question=question_of(body, self.tokenizer, places),
        )

    def _readable(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns messages in which a text stands for each image that is the result of a call, if the model
        takes no images. The client cannot know what a tool returns, and each later turn would be refused."""
        if self.tokenizer.images is not None or not any(message.images for message in messages):
            return messages
        return [message.without_images() if message.role == "tool" else message for message in messages]

    def _images(self, messages: Sequence[Message], field: str) -> list[Image[memoryview]]:
        """The images of a chat, in this field. Raises InvalidRequest for one that is broken, NeedsChild and
        NeedsFiles."""
        images = [image for message in messages for image in message.images]
        if not images:
            return []
        if self.tokenizer.images is None:
            text = "parts of type 'image_url' are not supported: this model takes no images"
            raise Unsupported.at(field, text)
        if len(images) > (most := self.served.max_images):
            raise InvalidRequest.at(field, f"the request has {len(images)} images, more than {most}")
        if not self.in_child:
            raise NeedsChild
        urls = dict.fromkeys(image.url for image in images if is_remote(image.url))
        if missing := [url for url in urls if url not in self.files]:
            raise NeedsFiles(field, missing)
        with about(field):
            return decode_images(images, self.tokenizer.images, self.files)

    def _placed(
        self, token_ids: list[int], images: list[Image[memoryview]], field: str
    ) -> tuple[list[int], list[Image[memoryview]]]:
        settings = self.tokenizer.images
        if settings is None or not images:
            return token_ids, []
        with about(field):
            return place(token_ids, images, settings.token_id)

    def _completion(self, body: CompletionBody) -> Prepared:
        field = body.prompt_field
        prompts: list[Ids] = []
        for prompt in body.prompt:
            if isinstance(prompt, list):
                prompt = body.truncated(prompt, self.context)
                output_room(len(prompt), field, self.context)
                self._check_ids(prompt, field)
                prompts.append(array("I", prompt))
            else:
                encode = partial(self.tokenizer.encode, add_special_tokens=body.add_special_tokens)
                prompts.append(array("I", self._encoded(prompt, body, encode)))
        prepared = Prepared(
            body.without_prompt(),
            field,
            prompts,
            bad_words=self._bad_words(body),
            question=question_of(body, self.tokenizer),
        )
        if not body.echo:
            return prepared
        cut = body.truncate_prompt_tokens is not None and body.truncation_side != "right"
        for sent, prompt in zip(body.prompt, map(array.tolist, prompts), strict=True):
            is_text = isinstance(sent, str)
            echo = sent if is_text else self.tokenizer.decode(prompt, skip_special_tokens=False)
            prepared.echoes.append(echo)
            if body.logprobs is not None:
                special = is_text and body.add_special_tokens
                prepared.echo_starts.append(
                    self.tokenizer.starts(prompt, echo, add_special_tokens=special, from_end=is_text and cut)
                )
        return prepared

    def _bad_words(self, body: ChatOptions | CompletionOptions) -> list[Ids]:
        words = body.bad_words or ()
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        token_ids = [array("I", encode(space + word.lstrip())) for word in words for space in ("", " ")]
        if (count := sum(map(len, token_ids))) > MAX_BAD_WORD_TOKENS:
            text = f"{count} tokens in all, with and without a space before each word"
            raise InvalidRequest.at("bad_words", f"{text}, are more than {MAX_BAD_WORD_TOKENS}")
        return token_ids

    def _tokenize(self, body: TokenizeBody) -> bytes:
        messages = self._readable(body.messages or ())
        images = self._images(messages, "messages")
        if body.messages is not None:
            text, special = self._rendered(body, messages), bool(body.add_special_tokens)
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
        self._check_length(text, "prompt" if body.messages is None else "messages")
        tokens, _ = self._placed(self.tokenizer.encode(text, add_special_tokens=special), images, "messages")
        strings = self.tokenizer.entries(tokens) if body.return_token_strs else None
        response = {
            "count": len(tokens), "max_model_len": self.context, "tokens": tokens, "token_strs": strings,
        }  # fmt: skip
        return msgspec.json.encode(response)

    def _detokenize(self, body: DetokenizeBody) -> bytes:
        self._check_length(body.tokens, "tokens")
        self._check_ids(body.tokens, "tokens")
        text = self.tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return msgspec.json.encode({"prompt": text})

    def _count_tokens(self, body: ChatBody, more: dict[str, str] | None = None) -> bytes:
        messages, field = self._readable(body.messages), body.prompt_field
        images = self._images(messages, field)
        text = self._rendered(body, messages)
        self._check_length(text, field)
        tokens, _ = self._placed(self.tokenizer.encode(text, add_special_tokens=False), images, field)
        count = len(tokens)
        return msgspec.json.encode({**(more or {}), "input_tokens": count})

    def _check_length(self, text: Sequence[Any], field: str) -> None:
        """Raises ContextLengthExceeded for a text that is longer than any prompt. To tokenize takes 300 times
        the bytes of a text, so its length is checked before."""
        most = self.context * self.tokenizer.longest_token
        if len(text) > most:
            kind = "characters" if isinstance(text, str) else "tokens"
            raise ContextLengthExceeded.of_prompt(field, len(text), kind, most, self.context)

    def _check_ids(self, token_ids: list[int], field: str) -> None:
        size = self.tokenizer.vocab_size
        if (largest := max(token_ids, default=0)) >= size:
            text = f"token id {largest} is out of vocabulary, which has {size} tokens"
            raise InvalidRequest.at(field, text)

    def _rendered(self, body: RenderedBody, messages: Sequence[Message]) -> str:
        tools = body.offered_tools
        if not self.tokenizer.takes_tools:
            if tools and not (isinstance(body, ChatOptions) and body.must_call):
                reason = "this model's chat template does not support tools, so a call must be forced"
                raise Unsupported(f"tools is not supported: {reason} by tool_choice", param="tools")
            for i, message in enumerate(messages):
                if message.about_tools:
                    text = "this model's chat template does not support tool calls and their results"
                    # The messages of another form of a chat have other numbers.
                    raise Unsupported.at(body.names.get("messages", f"messages[{i}]"), text)
        if body.continue_final_message and (messages[-1].images or messages[-1].tool_calls):
            what = "images" if messages[-1].images else "tool_calls"
            text = f"the last message has {what}, and no text can follow them"
            raise InvalidRequest.at(body.named("continue_final_message"), text)
        try:
            template = self.tokenizer.chat_template
            return template.render(
                self._entries(messages, with_calls=template.shows_calls),
                [tool.for_template() for tool in tools if not tool.function.defer_loading],
                body.template_settings,
                add_generation_prompt=body.ends_with_generation_prompt,
                continue_final_message=body.continue_final_message,
            )
        except ValueError as error:
            raise InvalidRequest.at(body.named("messages"), str(error)) from error

    def _entries(self, messages: Sequence[Message], *, with_calls: bool) -> list[dict[str, Any]]:
        """Returns the messages as the chat template takes them. `with_calls`: it shows earlier calls.
        Otherwise, as in older templates of LFM 2, these are a part of the content."""
        entries, tool_format = [message.for_template() for message in messages], self.tokenizer.tool_format
        if tool_format is None:
            return entries
        for entry in entries:
            if "tool_call_id" in entry:
                entry["tool_call_id"] = tool_format.shown_id(entry["tool_call_id"])
            calls = entry.get("tool_calls", ())
            for call in calls:
                call["id"] = tool_format.shown_id(call["id"])
            if calls and not with_calls:
                called = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
                entry["content"] = tool_format.written.text(called) + entry["content"]
        return entries

    def _encoded(
        self, text: str, body: ChatOptions | CompletionOptions, encode: Callable[[str], list[int]]
    ) -> list[int]:
        """Returns the token ids of a prompt. Raises ContextLengthExceeded if it leaves no room for output."""
        field = body.prompt_field
        if body.truncate_prompt_tokens is None:
            self._check_length(text, field)
        else:
            # Beside these characters, tokens that are kept may depend on the word that is cut.
            most = (self.context + _CUT_TOKENS) * self.tokenizer.longest_token
            text = text[:most] if body.truncation_side == "right" else text[-most:]
        token_ids = body.truncated(encode(text), self.context)
        output_room(len(token_ids), field, self.context)
        return token_ids
