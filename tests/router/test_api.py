"""Bodies: what is wrong is named with its field and reason, and what is unsupported with its name."""

import json
from typing import Any

import pytest

from router.api import ChatBody, CompletionBody, parse
from router.errors import InvalidRequest, Unsupported

HELLO = [{"role": "user", "content": "hi"}]


def refused(kind, body: dict[str, Any]) -> InvalidRequest:

    with pytest.raises(InvalidRequest) as refusal:
        parse(kind, json.dumps(body).encode())
    assert refusal.value.param is not None
    assert refusal.value.param.split("[")[0].split(".")[0] in refusal.value.message
    return refusal.value


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("prompt", "", "empty"),
        ("prompt", [], "empty"),
        ("prompt", [""], "empty"),
        ("prompt", [[1], []], "empty"),
        ("prompt", 5, "string"),
        ("prompt", {"text": "x"}, "string"),
        ("prompt", [1, "a"], "string"),
        ("prompt", [-1], "token ids"),
        ("prompt", [2**32], "token ids"),
        ("prompt", ["x"] * 200, "128"),
        ("temperature", -1, "-1"),
        ("temperature", "hot", "number"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 1.5, "1.5"),
        ("top_k", -2, "-2"),
        ("min_p", 2, "2"),
        ("presence_penalty", 3, "3"),
        ("repetition_penalty", 0, "0"),
        ("n", 0, "0"),
        ("n", 1.5, "integer"),
        ("n", "2", "integer"),
        ("max_tokens", 0, "0"),
        ("max_tokens", 10.0, "integer"),
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
    ],
)
def test_a_wrong_field_of_a_completion(field, value, reason):
    error = refused(CompletionBody, {"prompt": "x", field: value})
    assert error.param is not None
    assert error.param.startswith(field)
    assert reason in error.message
    assert error.status == 400


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({}, "messages", "required"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hello"}, "messages", "array"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "image_url",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]", "'tool' is not supported"),
        ({"messages": HELLO, "logprobs": 3}, "logprobs", "boolean"),
        ({"messages": HELLO, "top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 99}, "top_logprobs", "99"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens", "0"),
    ],
)
def test_a_wrong_chat(body, param, reason):
    error = refused(ChatBody, body)
    assert error.param == param
    assert reason in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("suffix", "x"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("guided_json", {}),
        ("structured_outputs", {"regex": "a"}),
        ("modalities", ["audio"]),
        ("prompt_logprobs", 1),
        ("lora_request", {}),
        ("chat_template", "{{ x }}"),
        ("include_stop_str_in_output", True),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field, value):
    error = refused(ChatBody, {"messages": HELLO, field: value})
    assert isinstance(error, Unsupported)
    assert (error.param, error.message) == (field, f"{field} is not supported")


def test_what_asks_for_nothing_is_no_reason_to_refuse():
    harmless = {
        "best_of": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "suffix": None,
        "logit_bias": None, "stop": None, "seed": None, "parallel_tool_calls": True, "store": False,
    }  # fmt: skip

    assert parse(ChatBody, json.dumps({"messages": HELLO, **harmless}).encode()).stop == []


@pytest.mark.parametrize("raw", [b"", b"{", b"nonsense", b'{"prompt": NaN', b"\xff\xfe", b'{"a": 1} x'])
def test_no_json(raw):
    with pytest.raises(InvalidRequest, match="JSON"):
        parse(CompletionBody, raw)


@pytest.mark.parametrize("raw", [b"[1, 2]", b'"text"', b"5", b"null"])
def test_no_object(raw):
    with pytest.raises(InvalidRequest, match="object"):
        parse(CompletionBody, raw)


def test_numbers_must_be_finite():
    with pytest.raises(InvalidRequest, match="temperature"):
        parse(CompletionBody, b'{"prompt": "x", "temperature": Infinity}')


def test_content_parts_are_joined_and_developer_is_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]

    body = parse(ChatBody, json.dumps({"messages": messages}).encode())
    assert body.template_messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
    ]
