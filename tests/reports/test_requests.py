"""Requests as clients really send them, and templates as vendors really write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton.router.text.tokenizer import load_tokenizer
from baton.rpc import inference_pb2 as pb
from baton.rpc.stubs import InferenceStub
from baton.rpc.token_ids import unpacked_ids
from tests.reports.replay import TEMPLATE, replaying, write_model
from tests.router.conftest import Cluster

CHAT, COMPLETION, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETION: {"prompt": "Hi"},
    RESPONSES: {"input": "Hi"},
    MESSAGES: {"messages": HI, "max_tokens": 9},
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


async def prompt_of(made: Cluster, path: str, **body: Any) -> str:
    """Sends a request that must succeed. Returns the prompt that the workers got."""
    status, answer = await made.post(path, **{**BODIES[path], **body})
    assert status == 200, (path, body, answer)
    return made.prompt


# ------------------------------------------------------------ earlier calls


def chat_history(name: str, arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "it failed"}
    return {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, result]}


def responses_history(name: str, arguments: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c1", "name": name, "arguments": arguments}
    return {"input": [*HI, call, {"type": "function_call_output", "call_id": "c1", "output": "it failed"}]}


def messages_history(name: str, arguments: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c1", "name": name, "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "it failed"}
    return {
        "messages": [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    }


HISTORIES = {CHAT: chat_history, RESPONSES: responses_history, MESSAGES: messages_history}
COUNTS = {"/tokenize": chat_history, "/v1/responses/input_tokens": responses_history}
COUNTS["/v1/messages/count_tokens"] = messages_history
ARGUMENTS: list[tuple[Any, Any]] = [
    ('{"city": "Paris"}', {"city": "Paris"}),
    ({"city": "Paris"}, {"city": "Paris"}),
    ('{"content": "a\nb\tc"}', {"content": "a\nb\tc"}),
    *(
        (wrong, {})
        for wrong in ('{"content": "He said "hello""}', '{"content": "abc', "[]", "42", '"x"', "", None, [1])
    ),
    ("[" * 9_999, {}),
]
"""Of an earlier call, and what the template gets."""


@pytest.mark.all
async def test_a_turn_after_a_malformed_call_is_served(tmp_path: Path):
    async with replaying(tmp_path) as made:
        for arguments, shown in ARGUMENTS:
            for path, history in HISTORIES.items():
                prompt = await prompt_of(made, path, **history("get_weather", arguments))
                assert f'{{"name": "get_weather", "arguments": {json.dumps(shown)}}}' in prompt, (
                    path,
                    arguments,
                )
                assert "it failed" in prompt
            for path, history in COUNTS.items():
                status, answer = await made.post(path, **history("get_weather", arguments))
                assert status == 200, (path, answer)
        for path, history in HISTORIES.items():
            assert "Wetter, heute" in await prompt_of(made, path, **history("Wetter, heute", "{}"))


# ------------------------------------------------------------ templates

TOOL = {"type": "function", "function": {"name": "get_weather"}}
TEMPLATES: dict[str, tuple[str, dict[str, Any], str]] = {
    "the name of a message": (
        "{% for m in messages %}{{ m.name or m.role }}:{{ m.content }};{% endfor %}",
        {"messages": [{"name": "ann", **HI[0]}, {"role": "assistant", "content": "Hello", "name": "bob"}]},
        "ann:Hi;bob:Hello;",
    ),
    "a description that is added to a text": (
        "{% for t in tools %}{{ '// ' + t.function.description + '\n' + t.function.name }}{% endfor %}",
        {"tools": [TOOL]},
        "// \nget_weather",
    ),
    "a description whose lines are read": (
        "{% for t in tools %}{% for line in t.function.description.strip().split('\n') %}"
        "{{ line }}{% endfor %}.{% endfor %}",
        {"tools": [TOOL]},
        ".",
    ),
    "parameters whose properties are read": (
        "{% for t in tools %}{% for p in t.function.parameters.properties.items() %}{{ p }}{% endfor %}."
        "{{ t.function.parameters | tojson }}{% endfor %}",
        {"tools": [TOOL]},
        ".null",
    ),
    "a tool as it was sent": ("{{ tools | tojson }}", {"tools": [TOOL]}, json.dumps([TOOL])),
    "arguments that are added to a text": (
        "{% if tools %}{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ '```json\n' + c['function']['arguments'] + '```' }}{{ c.function.arguments }}"
        "{% endfor %}{% endfor %}",
        chat_history("get_weather", '{"city": "Zürich"}'),
        '```json\n{"city": "Zürich"}```{"city": "Zürich"}',
    ),
}
"""What a template does, a chat, and the prompt."""


@pytest.mark.parametrize("named", TEMPLATES)
async def test_what_templates_read(named: str, tmp_path: Path):
    template, body, prompt = TEMPLATES[named]
    async with replaying(tmp_path, template=template, tool_call_parser="hermes") as made:
        assert await prompt_of(made, CHAT, **body) == prompt


async def test_the_name_of_a_message_over_grpc(tmp_path: Path):
    template, body, prompt = TEMPLATES["the name of a message"]
    async with replaying(tmp_path, template=template) as made:
        async with made.channel() as channel:
            chat = pb.Chat(messages=[pb.ChatMessage(**message) for message in body["messages"]])
            async for _ in InferenceStub(channel).Generate(pb.GenerateRequest(chat=chat, max_tokens=70_000)):
                pass
        assert made.prompt == prompt
        assert made.sent.sampling.max_tokens == 8192 - len(unpacked_ids(made.sent.prompt_ids)), (
            "lowered here, too"
        )


UNSET: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"type": "object", "properties": None, "required": None}, {"type": "object"}),
    ({"type": None, "properties": {}}, {"properties": {}}),
    ({"properties": {"a": {"type": "string", "description": None, "enum": None, "minLength": None}}},
     {"properties": {"a": {"type": "string"}}}),
    ({"properties": {"a": {"default": None, "enum": ["x", None]}}},
     {"properties": {"a": {"default": None, "enum": ["x", None]}}}),
    ({"properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "null", "title": None}]}}}},
     {"properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "null"}]}}}}),
    ({"properties": {"a": True, "b": {}}, "additionalProperties": True},
     {"properties": {"a": {}, "b": {}}, "additionalProperties": True}),
]  # fmt: skip
"""Schemas with what serializers write for keywords that are not set, and those that mean the same."""


async def test_keywords_that_are_not_set(tmp_path: Path):
    each = "{% for k, v in tools[0].function.parameters.properties|items %}{{ v.type + v.title }}{% endfor %}"
    template = "{% if tools %}{{ tools[0].function.parameters|tojson }}" + each + "{% else %}x{% endif %}"
    async with replaying(tmp_path, template=template, tool_call_parser="hermes") as made:
        for given, meant in UNSET:
            tools = {
                CHAT: {"type": "function", "function": {"name": "f", "parameters": given}},
                RESPONSES: {"type": "function", "name": "f", "parameters": given},
                MESSAGES: {"name": "f", "input_schema": given},
            }
            for path, tool in tools.items():
                assert (await prompt_of(made, path, tools=[tool])).startswith(json.dumps(meant)), path
                choice = {"type": "any"} if path == MESSAGES else "required"
                await prompt_of(made, path, tools=[tool], tool_choice=choice)
            wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": given}}
            for field in ({"response_format": wanted}, {"structured_outputs": {"json": given}}):
                await prompt_of(made, CHAT, **field)
                sent = json.loads(made.sent.sampling.structured_output.json_schema)
                assert sent.get("properties", {}).keys() == meant.get("properties", {}).keys()


NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": TEMPLATE}]


async def test_a_chat_with_tools_has_the_template_for_tools(tmp_path: Path):
    tools = {
        CHAT: {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
        RESPONSES: {"type": "function", "name": "get_weather", "parameters": PARAMETERS},
        MESSAGES: {"name": "get_weather", "input_schema": PARAMETERS},
    }
    async with replaying(tmp_path, template=NAMED, tool_call_parser="hermes") as made:
        for path, tool in tools.items():
            assert "get_weather" in await prompt_of(made, path, tools=[tool])
            assert "it failed" in await prompt_of(made, path, **HISTORIES[path]("get_weather", "{}"))
            assert await prompt_of(made, path) == "plain"


def test_the_files_that_have_templates(tmp_path: Path):
    def rendered(path: Path) -> tuple[str, str]:
        template = load_tokenizer(str(path)).chat_template
        return template.render(HI), template.render(HI, [TOOL])

    model = write_model(tmp_path / "model", NAMED[:1])
    assert rendered(model) == ("plain", "plain")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert rendered(model) == ("plain", "tools")
    (model / "chat_template.jinja").write_text("file")
    assert rendered(model) == ("file", "tools")
    assert rendered(write_model(tmp_path / "only", [{**NAMED[0], "name": "tool_use"}])) == ("plain", "plain")
    processor = write_model(tmp_path / "processor", None)
    (processor / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert rendered(processor) == ("of a processor",) * 2
    with pytest.raises(ValueError, match="chat_template must be a text, or a list of name and template"):
        load_tokenizer(str(write_model(tmp_path / "wrong", [{"name": "default"}])))


# ------------------------------------------------------------ fields


async def test_a_limit_above_the_context_is_lowered_to_it(tmp_path: Path):
    fields = {CHAT: ("max_tokens", "max_completion_tokens"), COMPLETION: ("max_tokens",)}
    fields |= {RESPONSES: ("max_output_tokens",), MESSAGES: ("max_tokens",)}
    async with replaying(tmp_path) as made:
        for path, names in fields.items():
            for name in names:
                for limit in (8_190, 65_535, 2**31, 2**63 - 1):
                    prompt = await prompt_of(made, path, **{name: limit})
                    room = 8192 - len(made.tokenizer.encode(prompt))
                    assert made.sent.sampling.max_tokens == min(limit, room), (path, name, limit)


async def test_chunks_before_the_last_one_have_no_usage(tmp_path: Path):
    async with replaying(tmp_path) as made:
        for path in (CHAT, COMPLETION):
            for options in ({"include_usage": True}, {"include_usage": False}, None):
                events = await made.events(path, **BODIES[path], n=2, stream_options=options)
                chunks = [event for event in events if event["choices"]]
                asked = options is not None and options["include_usage"]
                assert all(event.get("usage", "absent") == (None if asked else "absent") for event in chunks)
                assert [event["choices"] for event in events if event.get("usage")] == ([[]] if asked else [])


OF_CODEX: dict[str, Any] = {
    "client_metadata": {"session_id": "s"},
    "access_programs": [],
    "reasoning": {"effort": "medium", "summary": "detailed", "context": "all_turns"},
    "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    "tools": [
        {"type": "web_search", "external_web_access": False},
        {"type": "image_generation"},
        {"type": "mcp"},
    ],
    "service_tier": "priority",
    "prompt_cache_retention": "1h",
    "text": {"verbosity": "low", "new": 1},
    "stream_options": {"include_obfuscation": False, "new": 1},
}
NEW: dict[str, dict[str, Any]] = {
    RESPONSES: OF_CODEX,
    CHAT: {"client_metadata": {}, "access_programs": [], "service_tier": "flex", "stream_options": None},
    MESSAGES: {
        "client_metadata": {},
        "thinking": {"type": "adaptive", "new": 1},
        "metadata": {"user_id": "u", "new": 1},
        "output_config": {"effort": "low", "new": 1},
        "tool_choice": {"type": "auto", "new": 1},
    },
    COMPLETION: {
        "client_metadata": {},
        "repeat_penalty": 1.0,
        "n_predict": -1,
        "typical_p": 1,
        "mirostat": 0,
        "cache_prompt": True,
    },
}
"""Fields that clients send to each provider, and that change nothing here."""
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"max_tokens": 9}, "max_tokens is not supported: use max_output_tokens"),
    (RESPONSES, {"messages": HI}, "messages is not supported: use input"),
    (RESPONSES, {"n": 2}, "n is not supported"),
    (RESPONSES, {"lora_path": "x"}, "lora_path is not supported"),
    (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice needs tools"),
    (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice: must be none, auto"),
    (MESSAGES, {"stop": ["x"]}, "stop is not supported: use stop_sequences"),
    (MESSAGES, {"use_beam_search": True}, "use_beam_search is not supported"),
    (CHAT, {"repeat_penalty": 1.1}, "repeat_penalty is not supported: use repetition_penalty"),
    (COMPLETION, {"n_predict": 5}, "n_predict is not supported: use max_tokens"),
    (CHAT, {"mirostat": 2}, "mirostat is not supported"),
    (RESPONSES, {"typical_p": 0.5}, "typical_p is not supported: use min_p or top_p"),
    (MESSAGES, {"dry_multiplier": 0.8}, "dry_multiplier is not supported"),
    (COMPLETION, {"xtc_probability": 0.5}, "xtc_probability is not supported"),
]
"""Fields of other endpoints and servers that would change the answer."""


async def test_fields_that_change_nothing_are_ignored(tmp_path: Path):
    async with replaying(tmp_path) as made:
        for path, fields in NEW.items():
            plain = await prompt_of(made, path)
            for each in ({name: value} for name, value in fields.items()):
                assert await prompt_of(made, path, **each) == plain
        for path, fields, told in OTHERS:
            status, answer = await made.post(path, **{**BODIES[path], **fields})
            assert status == 400, (path, fields)
            assert told in answer["error"]["message"]


FORMATS: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS, "strict": None}},
    {"type": "json_schema", "schema": PARAMETERS},
    {"type": "json_object", "schema": PARAMETERS},
]
"""Of an answer with a schema. A server that ignores the schema returns other JSON."""


@pytest.mark.all
async def test_a_schema_stands_in_several_places(tmp_path: Path):
    async with replaying(tmp_path) as made:
        for path in (CHAT, COMPLETION):
            for wanted in FORMATS:
                await prompt_of(made, path, response_format=wanted)
                assert json.loads(made.sent.sampling.structured_output.json_schema) == PARAMETERS, wanted
            status, _ = await made.post(path, **BODIES[path], response_format={"type": "json_schema"})
            assert status == 400


# ------------------------------------------------------------ shapes of messages

SHOWN = (
    "{% if tools %}{{ tools[0].function.name }}|{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('one system message') }}{% endif %}"
    "{{ m.role }}:{{ m.reasoning or '' }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}|{% endfor %}"
)
TURN = [*HI, {"role": "assistant", "content": "Hello"}]


def said(*parts: Any) -> dict[str, Any]:
    return {"messages": [*HI, {"role": "assistant", "content": [*parts]}]}


def results(*parts: Any) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [*parts]}
    return {"messages": [*said(call)["messages"], {"role": "user", "content": [result]}]}


TEXT = {"type": "text", "text": "yes"}
SHAPES: dict[str, list[tuple[str, dict[str, Any], str]]] = {
    "half a character in arguments": [
        (path, history("f", '{"a": "\\ud800"}'), "{\"a\": \"\N{REPLACEMENT CHARACTER}\"}")
        for path, history in HISTORIES.items()
    ],
    "refusals": [
        (CHAT, said({"type": "refusal", "refusal": "no"}), "assistant::no|"),
        (RESPONSES, {"input": said({"type": "refusal", "refusal": "no"})["messages"]}, "assistant::no|"),
    ],
    "parts of another endpoint": [
        (CHAT, said({"type": "output_text", "text": "a"}, TEXT), "assistant::a\nyes|"),
        (CHAT, {"messages": [{"role": "user", "content": ["a", TEXT]}]}, "user::a\nyes|"),
        (CHAT, said({"type": "input_text", "text": "a"}), "assistant::a|"),
    ],
    "encrypted thinking": [
        (MESSAGES, {"messages": [*said({"type": "redacted_thinking", "data": "x"}, TEXT)["messages"], *HI]},
         "assistant::yes|"),
    ],
    "results that are no text": [
        (MESSAGES, results(TEXT, {"type": "document", "source": {
            "type": "text", "media_type": "text/plain", "data": "of it"}}), "tool::yes\nof it|"),
        (MESSAGES, results({"type": "search_result", "source": "u", "title": "t", "content": [TEXT]}),
         "tool::t\nu\nyes|"),
        (MESSAGES, results({"type": "tool_reference", "tool_name": "f"}), "tool::f|"),
        (MESSAGES, {"messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "content", "content": [TEXT]}}]}]}, "user::yes|"),
    ],
    "null in a choice of tools": [
        (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": None}}, "user::Hi|"),
    ],
    "the summary of reasoning": [
        (RESPONSES, {"input": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
            *TURN[1:], *HI]}, "assistant:hm:Hello|"),
    ],
    "several system messages": [
        (RESPONSES, {"instructions": "a", "input": [{"role": "developer", "content": "b"}, *HI]},
         "system::a\n\nb|user::Hi|"),
        (CHAT, {"messages": [*TURN, {"role": "developer", "content": "b"}, *HI]}, "system::b|user::Hi|"),
        (MESSAGES, {"system": "a", "messages": [*TURN, {"role": "system", "content": "b"}, *HI]},
         "system::a\n\nb|user::Hi|"),
    ],
    "calls of tools that a provider runs": [
        (MESSAGES, {"messages": [*said(
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, TEXT)["messages"], *HI]},
         "assistant::yes|"),
        (RESPONSES, {"input": [{"type": "web_search_call", "id": "w", "action": {"type": "search"}}, *HI]},
         "user::Hi|"),
    ],
    "a tool without a type": [(CHAT, {"tools": [{"function": {"name": "f"}}]}, "f|user::Hi|")],
}  # fmt: skip
"""Requests that other servers take, and what the prompt has of them."""


@pytest.mark.parametrize("kind", SHAPES)
async def test_shapes_of_messages(kind: str, tmp_path: Path):
    async with replaying(tmp_path, template=SHOWN, tool_call_parser="hermes") as made:
        for path, body, part in SHAPES[kind]:
            assert part in await prompt_of(made, path, **body)
