"""Validation of bodies: an error names the field and the reason, and unsupported fields are refused by
name."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.router.api.anthropic import body as anthropic
from baton.router.api.bodies import ChatBody, CompletionBody, TokenizeBody
from baton.router.api.messages import Message
from baton.router.api.openai_responses import body as openai
from baton.router.api.validation import CHAT, COMPLETION, GENERATION, REMEDIES, parse
from baton.router.errors import InvalidRequest, Unsupported

from .work import work

HELLO = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[type[ChatBody | CompletionBody], dict[str, Any]]] = [
    (ChatBody, {"messages": HELLO}),
    (CompletionBody, {"prompt": "x"}),
]


def called(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "123456789", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def refused(kind, body: dict[str, Any]) -> InvalidRequest:

    with pytest.raises(InvalidRequest) as refusal:
        parse(kind, json.dumps(body).encode())
    assert refusal.value.param is not None
    assert refusal.value.param.split("[")[0].split(".")[0] in refusal.value.message
    return refusal.value


def test_an_integer_may_have_a_point():
    """As in JSON schemas. Other numbers, and texts, stay what they are."""
    sent = {"prompt": [5.0, 6], "max_tokens": 7.0, "n": 1.0, "temperature": 2.0, "user": "8.0", "model": "é"}
    body = parse(CompletionBody, json.dumps(sent).encode())
    assert (body.prompt, body.max_tokens, body.n, body.temperature) == ([[5, 6]], 7, 1, 2.0)
    assert (body.user, body.model) == ("8.0", "é")
    with pytest.raises(InvalidRequest, match=r"max_tokens: input should be a valid integer, not 7\.5"):
        parse(CompletionBody, b'{"prompt": [5.0], "max_tokens": 7.5}')
    with pytest.raises(InvalidRequest, match="less than or equal to 128"):
        parse(CompletionBody, b'{"prompt": "x", "n": 1e15}')


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("stream_options", {"include_usage": True}, "needs stream"),
        ("prompt", [], "empty"),
        ("prompt", [[1], []], "empty"),
        ("prompt", 5, "string"),
        ("prompt", {"text": "x"}, "string"),
        ("prompt", [1, "a"], "string"),
        ("prompt", [-1], "token ids"),
        ("prompt", [2**32], "token ids"),
        ("prompt", ["x"] * 200, "128"),
        ("temperature", -1, "-1"),
        ("temperature", 1e39, "less than or equal to"),
        ("temperature", "hot", "number"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.5, "1.5"),
        ("top_k", -2, "-2"),
        ("min_p", 2, "2"),
        ("presence_penalty", 3, "3"),
        ("repetition_penalty", 0, "0"),
        ("repetition_penalty", 1e-46, "greater than or equal to"),
        ("n", 0, "0"),
        ("n", 1.5, "integer"),
        ("n", "2", "integer"),
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -1, "-1"),
        ("max_tokens", 10.5, "integer"),
        ("max_tokens", True, "integer"),
        ("seed", 2**65, "36893488147419103232"),
        ("stop", 5, "string"),
        ("stop", False, "string"),
        ("stop", [""], "1 to 1024"),
        ("stop", ["x"] * 65, "64"),
        ("stop_token_ids", [-1], "-1"),
        ("logit_bias", {"5": 101}, "101"),
        ("logit_bias", [1], "object"),
        ("logprobs", 21, "21"),
        ("stream", "perhaps", "boolean"),
        ("stream_options", 5, "object"),
        ("user", 5, "string"),
        ("response_format", {"type": "xml"}, "xml"),
        ("response_format", {"type": "json_schema"}, "schema"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}},
            "JSON schema",
        ),
        ("structured_outputs", {}, "one of"),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}, "one of"),
        ("structured_outputs", {"json": 5}, "JSON schema"),
        ("structured_outputs", {"choice": []}, "at least 1"),
        ("structured_outputs", {"choice": [""]}, "at least 1"),
    ],
)
def test_an_invalid_field_of_a_completion_is_named(field, value, reason):
    error = refused(CompletionBody, {"prompt": "x", field: value})
    assert error.param is not None
    assert error.param.startswith(field)
    assert reason in error.message
    assert error.status == 400


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "at least 1 item, not []"),
        ({"messages": "hello"}, "messages", "array"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "image_url",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "tool_call_id"),
        ({"messages": [{"role": "user", "tool_calls": [called("f", "{}")]}]}, "messages[0]", "assistant"),
        (
            {"messages": [{"role": "assistant", "audio": {"id": "x"}}]},
            "messages[0]",
            "audio is not supported",
        ),
        ({"messages": HELLO, "tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"messages": HELLO, "tools": [tool("no spaces")]}, "tools[0].function.name", "match"),
        (
            {"messages": HELLO, "tools": [tool("f", {"type": "string"})]},
            "tools[0].function.parameters",
            "object",
        ),
        ({"messages": HELLO, "tools": [tool("f"), tool("f")]}, "tools", "twice"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"messages": HELLO, "tools": [tool("f")], "tool_choice": "any"}, "tool_choice", "required"),
        (
            {"messages": HELLO, "tools": [tool("f")], "tool_choice": {"type": "f"}},
            "tool_choice",
            "by its name",
        ),
        (
            {"messages": HELLO, "tools": [tool("f")], "tool_choice": named("g")},
            "tool_choice",
            "not found in tools",
        ),
        (
            {"messages": HELLO, "tools": [tool("f")], "tool_choice": "required", "ignore_eos": True},
            "ignore_eos",
            "EOS",
        ),
        (
            {"messages": HELLO, "tools": [tool("f")], "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex",
            "together with tools",
        ),
        (
            {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "excludes",
        ),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"messages": HELLO, "logprobs": 3}, "logprobs", "boolean"),
        ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 99}, "top_logprobs", "99"),
        ({"messages": HELLO, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"messages": HELLO, "cache_salt": ""}, "cache_salt", "at least 1"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens", "0"),
    ],
)
def test_an_invalid_field_of_a_chat_is_named(body, param, reason):
    error = refused(ChatBody, body)
    assert error.param == param
    assert reason in error.message


@pytest.mark.parametrize(
    ("kind", "rest", "fields"),
    [(*BODIES[0], GENERATION | CHAT), (*BODIES[1], GENERATION | COMPLETION)],
    ids=["chat", "completion"],
)
def test_unsupported_fields_are_refused_by_name_and_with_their_remedy(kind, rest, fields):
    """docs/compatibility.md has the same tables: a test compares them."""
    for field in fields:
        error = refused(kind, {**rest, field: ["of no harmless value"]})
        assert isinstance(error, Unsupported)
        assert error.param == field
        said, _, told = error.message.partition(": ")
        assert (said, told) == (f"{field} is not supported", REMEDIES.get(field, ""))
    assert {"best_of", "kv_transfer_params", "lora_path", "stop_regex", "request_id"} < fields.keys()


def test_a_structure_has_one_field():
    for more in ({"guided_regex": "a"}, {"structured_outputs": {"regex": "a"}}):
        error = refused(CompletionBody, {"prompt": "x", "regex": "a", **more})
        assert "only one of its fields" in error.message


def test_an_unsupported_member_is_refused_by_name():
    error = refused(CompletionBody, {"prompt": "x", "structured_outputs": {"structural_tag": "x"}})
    assert isinstance(error, Unsupported)
    assert error.message == "structured_outputs: structural_tag is not supported"


def test_a_session_of_sglang_is_a_name_and_continues_no_request():
    named = {"session_params": {"id": "s", "rid": None, "offset": 4, "drop_previous_output": True}}
    assert parse(ChatBody, json.dumps({"messages": HELLO, **named}).encode()).session == "s"
    for kind, more in ((ChatBody, {}), (anthropic.MessagesBody, {"max_tokens": 1})):
        error = refused(kind, {"messages": HELLO, "session_params": {"id": "s", "rid": "r"}} | more)
        assert isinstance(error, Unsupported)
        assert error.message == "session_params: rid is not supported"


def test_unsupported_fields_without_effect_are_accepted():
    harmless = {
        "best_of": 1, "length_penalty": 1.0, "echo": False, "thinking_token_budget": -1, "vllm_xargs": {},
        "kv_transfer_params": None, "top_logprobs": 0,
        "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "suffix": None,
        "logit_bias": None, "stop": None, "seed": None, "parallel_tool_calls": True, "store": False,
        "verbosity": "medium", "include_reasoning": True, "stream_interval": 4, "session_id": "s",
        "spaces_between_special_tokens": False,
        "return_routed_experts": False, "return_token_offsets": True, "custom_labels": {"a": "b"},
    }  # fmt: skip

    assert parse(ChatBody, json.dumps({"messages": HELLO, **harmless}).encode()).stop == []


def test_null_counts_as_absent_in_tokenize():
    optional = [name for name in TokenizeBody.model_fields if name != "messages"]
    nulls = {"messages": HELLO, **dict.fromkeys(optional)}
    plain = json.dumps({"messages": HELLO}).encode()
    assert parse(TokenizeBody, json.dumps(nulls).encode()) == parse(TokenizeBody, plain)


@pytest.mark.parametrize(("kind", "rest"), BODIES)
def test_null_counts_as_absent(kind, rest):
    """OpenAI and vLLM allow null for most fields. Some clients send every field that they know."""
    optional = [name for name, field in kind.model_fields.items() if not field.is_required()]
    assert {"n", "stream", "echo" if kind is CompletionBody else "logprobs"} < set(optional)
    nulls = json.dumps({**rest, **dict.fromkeys(optional)}).encode()
    assert parse(kind, nulls) == parse(kind, json.dumps(rest).encode())
    options = {"include_usage": None, "continuous_usage_stats": None}
    streamed = {**rest, "stream": True, "stream_options": options}
    given = parse(kind, json.dumps(streamed).encode()).stream_options
    assert given is not None
    assert not given.usage_at_the_end


@pytest.mark.parametrize(
    ("options", "at_the_end", "in_each_chunk"),
    [
        ({}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"continuous_usage_stats": True}, True, True),
    ],
)
def test_stream_options_choose_the_chunks_with_usage(options, at_the_end, in_each_chunk):
    body = {"prompt": "x", "stream": True, "stream_options": options}
    given = parse(CompletionBody, json.dumps(body).encode()).stream_options
    assert given is not None
    assert (given.usage_at_the_end, given.usage_in_each_chunk) == (at_the_end, in_each_chunk)


def test_the_reasoning_effort_sets_template_variables():
    def settings(**fields: Any) -> dict[str, Any]:
        return parse(ChatBody, json.dumps({"messages": HELLO, **fields}).encode()).template_settings

    assert settings() == {}
    assert settings(reasoning_effort="low") == {"reasoning_effort": "low", "enable_thinking": True}
    assert settings(reasoning_effort="none") == {"reasoning_effort": "none", "enable_thinking": False}
    both = settings(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert both == {"reasoning_effort": "high", "enable_thinking": False}
    error = refused(ChatBody, {"messages": HELLO, "reasoning_effort": "extreme"})
    assert "'minimal'" in error.message


@pytest.mark.parametrize(
    ("told", "bodies"),
    [
        ("JSON", [b"", b"{", b"nonsense", b'{"prompt": NaN', b"\xff\xfe", b'{"a": 1} x']),
        ("object", [b"[1, 2]", b'"text"', b"5", b"null"]),
        ("temperature", [b'{"prompt": "x", "temperature": Infinity}']),
    ],
)
def test_json_that_is_invalid_or_no_object_or_not_finite_is_refused(told: str, bodies: list[bytes]):
    for raw in bodies:
        with pytest.raises(InvalidRequest, match=told):
            parse(CompletionBody, raw)


def test_content_parts_are_joined_and_developer_is_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]

    body = parse(ChatBody, json.dumps({"messages": messages}).encode())
    assert [message.for_template() for message in body.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
    ]


def test_chat_templates_get_tool_calls_and_results_as_objects():
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [called("f", '{"a": [1]}'), called("g", "")]},
        {"role": "tool", "tool_call_id": "123456789", "content": "5"},
    ]
    body = parse(ChatBody, json.dumps({"messages": messages}).encode())
    call = {"id": "123456789", "type": "function"}
    assert [message.for_template() for message in body.messages] == [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {**call, "function": {"name": "f", "arguments": {"a": [1]}}},
                {**call, "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "5", "tool_call_id": "123456789"},
    ]


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": {"const": 1}},
                }
            },
            "json_schema",
            '{"const": 1}',
        ),
        ({"structured_outputs": {"json": {"const": 1}}}, "json_schema", '{"const": 1}'),
        ({"structured_outputs": {"json": '{"const":1}'}}, "json_schema", '{"const":1}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a+", "b"]}}, "regex", "a\\+|b"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        # The names of these fields in earlier versions of vLLM, and in SGLang.
        ({"guided_json": {"const": 1}}, "json_schema", '{"const": 1}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a+", "b"]}, "regex", "a\\+|b"),
        ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"json_schema": '{"const":1}'}, "json_schema", '{"const":1}'),
        ({"regex": "a+", "ebnf": None}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        # Those of llama.cpp and Ollama.
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ({"format": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"format": "json"}, "json_schema", '{"type": "object"}'),
        ({"format": ""}, None, None),
    ],
)
def test_structure_of_each_structured_output_field(body: dict[str, Any], kind: str | None, text: str | None):
    for of, rest in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": HELLO})):
        structure = parse(of, json.dumps(rest | body).encode()).structure
        assert (structure and structure.kind, structure and structure.text) == (kind, text)
    if "response_format" in body:
        return
    responses = parse(openai.ResponsesBody, json.dumps({"input": "x", **body}).encode()).structured_outputs
    messages = json.dumps({"messages": HELLO, "max_tokens": 1, **body}).encode()
    for wanted in (responses, parse(anthropic.MessagesBody, messages).structured_outputs):
        structure = None if wanted is None else wanted.structure
        assert (structure and structure.kind, structure and structure.text) == (kind, text)


USE = anthropic.ToolUseBlock(type="tool_use", id="a", name="f", input="{}")
CALL = openai.FunctionCallItem(type="function_call", call_id="a", name="f", arguments="{}")


@pytest.mark.parametrize(
    "translate",
    [
        lambda count: anthropic.Conversation({}, str).chat(
            "", [anthropic.InputMessage.model_construct(role="assistant", content=[USE] * count)]
        ),
        lambda count: openai.chat_messages(None, [CALL] * count, str),
    ],
    ids=["messages", "responses"],
)
def test_many_calls_become_one_message_with_work_in_proportion(
    translate: Callable[[int], list[Message]],
):
    [message] = translate(400)
    assert message.tool_calls is not None
    assert len(message.tool_calls) == 400
    many, few = work(lambda: translate(400)), work(lambda: translate(40))
    assert many < 30 * few, "in the square it would be 100 times the work; longer lists also grow more often"
