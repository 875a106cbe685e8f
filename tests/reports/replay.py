"""Writes a small model, and sends requests to a real router whose workers write a given text."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.router.api.messages import Tool
from baton.router.text.tokenizer import load_tokenizer
from baton.router.tools.formats import FORMATS
from baton.router.tools.output import TextParser
from baton.router.tools.reasoning import REASONING
from tests.router.conftest import Cluster, make_cluster

TAGS = "<think> </think> <tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>"
MARKS = (
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_end|> "
    "<|tool_call_argument_begin|> <|channel|> <|message|> <|start|> <|end|> <|call|> <|return|> "
    "<|constrain|> [TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|>"
)
TEMPLATE = """
{%- if tools %}{{ tools|tojson }}
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BURSTS = 1, 1000
"""Tokens in each message of a worker: a stream must not depend on it."""


class Call(NamedTuple):
    name: str
    arguments: Any
    """The parsed JSON. A string: it is no JSON."""


class Answer(NamedTuple):
    """What a client gets, in the same form for each endpoint and for streams."""

    content: str
    reasoning: str
    calls: list[Call]
    finish: str
    """The reason of a chat: "stop", "tool_calls" or "length"."""


def write_model(at: Path, template: Any = TEMPLATE, **config: Any) -> Path:
    """Writes a model to `at`: its tokens are the single bytes, the marks and the tags. `config`: further
    fields of tokenizer_config.json."""
    at.mkdir(exist_ok=True)
    names = ["<unk>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    made.add_special_tokens([AddedToken(t, normalized=False) for t in names[:3] + MARKS.split()])
    made.add_tokens([AddedToken(t, normalized=False) for t in TAGS.split()])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(at / "tokenizer.json"))
    (at / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    described = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template, **config}
    (at / "tokenizer_config.json").write_text(json.dumps(described))
    return at


@contextlib.asynccontextmanager
async def replaying(
    at: Path, says: str = "ok", template: Any = TEMPLATE, **flags: Any
) -> AsyncIterator[Cluster]:
    """A router whose workers write `says`, which `say` changes.

    `at`: an empty directory. `flags`: those of `load_tokenizer`.
    """
    tokenizer = load_tokenizer(str(write_model(at / "model", template)), **flags)
    async with make_cluster(tokenizer, at, text=says) as made:
        for worker in made.workers:
            worker.transfer = _at_once
        yield made
        await made.idle()


async def _at_once(prefill_id: bytes) -> None:
    """KV need not wait until the router has a first token, which a burst holds back."""


def say(made: Cluster, text: str, burst: int = 1) -> None:
    """Lets the workers write `text`, with `burst` tokens in a message."""
    made.output_ids[:] = [*made.tokenizer.encode(text, add_special_tokens=False), 2]
    for worker in made.workers:
        worker.burst = burst


async def ask(made: Cluster, path: str, *, stream: bool, **body: Any) -> Answer:
    """Sends a request for one choice that must succeed."""
    body = {"model": "fake", **body}
    if not stream:
        status, whole = await made.post(path, **body)
        assert status == 200, whole
        return answer_of(path, [whole], stream=False)
    events = made.events if path == "/v1/chat/completions" else made.typed_events
    return answer_of(path, await events(path, **body), stream=True)


def answer_of(path: str, events: list[dict[str, Any]], *, stream: bool) -> Answer:
    """Joins the events of an answer; without a stream, its only JSON."""
    if stream and path == "/v1/chat/completions":
        return _of_chunks(events)
    whole = events[-1]
    if stream:
        whole = whole["response"] if path == "/v1/responses" else _message_of(events)
    return {"/v1/responses": _of_response, "/v1/messages": _of_message}.get(path, _of_chat)(whole)


def _parsed(arguments: str) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(arguments)
    return arguments


def _of_chat(whole: dict[str, Any]) -> Answer:
    [choice] = whole["choices"]
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [Call(each["name"], _parsed(each["arguments"])) for each in functions]
    return Answer(message["content"] or "", message["reasoning"] or "", calls, choice["finish_reason"])


def _of_chunks(chunks: list[dict[str, Any]]) -> Answer:
    content = reasoning = reason = ""
    calls: list[tuple[str, str]] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(calls):
                calls.append((part["function"]["name"], ""))
            name, arguments = calls[part["index"]]
            calls[part["index"]] = name, arguments + (part["function"].get("arguments") or "")
        reason = choice["finish_reason"] or reason
    return Answer(content, reasoning, [Call(name, _parsed(arguments)) for name, arguments in calls], reason)


def _of_response(whole: dict[str, Any]) -> Answer:
    items: Iterable[dict[str, Any]] = whole["output"]
    texts = {"message": "", "reasoning": ""}
    calls = []
    for item in items:
        if item["type"] == "function_call":
            calls.append(Call(item["name"], _parsed(item["arguments"])))
        else:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    finish = "tool_calls" if calls else "stop"
    return Answer(
        texts["message"], texts["reasoning"], calls, finish if whole["status"] == "completed" else "length"
    )


def _message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the events of a streamed message of /v1/messages."""
    blocks: list[dict[str, Any]] = []
    whole: dict[str, Any] = {"content": blocks}
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                for field in ("text", "thinking"):
                    if field in delta:
                        block[field] += delta[field]
                block["json"] += delta.get("partial_json", "")
            case "content_block_stop" if blocks[event["index"]]["type"] == "tool_use":
                blocks[event["index"]]["input"] = _parsed(blocks[event["index"]]["json"])
            case "message_delta":
                whole["stop_reason"] = event["delta"]["stop_reason"]
    return whole


def _of_message(whole: dict[str, Any]) -> Answer:
    texts = {"text": "", "thinking": ""}
    calls = []
    for block in whole["content"]:
        if block["type"] == "tool_use":
            calls.append(Call(block["name"], block["input"]))
        else:
            texts[block["type"]] += block[block["type"]]
    reasons = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
    return Answer(texts["text"], texts["thinking"], calls, reasons[whole["stop_reason"]])


def splits(text: str) -> Iterator[list[str]]:
    """The text as a whole, as single characters, and as two pieces, which are cut at each fifth place."""
    yield [text]
    yield list(text)
    for i in range(1, len(text), 5):
        yield [text[:i], text[i:]]


def parse(parsers: tuple[str, str], pieces: list[str], tools: Sequence[Tool]) -> Answer:
    """Returns what the parsers of calls and of reasoning find in an output that the model has ended.

    Fails if arguments of a call are no JSON.
    """
    calls, reasoning = parsers
    way = REASONING.get(reasoning)
    parser = TextParser("answer" if way is None else "reasoning", way, FORMATS[calls], tools)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish(ended=True)
    said = {kind: "".join(p.text for p in parts if p.kind == kind) for kind in ("content", "reasoning")}
    names = [part.name for part in parts if part.name is not None]
    texts = ["".join(p.text for p in parts if p.kind == "call" and p.call == i) for i in range(len(names))]
    found = [Call(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]
    return Answer(**said, calls=found, finish="tool_calls" if found else "stop")
