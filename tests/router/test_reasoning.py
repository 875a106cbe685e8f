"""Reasoning beside content: the parsers, responses and streams, and what workers get to enforce."""

import asyncio
import itertools
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from baton.router.api import responses
from baton.router.api.messages import Tool
from baton.router.api.structured import Structure
from baton.router.endpoints.builders.base import OutputParser
from baton.router.endpoints.builders.completions import ChatBuilder
from baton.router.errors import Unsupported
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from baton.router.tools.formats import FORMATS
from baton.router.tools.harmony import SPECIALS, after_analysis, in_final
from baton.router.tools.parser import Part
from baton.router.tools.reasoning import (
    REASONING,
    Beginning,
    ReasoningParser,
    reasoning_of,
    reasoning_parser,
)
from baton.rpc import worker_pb2 as pb
from tests.within import WITHIN

from .conftest import ANSWER, CALL, THINKING_TEMPLATE, THOUGHT, Cluster, make_cluster
from .test_tools import TOOLS
from .work import work

CHAT = [{"role": "user", "content": "What does <think> mean?"}]
SCHEMA = {"type": "object"}
QWEN, R1 = REASONING["qwen3"], REASONING["deepseek_r1"]

CASES: list[tuple[Beginning, str, str, str]] = [
    ("either", f"<think>{THOUGHT}</think>{ANSWER}", THOUGHT, ANSWER),
    ("either", "\n<think></think>", "", ""),
    ("either", "<think>never ends </thin", "never ends </thin", ""),
    ("either", " No <think>mark</think>", "", " No <think>mark</think>"),
    ("either", "<thi", "", "<thi"),
    ("answer", "<think>a</think>", "", "<think>a</think>"),
    ("reasoning", f"{THOUGHT}</think>{ANSWER}</think>", THOUGHT, f"{ANSWER}</think>"),
    ("either", " \n \n", "", " \n \n"),
    ("reasoning", "a</think>b", "a", "b"),
    ("reasoning", "\n</think>b", "\n", "b"),
    ("reasoning", "<think>\na</think>b", "\na", "b"),
    ("reasoning", "\n<th", "\n<th", ""),
    ("reasoning", " <b>a</think>", " <b>a", ""),
]


@pytest.mark.parametrize(("beginning", "text", "reasoning", "content"), CASES)
def test_every_split_of_a_text_gives_the_same_result(
    beginning: Beginning, text: str, reasoning: str, content: str
):
    splits = [[text], list(text)]
    for i, j in itertools.combinations_with_replacement(range(len(text) + 1), 2):
        splits.append([text[:i], text[i:j], text[j:]])
    for pieces in splits:
        parser = ReasoningParser(beginning)
        got = [*(parser.push(piece) for piece in pieces), parser.finish()]
        assert ("".join(p for p, _ in got), "".join(p for _, p in got)) == (reasoning, content)


KIMI = "<|tool_calls_section_begin|>"
HARMONY = (
    "<|channel|>analysis<|message|>Let me <see>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"  # noqa: E501
    "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{<|end|><|start|>assistant<|channel|>final"  # noqa: E501
    "<|message|>Done"
)
CALLS_OF_F = "<|channel|>commentary to=functions.{}<|message|>{}<|call|>"


@pytest.mark.parametrize(
    ("way", "text", "reasoning", "content"),
    [
        ("kimi_k2", f"<think>a</think>b{KIMI}", "a", f"b{KIMI}"),
        ("seed_oss", "<seed:think>a</think></seed:think>b", "a</think>", "b"),
        ("mistral", "[THINK]a</think>[/THINK]b", "a</think>", "b"),
        ("mistral", "[THIN", "", "[THIN"),
        ("gemma4", "<|channel>thought\na</think><channel|>b", "a</think>", "b"),
        ("gemma4", "<|channel>though", "", ""),
        ("gemma4", "<|channel>analysis<channel|>b", "analysis", "b"),
        ("gemma4", "<|chan", "", "<|chan"),
        ("step3p5", "<think>\na\n\n</think>\n\nb\n", "\na\n", "\nb\n"),
        ("step3p5", "<think>a</think>b", "a", "b"),
        ("step3p5", "<think>a\n\n</th", "a\n\n</th", ""),
        ("step3p5", "\na", "", "\na"),
        (
            "openai_gptoss",
            HARMONY,
            "Let me <see>.",
            f"I look. {CALLS_OF_F.format('now', '{}')}{CALLS_OF_F.format('f', '{')}Done",
        ),
        ("openai_gptoss", "no header <|end|>", "", "no header "),
        ("openai_gptoss", "<|channel|>analysis<|message|>cut <|e", "cut <|e", ""),
        ("openai_gptoss", "<|channel|>ana", "", "<|channel|>ana"),
        ("openai_gptoss", f"<|start|>{'x' * 300}<|message|>", "", f"<|start|>{'x' * 300}"),
    ],
)
def test_other_ways_to_reason(way: str, text: str, reasoning: str, content: str):
    for pieces in ([text], list(text), *([text[:i], text[i:]] for i in range(len(text)))):
        parser = reasoning_parser(REASONING[way].beginning, REASONING[way])
        got = [*(parser.push(piece) for piece in pieces), parser.finish()]
        assert ("".join(p for p, _ in got), "".join(p for _, p in got)) == (reasoning, content)


def test_an_answer_of_harmony_may_follow_an_analysis():
    # These bytes stand for special tokens, since no text has them.
    tokens = {special: 0xF8 + i for i, special in enumerate(SPECIALS)}

    def spell(special: str) -> str:
        return f"<[{tokens[special]}]>"

    def takes(grammar: str, text: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(grammar), log_level=0)
        pieces = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
        ids = [i for piece in pieces for i in ([tokens[piece]] if piece in tokens else piece.encode())]
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    structure = Structure("json_schema", '{"type": "integer"}', "response_format")
    grammar = in_final(structure, spell).text
    analysis = "<|channel|>analysis<|message|>I a < b.<|end|><|start|>assistant"
    for text in (f"{analysis}<|channel|>final<|message|>7", "<|channel|>final<|message|>7"):
        assert takes(grammar, text)
    assert not takes(grammar, f"{analysis}<|channel|>final<|message|>x")
    calls = after_analysis(
        FORMATS["openai"].grammar([Tool.model_validate(TOOLS[1])], many=True, spell=spell), spell
    )
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    assert takes(calls, f"{analysis}{call}")
    assert takes(calls, call)
    assert not takes(calls, "<|channel|>final<|message|>")
    with pytest.raises(Unsupported, match="use json or regex"):
        in_final(Structure("grammar", 'start: "a"', "structured_outputs.grammar"), spell)


@pytest.mark.all
@settings(max_examples=200)
@given(
    st.sampled_from(get_args(Beginning)),
    st.lists(
        st.sampled_from(["<think>", "</think>", "<", "</thi", "nk>", " ", "\n", "text", "é"]), max_size=12
    ),
    st.data(),
)
def test_hostile_output_loses_and_doubles_no_text(
    beginning: Beginning, parts: list[str], data: st.DataObject
):
    text = "".join(parts)
    cut = data.draw(st.integers(0, len(text)))
    found: list[tuple[str, str]] = []
    for pieces in ([text], list(text), [text[:cut], text[cut:]]):
        parser = ReasoningParser(beginning)
        got = [*(parser.push(piece) for piece in pieces), parser.finish()]
        found.append(("".join(p for p, _ in got), "".join(p for _, p in got)))
    assert found[0] == found[1] == found[2]
    [(reasoning, content), *_] = found
    begun = text.lstrip().removeprefix("<think>")
    assert text == content or any(
        said in (reasoning, f"{reasoning}</think>{content}") for said in (text, begun)
    ), "all but the marks, and space before the first one"
    assert beginning != "answer" or text == content
    assert "</think>" not in reasoning


@pytest.mark.cases(1)
@pytest.mark.parametrize("filler", [" ", "<", "x", "</think>"])
def test_long_output_takes_work_in_proportion_to_its_length(filler: str):
    def parse(count: int):
        parser = ReasoningParser("either")
        for _ in range(count):
            parser.push(filler)
        parser.finish()

    assert work(lambda: parse(3_000)) < 25 * work(lambda: parse(300))


def test_the_end_of_the_prompt_says_what_the_output_begins_with():
    assert QWEN.beginning_after("<|im_start|>assistant\n<think>\n") == "reasoning"
    assert QWEN.beginning_after("<think>\n\n</think>\n\n") == "answer"
    assert R1.beginning_after("</think>") == "answer"
    assert QWEN.beginning_after("<think><|im_end|>\n<|im_start|>assistant\n") == "either"
    assert R1.beginning_after("</think>x<｜Assistant｜>") == "reasoning"
    assert QWEN.continues_reasoning("<think>so far")
    assert not QWEN.continues_reasoning("<think>all</think> so")
    assert not QWEN.continues_reasoning("text")


def test_the_parser_follows_from_the_chat_template():
    assert reasoning_of(THINKING_TEMPLATE) == "qwen3"
    assert reasoning_of('{{- "<think>" + message.thinking + "</think>" -}}<|tool_call_start|>[') == "qwen3"
    assert reasoning_of("{{ c.split('</think>')[-1] }}<｜Assistant｜>") == "deepseek_r1"
    assert reasoning_of("{{ messages }}") is None
    for way, marks in {
        "openai_gptoss": "<|start|>assistant<|channel|>analysis<|message|>",
        "mistral": "[THINK]{{ block.thinking }}[/THINK]",
        "deepseek_v3": "{% if not thinking is defined %}<｜Assistant｜><think></think>",
        "kimi_k2": "<|im_middle|>{{ '<think></think>' }}",
        "glm45": "<think></think><arg_key>",
        "gemma4": "{{ '<|channel>thought\n' + text + '\n<channel|>' }}<|tool_call>",
        "qwen3": "]~b]ai\n<think>\n<minimax:tool_call>",
        "step3p5": "{{- '<|im_start|>tool_response\\n' }}{{- '<|im_start|>assistant\\n<think>\\n' }}",
        None: "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|>",  # Kimi-Linear
    }.items():
        assert reasoning_of(marks) == way


@pytest.mark.all
async def test_reasoning_of_responses_and_streams(thinking: Cluster):
    for more, expected in (
        ({}, {"content": ANSWER + CALL, "reasoning": THOUGHT}),
        ({"tools": TOOLS}, {"content": ANSWER.rstrip(), "reasoning": THOUGHT}),
        ({"include_reasoning": False}, {"content": ANSWER + CALL, "reasoning": None}),
        ({"max_tokens": 5}, {"content": None, "reasoning": THOUGHT[:8]}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"content": f"<think>{THOUGHT}</think>{ANSWER}{CALL}", "reasoning": None},
        ),
        ({"stream_reasoning": False}, {"content": ANSWER + CALL, "reasoning": THOUGHT}),
        ({"stream_reasoning": False, "max_tokens": 5}, {"content": None, "reasoning": THOUGHT[:8]}),
    ):
        body = {"messages": CHAT, **more}
        status, result = await thinking.post("/v1/chat/completions", **body)
        assert status == 200, result
        responses.ChatResponse.model_validate(result)
        message = result["choices"][0]["message"]
        assert {name: message[name] for name in expected} == expected, more
        assert ("tool_calls" in message) == ("tools" in more)
        counted = result["usage"]["completion_tokens_details"]["reasoning_tokens"]
        off = "chat_template_kwargs" in more
        thought = thinking.tokenizer.encode(THOUGHT, add_special_tokens=False)
        assert counted == (0 if off else 4 if "max_tokens" in more else len(thought)), more
        events = await thinking.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
        assert events.pop()["usage"]["completion_tokens_details"] == {"reasoning_tokens": counted}
        deltas = [event["choices"][0]["delta"] for event in events]
        joined = {name: "".join(d.get(name) or "" for d in deltas) or None for name in expected}
        assert joined == expected, more
        thoughts = [d["reasoning"] for d in deltas if "reasoning" in d]
        assert len(thoughts) <= 1 or more.get("stream_reasoning", True), "in one piece"
        for part in (message, *deltas):
            assert part.get("reasoning") == part["reasoning_content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 99}),
    ],
)
async def test_events_from_templates_are_those_that_are_built(
    thinking: Cluster, path: str, body: dict[str, Any]
):
    """With the usage in each of them, all are built, and tokens whose text is held back have one, too."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    built = (await thinking.events(path, **body, n=2, stream_options=options))[:-1]
    built = [event for event in built if has_more_than_usage(event)]
    filled = await thinking.events(path, **body, n=2)
    for event in built:
        del event["usage"]
    for event in (*built, *filled):
        del event["id"], event["created"]
        for call in event["choices"][0].get("delta", {}).get("tool_calls", []):
            call.pop("id", None)
    for index in range(2):
        of_choice = [[e for e in events if e["choices"][0]["index"] == index] for events in (built, filled)]
        assert of_choice[0] == of_choice[1]
        assert len(of_choice[1]) > 5


def has_more_than_usage(chunk: dict[str, Any]) -> bool:
    """Whether a chunk of a chat or a completion has a role, a text, a call or the reason of the end."""
    [choice] = chunk["choices"]
    said = choice.get("delta") or {"text": choice["text"]}
    return any(said.values()) or choice["finish_reason"] is not None


FORCED = {"tool_choice": "required", "parallel_tool_calls": False}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS, "stop": ["Rome", "a < c"]}),
        ("/v1/chat/completions", {"messages": CHAT, "tools": TOOLS, "include_reasoning": False, **FORCED}),
        ("/v1/chat/completions", {"messages": CHAT, "stream_reasoning": False, "n": 2}),
        ("/v1/responses", {"input": "Hello", "tools": [{"type": "function", **TOOLS[0]["function"]}]}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 99, "thinking": {"type": "adaptive"}}),
    ],
)
async def test_no_event_of_a_stream_is_empty(thinking: Cluster, path: str, body: dict[str, Any]):
    if path in ("/v1/responses", "/v1/messages"):
        deltas = [e["delta"] for e in await thinking.typed_events(path, **body) if "delta" in e["type"]]
        said = [[v for k, v in d.items() if k != "type"] if isinstance(d, dict) else [d] for d in deltas]
        assert len(said) > 5
        assert all(any(values) for values in said), deltas
        return
    events = await thinking.events(path, **body)
    assert len(events) > 5
    assert all(map(has_more_than_usage, events)), events


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 99}),
        ("/v1/chat/completions", {"messages": CHAT, "separate_reasoning": False}),
    ],
)
async def test_where_nothing_is_hidden_each_token_has_a_chunk(
    thinking: Cluster, path: str, body: dict[str, Any]
):
    """Clients that measure, as `vllm bench serve`, count chunks. The stop string holds texts back."""
    *events, last = await thinking.events(
        path, **body, stop=["<think>\n, and more"], stream_options={"include_usage": True}
    )
    assert len(events) == last["usage"]["completion_tokens"]
    assert not all(map(has_more_than_usage, events)), "no text was held back"


async def test_a_stream_whose_tokens_are_hidden_gets_keepalives(
    thinking: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """A proxy cuts a connection that is silent for a while, and reasoning may take minutes."""
    seconds = "baton.router.endpoints.http_writer.KEEPALIVE_SECONDS"
    monkeypatch.setattr(seconds, 3600.0)
    steps = [asyncio.Semaphore(1) for _ in thinking.workers]
    for worker, allowed in zip(thinking.workers, steps, strict=True):
        worker.steps = allowed
    body = {"messages": CHAT, "include_reasoning": False, "stream": True}
    async with thinking.http.post(thinking.url + "/v1/chat/completions", json=body) as response:
        assert b'"role"' in await response.content.readuntil(b"\n\n")
        monkeypatch.setattr(seconds, 0.0)  # the stream waits for a token, and no timer will wake it
        for allowed in steps:
            allowed.release()
        async with asyncio.timeout(WITHIN):
            assert await response.content.readuntil(b"\n\n") == b": waiting\n\n"
        monkeypatch.setattr(seconds, 3600.0)
        for allowed in steps * len(thinking.output_ids):
            allowed.release()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_content_with_reasoning(thinking: Cluster):
    body = {"messages": CHAT, "separate_reasoning": False}
    status, result = await thinking.post("/v1/chat/completions", **body)
    assert (status, result["choices"][0]["message"]["reasoning"]) == (200, None)
    events = await thinking.events("/v1/chat/completions", **body)
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert result["choices"][0]["message"]["content"] == streamed == f"<think>{THOUGHT}</think>{ANSWER}{CALL}"


async def test_a_whole_response_is_parsed_while_its_tokens_come(
    thinking: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """To parse a long answer at its end would block the event loop."""
    push, whole = OutputParser.push, ChatBuilder.whole
    pushed: list[str] = []

    def counted(self: OutputParser, text: str, *, last: str | None) -> list[Part]:
        pushed.append(text)
        return push(self, text, last=last)

    def at_the_end(self: ChatBuilder) -> dict[str, Any]:
        tokens, result = len(pushed), whole(self)
        assert len(pushed) == tokens == result["usage"]["completion_tokens"]
        return result

    monkeypatch.setattr(OutputParser, "push", counted)
    monkeypatch.setattr(ChatBuilder, "whole", at_the_end)
    status, result = await thinking.post("/v1/chat/completions", messages=CHAT, tools=TOOLS)
    assert status == 200
    assert result["choices"][0]["message"]["reasoning"] == THOUGHT


async def test_workers_learn_where_the_structure_starts(thinking: Cluster):
    async def sampling(**body: Any) -> pb.SamplingParams:
        status, result = await thinking.post("/v1/chat/completions", messages=CHAT, max_tokens=9, **body)
        assert status == 200, result
        sent = thinking.prefills[0].submitted[-1].prefill.request.sampling
        assert sent == thinking.decodes[0].submitted[-1].decode.request.sampling
        return sent

    start, end = map(thinking.tokenizer.token_id, ("<think>", "</think>"))
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    both = pb.Reasoning(start_id=start, end_id=end)
    assert (await sampling(response_format=schema)).reasoning == both
    assert (await sampling(tools=TOOLS, tool_choice="required")).reasoning == both
    limited = await sampling(thinking_token_budget=0)
    assert limited.reasoning == pb.Reasoning(start_id=start, end_id=end, budget=0)
    for body in ({}, {"response_format": schema, **off}, {"thinking_token_budget": -1}):
        assert not (await sampling(**body)).HasField("reasoning")
    continued = [*CHAT, {"role": "assistant", "content": "<think>I"}]
    final = {"messages": continued, "continue_final_message": True, "max_tokens": 3}
    status, result = await thinking.post("/v1/chat/completions", **final, response_format=schema)
    assert status == 200, result
    assert thinking.prefills[0].submitted[-1].prefill.request.sampling.reasoning == pb.Reasoning(end_id=end)


async def test_reasoning_of_earlier_messages_reaches_the_template(thinking: Cluster):
    for name in ("reasoning", "reasoning_content"):
        messages = [*CHAT, {"role": "assistant", "content": "b", name: "aa"}, *CHAT]
        _, result = await thinking.post("/tokenize", messages=messages)
        assert "<think>aa</think>b" in thinking.tokenizer.decode(result["tokens"], skip_special_tokens=False)


async def test_a_model_that_is_not_known_to_reason(cluster: Cluster):
    body = {"messages": CHAT, "max_tokens": 3}
    status, result = await cluster.post("/v1/chat/completions", **body, thinking_token_budget=5)
    assert (status, result["error"]["param"]) == (400, "thinking_token_budget")
    assert "--reasoning-parser" in result["error"]["message"]
    _, result = await cluster.post("/v1/chat/completions", **body)
    events = await cluster.events("/v1/chat/completions", **body)
    for part in (result["choices"][0]["message"], *(event["choices"][0]["delta"] for event in events)):
        assert part["reasoning_content"] is None


async def test_a_model_that_reasons_in_messages_has_no_budget(small_directory: Path, tmp_path: Path):
    """No single token ends the reasoning of gpt-oss. Clients of /v1/messages send a budget to each model."""
    tokenizer = Tokenizer.from_file(str(small_directory / "tokenizer.json"))
    tokenizer.add_special_tokens([*SPECIALS])
    (tmp_path / "model").mkdir()
    for file in small_directory.iterdir():
        (tmp_path / "model" / file.name).symlink_to(file)
    (tmp_path / "model" / "tokenizer.json").unlink()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    harmony = load_tokenizer(str(tmp_path / "model"), reasoning_parser="openai_gptoss")
    text = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    async with make_cluster(harmony, tmp_path, text=text) as cluster:
        body = {"messages": CHAT, "max_tokens": 99}
        status, result = await cluster.post("/v1/chat/completions", **body, thinking_token_budget=5)
        assert (status, result["error"]["param"]) == (400, "thinking_token_budget")
        assert "no single token ends" in result["error"]["message"]
        assert "use reasoning_effort" in result["error"]["message"]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        status, result = await cluster.post("/v1/messages", **body, thinking=thinking)
        assert status == 200, result
        assert [part["type"] for part in result["content"]] == ["thinking", "text"]
        assert not cluster.sent.sampling.HasField("reasoning")


@pytest.mark.all
def test_the_flag_overrides_the_template(thinking_path: Path, small_directory: Path):
    for flag, expected in (("none", None), ("deepseek_r1", "deepseek_r1")):
        assert load_tokenizer(str(thinking_path), reasoning_parser=flag).reasoning_parser == expected
    with pytest.raises(ValueError, match="--reasoning-parser qwen3: this model has no token </think>"):
        load_tokenizer(str(small_directory), reasoning_parser="qwen3")


def test_a_child_process_gets_the_parser(thinking_tokenizer: ModelTokenizer):
    restored = ModelTokenizer.restored(thinking_tokenizer.state)
    assert restored.reasoning_parser == "qwen3"
