"""Turns text into tokens and tokens into text, for all models that a router can serve."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import msgspec
from tokenizers import Tokenizer

from baton.kv_names import vocabulary_fingerprint
from baton.router.text.chat import ChatEncoder, ChatTemplate, encode
from baton.router.text.model_files import context_length, images_of, locate, read_directory, read_gguf
from baton.router.tools.formats import FORMATS, format_of
from baton.router.tools.harmony import SPECIALS
from baton.router.tools.parser import ToolParser
from baton.router.tools.reasoning import REASONING, Way, reasoning_of
from baton.vision.images import ImageSettings


class ModelTokenizer:
    """A model's tokenizer and chat template. Shared by all requests.

    Attributes:
        max_model_len: context length of the model. Its workers may serve a shorter one.
        takes_tools: the chat template can describe tools.
        tool_format: the format of the model's tool calls. None: unknown.
        unread_format: the models whose format the chat template has, if no parser reads it.
        reasoning_parser: the name of the model's way to reason. None: reasoning is content.
        reasoning: this way, one of `REASONING`.
        images: how the model takes images. None: it takes none.
        chat_encoder: as `encode` without special tokens, in a tenth of the time if a text repeats turns.
        vocab_size: every token id is below it.
        longest_token: characters of the longest token.
        specials: the ids of special tokens that are no part of the text.
        whole_texts: the texts of tokens that are whole characters, as far as they were needed; and the same
            without special tokens.
        vocabulary_fingerprint: differs from a worker's if the same ids mean other text there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        max_model_len: int,
        tool_format: type[ToolParser] | None = None,
        reasoning_parser: str | None = None,
        images: ImageSettings | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.images = images
        self.chat_encoder = ChatEncoder(tokenizer)
        self.takes_tools = template is not None and template.takes_tools
        self.tool_format = tool_format
        source = None if template is None else template.state["source"]
        format_or_name = tool_format or format_of(source or "")
        self.unread_format = format_or_name if isinstance(format_or_name, str) else None
        self.reasoning_parser = reasoning_parser
        self.reasoning: Way | None = REASONING[reasoning_parser] if reasoning_parser is not None else None
        self._template = template
        self.max_model_len = max_model_len
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values())
        self.longest_token = max(map(len, vocabulary))
        self.vocabulary_fingerprint = vocabulary_fingerprint(vocabulary)
        self._spell, self._without_space = _speller(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: tuple[dict[int, str], dict[int, str]] = ({}, {})
        added = tokenizer.get_added_tokens_decoder()
        output_marks = {*tool_format.specials, *tool_format.tokens} if tool_format is not None else set()
        if self.reasoning is not None:
            output_marks |= {self.reasoning.start, self.reasoning.end}
            output_marks |= set(SPECIALS) if self.reasoning.in_messages else set()
        self.specials = frozenset(i for i, t in added.items() if t.special and t.content not in output_marks)
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}

    @property
    def info(self) -> dict[str, Any]:
        """What clients need to use the same tokenizer: its chat template and special tokens."""
        state = {} if self._template is None else self._template.state
        tokens = state.get("tokens", {})
        return {
            "chat_template": state.get("source"),
            "bos_token": tokens.get("bos_token"),
            "eos_token": tokens.get("eos_token"),
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": self.vocab_size,
            "model_max_length": self.max_model_len,
        }

    def format_of_calls(self, *, forced: bool) -> type[ToolParser] | None:
        """Returns the format of a request's tool calls. A grammar enforces forced calls, in any format."""
        return self.tool_format or (FORMATS["hermes"] if forced else None)

    @cached_property
    def state(self) -> bytes:
        """The bytes from which `restored` makes a copy in another process."""
        state = {
            "tokenizer": self._tokenizer.to_str(),
            "template": None if self._template is None else self._template.state,
            "max_model_len": self.max_model_len,
            "tool_format": None if self.tool_format is None else self.tool_format.name,
            "reasoning_parser": self.reasoning_parser,
            "images": None if self.images is None else asdict(self.images),
        }
        return json.dumps(state).encode()

    @classmethod
    def restored(cls, state: bytes) -> Self:
        """Returns a copy of the tokenizer with this `state`."""
        fields = json.loads(state)
        template, name, images = fields["template"], fields["tool_format"], fields["images"]
        return cls(
            Tokenizer.from_str(fields["tokenizer"]),
            None if template is None else ChatTemplate(**template),
            fields["max_model_len"],
            None if name is None else FORMATS[name],
            fields["reasoning_parser"],
            None if images is None else msgspec.convert(images, ImageSettings),
        )

    def with_places(self, text: str) -> str:
        """The text that a chat template has rendered, with one token for each image, and what the processor
        of the model writes around it."""
        if self.images is None or (around := self.images.around) is None:
            return text
        written, begin, image, end = (
            self._tokenizer.id_to_token(each) or ""
            for each in (around.written, around.begin, self.images.token_id, around.end)
        )
        return text.replace(written, f"{around.text}{begin}{image}{end}{around.text}") if written else text

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return encode(self._tokenizer, text, add_special_tokens=add_special_tokens)

    @property
    def chat_template(self) -> ChatTemplate:
        """Raises ValueError when the model has none."""
        if self._template is None:
            raise ValueError("this model has no chat template; use /v1/completions, or give --chat-template")
        return self._template

    def token_id(self, text: str) -> int | None:
        """Returns the token that is this text. None: there is none."""
        return self._tokenizer.token_to_id(text)

    def lark(self, text: str) -> str:
        """Returns the Lark expression for `text`: a token, if it is one, or else a string."""
        token_id = self.token_id(text)
        return json.dumps(text) if token_id is None else f"<[{token_id}]>"

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Invalid UTF-8 becomes U+FFFD."""
        visible = [t for t in token_ids if not (skip_special_tokens and t in self.specials)]
        return b"".join(self._spelled(visible)).decode("utf-8", "replace")

    def _spelled(self, token_ids: list[int]) -> Iterator[bytes]:
        """Yields the bytes of the tokens of a whole text."""
        for token_id in token_ids[:1]:
            yield self.first_bytes(token_id)
        yield from map(self.token_bytes, token_ids[1:])

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that `encode` adds before and after those of a text."""
        bare, with_specials = (
            self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True)
        )
        start = next((i for i in range(len(with_specials)) if with_specials[i : i + len(bare)] == bare), 0)
        return with_specials[:start], with_specials[start + len(bare) :]

    def starts(
        self, token_ids: list[int], text: str, *, add_special_tokens: bool, from_end: bool = False
    ) -> list[int]:
        """Returns where each token of a prompt begins in its text.

        Tokens that the text does not have, such as BOS, begin where the next one does. The prompt may be cut
        to the beginning of the text; `from_end`: to its end."""
        before, after = self._around if add_special_tokens else ([], [])
        begin = len(before) if token_ids[: len(before)] == before else 0
        end = len(token_ids) - len(after)
        end = end if token_ids[end:] == after else len(token_ids)
        text_ids, base, places = token_ids[begin:end], 0, [0]
        for spelled in ([*map(self.token_bytes, text_ids)], [*self._spelled(text_ids)]):
            utf8 = codecs.getincrementaldecoder("utf-8")("replace")
            places = list(accumulate((len(utf8.decode(each)) for each in spelled), initial=0))
            decoded = b"".join(spelled).decode("utf-8", "replace")
            if text.endswith(decoded) if from_end else text.startswith(decoded):
                base = len(text) - len(decoded) if from_end else 0
                break  # else the tokenizer changes the text, and places are about right
        count = len(token_ids) - end
        return [
            min(base + place, len(text)) for place in (*places[:1] * begin, *places, *places[-1:] * count)
        ][:-1]

    def entries(self, token_ids: list[int]) -> list[str | None]:
        """Returns the tokens as the vocabulary spells them, such as "Ġthe"."""
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token that others precede. They may end inside a character."""
        spelled = self._bytes.get(token_id)
        if spelled is None:
            spelled = self._added.get(token_id)
            if spelled is None:
                token = self._tokenizer.id_to_token(token_id)
                spelled = b"" if token is None else self._spell(token)
            self._bytes[token_id] = spelled
        return spelled

    def first_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token at the beginning of a text, where some decoders take a space away."""
        spelled = self.token_bytes(token_id)
        return spelled if token_id in self._added else self._without_space(spelled)


def load_tokenizer(
    model: str,
    *,
    revision: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    images: bool = True,
) -> ModelTokenizer:
    """Loads the tokenizer of a Hugging Face directory, a GGUF file or a hub id.

    The arguments are those of `RouterConfig`. `images`: whether requests may have some. Raises ValueError
    when a file is missing, unreadable or not supported.
    """
    of_model = locate(model, revision)
    path = of_model if tokenizer is None else locate(tokenizer, None, "--tokenizer")
    files = read_directory(path) if path.is_dir() else read_gguf(path)
    max_model_len = context_length(str(of_model), None)
    source, tool_use = files.chat_template, files.tool_use
    if chat_template is not None:
        try:
            source, tool_use = Path(chat_template).read_text(), None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat-template {chat_template} cannot be read: {error}") from error
    template = None if source is None else ChatTemplate(source, tool_use, files.special_tokens)
    format_or_name = FORMATS[tool_call_parser] if tool_call_parser else format_of(tool_use or source or "")
    tool_format = None if isinstance(format_or_name, str) else format_or_name
    reasoning = reasoning_parser or reasoning_of(source or "")
    if reasoning == "none":
        reasoning = None
    if reasoning is not None and files.tokenizer.token_to_id(end := REASONING[reasoning].end) is None:
        if reasoning_parser:
            raise ValueError(f"--reasoning-parser {reasoning_parser}: this model has no token {end}")
        reasoning = None
    settings = images_of(of_model) if images else None
    return ModelTokenizer(files.tokenizer, template, max_model_len, tool_format, reasoning, settings)


def _speller(tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], Callable[[bytes], bytes]]:
    """Returns a function from the name of an ordinary token to its bytes, and one from these to those that it
    has at the beginning of a text.

    Raises ValueError for an unknown decoder.
    """
    state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {"type": "none"}
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        table = _byte_alphabet()
        return lambda token: b"".join(table.get(c) or c.encode() for c in token), bytes
    if "Metaspace" in kinds:
        [step] = [step for step in steps if step["type"] == "Metaspace"]
        keeps = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
        return _spell_sentencepiece, bytes if keeps else lambda spelled: spelled.replace(b" ", b"")
    if {"Replace", "ByteFallback"} <= set(kinds):
        count = sum(step["start"] for step in steps if step["type"] == "Strip" and step["content"] == " ")
        return _spell_sentencepiece, partial(re.sub, rb"^ {0,%d}" % count, b"")
    raise ValueError(f"this model's tokenizer decodes with {' + '.join(kinds)}, which is not supported")


def _spell_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, bytes]:
    """Maps GPT-2's alphabet to bytes: printable bytes are themselves, the others are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    spelled = {chr(byte): bytes([byte]) for byte in printable}
    spelled |= {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(unprintable)}
    return spelled
