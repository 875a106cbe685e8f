"""Learns what a server is and accepts, from its list of models, `/tokenize`, and a few small streamed
requests.

The run works around what a server lacks, and says so in a note. Only a server that does not answer, or does
not speak the API, ends the run. The message says what to do.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import aiohttp
import msgspec

from baton.bench.load.target.answer import Answer, Failure, Record
from baton.bench.load.target.request import Dialect, Form, Target, exchange
from baton.bench.load.target.tokenization import WORDS, Composer, Segment, Tokenization

# From all extensions to none. The run uses the first one that the server accepts.
_DIALECTS = (
    Dialect(),
    Dialect(running_usage=False),
    Dialect(running_usage=False, ignore_eos=False),
    Dialect(usage=False, running_usage=False, ignore_eos=False),
)
_PROBE_TOKENS = 4
_PROBED_IDS = 8
_PARALLEL = 16
_CALIBRATION_WORDS = (64, 512)


class EndpointError(Exception):
    """Nothing can be measured at this endpoint. The message says what to do."""


class Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Model]


class _Tokenized(msgspec.Struct):
    count: int | None = None
    tokens: list[int] | None = None

    @property
    def total(self) -> int | None:
        return len(self.tokens) if self.count is None and self.tokens is not None else self.count


async def find_model(
    http: aiohttp.ClientSession, url: str, headers: Mapping[str, str], name: str | None
) -> Model:
    """The model to ask for: `name`, or the first that the server lists."""
    try:
        async with http.get(f"{url}/v1/models", headers=headers) as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as e:
        reason = str(e) or type(e).__name__
        raise EndpointError(
            f"--url {url}: no answer ({reason}). Start the server, or give the address where it listens."
        ) from e
    if status in (401, 403):
        raise EndpointError(
            f"--url {url}: {status}, the server wants a key. Give --api-key or set BATON_API_KEY."
        )
    try:
        models = msgspec.json.decode(body, type=_Models).data if status == 200 else []
    except msgspec.DecodeError:
        models = []
    if name is not None:
        model = next((m for m in models if m.id == name), None)
        if models and model is None:
            raise EndpointError(f"--model {name!r}: the server has {', '.join(m.id for m in models)}.")
        return model or Model(name)
    if not models:
        raise EndpointError(
            f"--url {url}: /v1/models answered {status} and lists no model. "
            "Give the address of an OpenAI-compatible server (without /v1), or name the model with --model."
        )
    return models[0]


async def find_dialect(http: aiohttp.ClientSession, target: Target) -> tuple[Target, list[str]]:
    """Returns `target` with the richest dialect that a streamed probe succeeded with, and notes for the
    report."""
    record = None
    for dialect in _DIALECTS:
        spoken = msgspec.structs.replace(target, dialect=dialect)
        record = await probe(http, spoken, "Say these words again: one two three four five.")
        if record.ok or record.failure is Failure.EMPTY:
            return spoken, _notes(spoken.dialect, record)
        # The server may refuse only the extension. Any other failure would come again.
        if record.failure is not Failure.HTTP or record.status not in (400, 404, 422):
            break
    assert record is not None
    hint = {
        401: "Give --api-key or set BATON_API_KEY.",
        403: "Give --api-key or set BATON_API_KEY.",
        404: "Is it OpenAI-compatible? Try --api chat or --api completions.",
        429: "The server is busy; try again when it is idle.",
    }.get(record.status, "Is it OpenAI-compatible, and does it stream? Try --api chat or --api completions.")
    raise EndpointError(
        f"a probe of {target.endpoint(0)} failed: {record.error_class}: {record.detail}. {hint}"
    )


def _notes(dialect: Dialect, record: Record) -> list[str]:
    """A server may ignore fields that it does not know. So only the answer shows what it supports."""
    notes = []
    counted = record.output_tokens is not None
    exact = dialect.ignore_eos and (not counted or record.output_tokens == _PROBE_TOKENS)
    if not exact:
        notes.append("the server does not honour ignore_eos: answers may be shorter than asked for")
    if not counted:
        notes.append("the server reports no usage: every chunk with text counts as one token")
    elif not record.tokens:
        notes.append(
            "the server has no running usage: the tokens of single chunks are not known, only their sum"
        )
    return notes


async def probe(http: aiohttp.ClientSession, target: Target, text: str) -> Record:
    """Sends one streamed request of a few tokens."""
    prompt = [{"role": "user", "content": text}] if target.api == "chat" else text
    return (await _asked(http, target, target.body(prompt, _PROBE_TOKENS))).record


async def _asked(http: aiohttp.ClientSession, target: Target, body: bytes) -> Answer:
    record = Record(index=0, intended=time.monotonic(), sent=0.0, asked_output=_PROBE_TOKENS)
    answer = Answer(record, keep=True)
    await exchange(http, target, body, answer)
    return answer


async def find_form(
    http: aiohttp.ClientSession,
    target: Target,
    tokenization: Tokenization,
    form: Form | None,
    *,
    turns: bool,
) -> tuple[Target, Tokenization, list[str]]:
    """The target and tokenization for prompts of token ids, and notes for the report.

    Args:
        form: None takes token ids if the server takes them, else text.
        turns: answers become part of prompts, so the server has to tell their ids.

    Raises EndpointError if the server does not take ids of a prompt.
    """
    if form == "text":
        return target, tokenization, []
    lacks = await _without_ids(http, target, tokenization, turns)
    if not lacks:
        return msgspec.structs.replace(target, form="ids"), tokenization.of_ids(), []
    if form == "ids":
        raise EndpointError(f"--advanced.prompts ids: {lacks}. Give --advanced.prompts text.")
    return target, tokenization, [f"prompts are text: {lacks}"]


async def _without_ids(
    http: aiohttp.ClientSession, target: Target, tokenization: Tokenization, turns: bool
) -> str:
    """Why there can be no prompts of token ids; "" if there can."""
    if target.api == "chat":
        return "messages of a chat have no token ids"
    if not tokenization.ids:
        return "the server has no /tokenize that tells the ids of words"
    spoken, numbers = msgspec.structs.replace(target, form="ids"), tokenization.ids[:_PROBED_IDS]
    body = spoken.body(",".join(map(str, numbers)), _PROBE_TOKENS, ids_back=turns)
    answer = await _asked(http, spoken, body)
    record = answer.record
    if not record.ok:
        return f"a probe with token ids failed: {record.error_class}: {record.detail}"
    if record.prompt_tokens not in (None, len(numbers)):
        return f"the server counts {record.prompt_tokens} tokens for {len(numbers)} token ids"
    if turns and len(answer.token_ids) != record.generated:
        return "the server does not tell the token ids of its answers"
    return ""


async def find_tokenization(http: aiohttp.ClientSession, target: Target) -> Tokenization:
    """Exact by `/tokenize` if the server has it, else estimated from usage."""
    return await _by_tokenize(http, target) or await _by_usage(http, target)


async def _by_tokenize(http: aiohttp.ClientSession, target: Target) -> Tokenization | None:
    """Keeps the words that add exactly one token in any position. Then checks whole prompts."""
    tokenized = _tokenizer(http, target)
    if (await tokenized("the")).total is None:
        return None
    twice = await asyncio.gather(*(tokenized(f"{w} {w}") for w in WORDS))
    thrice = await asyncio.gather(*(tokenized(f"{w} {w} {w}") for w in WORDS))
    counts = [
        (w, two, a, b)
        for w, two, three in zip(WORDS, twice, thrice, strict=True)
        if (a := two.total) is not None and (b := three.total) is not None
    ]
    # Other totals belong to words of several tokens, or of two tokens at the beginning of a prompt.
    usual = Counter(a for _, _, a, b in counts if b == a + 1).most_common(1)
    if not usual:
        return None
    total = usual[0][0]
    pairs = [(w, two) for w, two, a, b in counts if a == total and b == total + 1]
    if len(pairs) < 16:
        return None
    ids = tuple(two.tokens[-1] for _, two in pairs if two.tokens)
    tokenization = Tokenization(
        tuple(w for w, _ in pairs), 1.0, total - 2, "exact, by the server's /tokenize",
        ids if len({*ids}) == len(pairs) else (),
    )  # fmt: skip
    composer = Composer(tokenization)
    for i, length in enumerate((64, 333, 1000)):
        text = composer.compose([Segment((i,), length + tokenization.overhead)])
        if (await tokenized(text)).total != length + tokenization.overhead:
            return None
    return tokenization


def _tokenizer(
    http: aiohttp.ClientSession, target: Target
) -> Callable[[str], Coroutine[Any, Any, _Tokenized]]:
    """A function that returns the tokens of a prompt, chat template included. Without a total if the server
    has no /tokenize."""
    slots = asyncio.Semaphore(_PARALLEL)

    async def tokenized(text: str) -> _Tokenized:
        fields: dict[str, Any] = {"model": target.model}
        if target.api == "chat":
            fields |= {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
        else:
            fields |= {"prompt": text}
        url = f"{target.urls[0]}/tokenize"
        try:
            async with slots, http.post(url, json=fields, headers=target.headers) as response:
                body = await response.read() if response.status == 200 else b"{}"
            return msgspec.json.decode(body, type=_Tokenized)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            return _Tokenized()

    return tokenized


async def _by_usage(http: aiohttp.ClientSession, target: Target) -> Tokenization:
    plain = Tokenization(WORDS, 1.0, 0, "")
    composer = Composer(plain)

    async def count(words: int) -> int:
        record = await probe(http, target, composer.compose([Segment((words,), words)]))
        return record.prompt_tokens or 0

    few, many = _CALIBRATION_WORDS
    fewer, more = await count(few), await count(many)
    if not 0 < fewer < more:
        return msgspec.structs.replace(
            plain,
            statement="assumed: one token for each common English word, since the server reports no counts",
        )
    per_word = (more - fewer) / (many - few)
    overhead = max(0, round(fewer - few * per_word))
    return msgspec.structs.replace(
        plain,
        tokens_per_word=per_word,
        overhead=overhead,
        statement=f"approximate: {per_word:.3f} tokens a word and {overhead} more, from two probes' usage",
    )
