"""Tools in the router: in the prompt, and tool calls in responses and streams."""

import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from openai.types.chat import ChatCompletionChunk

from baton.router.api import responses
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from baton.rpc.token_ids import unpacked_ids

from .conftest import TEXT, Cluster, accepts, encode_chat, forks_of, make_cluster, shared_forks

CHAT: list[Any] = [{"role": "user", "content": "Weather in Paris?"}]
TEMPLATE = """
{%- if tools %}<|im_start|>system
Call with <tool_call></tool_call>: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
TOOLS: list[Any] = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "Now.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}},
                       "required": ["city"], "additionalProperties": False},
    }},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
ARGUMENTS = '{"city": "Paris", "unit": "°C"}'
ONE = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NULLS = {"refusal": None, "reasoning": None, "reasoning_content": None}
CALLS = f'Let me see.\n{ONE}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tool_model(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the tokenizer is loaded from."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    return {"model": str(directory), "chat_template": str(template)}


@pytest.fixture(scope="module")
def tool_tokenizer(tool_model: dict[str, Any]) -> Iterator[ModelTokenizer]:
    made = load_tokenizer(**tool_model)
    with shared_forks(made):
        yield made


@pytest.fixture(scope="module")
def forks_fd(tool_tokenizer: ModelTokenizer) -> int:
    """For clusters with other tokenizers."""
    return forks_of(tool_tokenizer)


@pytest.fixture
async def calling(tool_tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster whose model writes some text, and then calls two tools."""
    async with make_cluster(tool_tokenizer, tmp_path, text=CALLS) as made:
        yield made


def joined(events: list[dict[str, Any]]) -> tuple[dict[str, Any], str | None]:
    """Returns the message that is the sum of a stream's deltas, and its finish reason."""
    message: dict[str, Any] = {"content": None, **NULLS}
    reason = None
    for event in events:
        ChatCompletionChunk.model_validate(event)
        choice = event["choices"][0]
        assert reason is None
        reason = choice["finish_reason"]
        delta = choice["delta"]
        message |= {key: value for key, value in delta.items() if key == "role"}
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                assert call["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    for call in message.get("tool_calls", ()):
        assert len(call["id"]) == 9
        assert call["id"].isalnum()
        del call["id"]
    return message


@pytest.mark.all
async def test_tool_calls_of_a_response_and_of_a_stream(calling: Cluster):
    body = {"messages": CHAT, "tools": TOOLS}
    status, result = await calling.post("/v1/chat/completions", **body)
    assert status == 200
    responses.ChatResponse.model_validate(result)
    [choice] = result["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = without_ids(choice["message"])
    assert message == {
        "role": "assistant",
        "content": "Let me see.",
        **NULLS,
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}},
            {"type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }
    events = await calling.events("/v1/chat/completions", **body)
    streamed, reason = joined(events)
    assert (without_ids(streamed), reason) == (message, "tool_calls")
    pieces = [e["choices"][0]["delta"].get("tool_calls", []) for e in events]
    assert sum(map(len, pieces)) > 5, "arguments arrive in pieces"


WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",  # noqa: E501
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'  # noqa: E501
        "<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "pythonic": '[get_weather(city="Paris")]',
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</seed:tool_call>",  # noqa: E501
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n</minimax:tool_call>',  # noqa: E501
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city">Paris'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", WRITTEN)
async def test_calls_of_each_format_are_read_and_forced(
    tool_model: dict[str, Any], small_directory: Path, tmp_path: Path, forks_fd: int, name: str
):
    small = tool_model | {"model": str(small_directory)}
    tokenizer = load_tokenizer(**small, tool_call_parser=name)
    async with make_cluster(tokenizer, tmp_path, text=WRITTEN[name], forks_fd=forks_fd) as made:
        for choice in ("auto", "required"):
            body = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice}
            status, result = await made.post("/v1/chat/completions", **body)
            assert status == 200, result
            message, _ = joined(await made.events("/v1/chat/completions", **body))
            for said in (result["choices"][0]["message"], message):
                [call] = said["tool_calls"]
                assert call["function"]["name"] == "get_weather"
                assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
                assert not said["content"]
                assert (call["id"] == "functions.get_weather:0") == (name == "kimi_k2"), (
                    "the template repeats it"
                )
        grammar = LLMatcher.grammar_from_lark(made.sent.sampling.structured_output.grammar)
        assert accepts(grammar, WRITTEN[name])
        assert not accepts(grammar, WRITTEN[name].replace("Paris", "Oslo"))
        if name not in ("deepseek_v31", "kimi_k2"):
            function = {"name": "f", "strict": True, "parameters": {"anyOf": [{"required": ["a"]}]}}
            body = {"messages": CHAT, "tools": [{"type": "function", "function": function}]}
            status, refused = await made.post("/v1/chat/completions", **body, tool_choice="required")
            assert (status, refused["error"]["param"]) == (400, "tools")
            assert "anyOf at the top" in refused["error"]["message"]


async def test_the_finish_reason_says_whether_the_model_chose_to_call(calling: Cluster):
    """It is that of OpenAI's API: a client that names the tool gets "stop"."""
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, expected in (("auto", "tool_calls"), ("required", "tool_calls"), (named, "stop")):
        body = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice}
        _, result = await calling.post("/v1/chat/completions", **body)
        message, reason = joined(await calling.events("/v1/chat/completions", **body))
        assert result["choices"][0]["finish_reason"] == reason == expected
        assert message["tool_calls"]


@pytest.mark.all
@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.long)])
async def test_the_sum_of_a_stream_is_the_whole_response(calling: Cluster, count: int):
    """With tool calls, for every length of the output and for several choices."""
    rng = random.Random(4)
    for _ in range(count):
        body: dict[str, Any] = {
            "messages": CHAT, "tools": TOOLS, "n": rng.choice([1, 2, 3]), "max_tokens": rng.randrange(1, 90),
            "seed": rng.randrange(100), "logprobs": rng.random() < 0.3,
            "parallel_tool_calls": rng.random() < 0.7, "tool_choice": rng.choice(["auto", "auto", "none"]),
            "stop": rng.choice([None, None, "Paris", "arguments", "</tool_call>"]),
        }  # fmt: skip
        status, whole = await calling.post("/v1/chat/completions", **body)
        assert status == 200, whole
        options = {"include_usage": True}
        *events, last = await calling.events("/v1/chat/completions", **body, stream_options=options)
        assert last["usage"] == whole["usage"]
        for choice in whole["choices"]:
            mine = [event for event in events if event["choices"][0]["index"] == choice["index"]]
            message, reason = joined(mine)
            assert reason == choice["finish_reason"]
            message["content"] = message["content"] or None
            expected = without_ids(choice["message"]) | {"content": choice["message"]["content"] or None}
            assert without_ids(message) == expected, body
            if body["logprobs"]:
                entries = [entry for e in mine for entry in e["choices"][0]["logprobs"]["content"]]
                assert entries == choice["logprobs"]["content"]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_tool_choice_may_name_the_tools_that_are_allowed(calling: Cluster):
    body = {"messages": CHAT, "tools": TOOLS, "max_tokens": 2}
    for mode in ("auto", "required"):
        status, result = await calling.post("/v1/chat/completions", **body, tool_choice=allowed(mode, "now"))
        assert status == 200, result
        prompt = calling.tokenizer.decode(
            list(unpacked_ids(calling.sent.prompt_ids)), skip_special_tokens=False
        )
        assert json.dumps([TOOLS[1]]) in prompt
        assert "get_weather" not in prompt
        grammar = calling.sent.sampling.structured_output.grammar
        assert ("now" in grammar) == (mode == "required")
        assert "get_weather" not in grammar
    status, result = await calling.post(
        "/v1/responses", input="Hi", max_output_tokens=2,
        tools=[{"type": "function", "name": "now"}, {"type": "function", "name": "later"}],
        tool_choice={
            "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}],
        },
    )  # fmt: skip
    assert (status, result["tool_choice"]["mode"]) == (200, "required")
    assert "later" not in calling.sent.sampling.structured_output.grammar
    for choice in (
        allowed("auto", "then"),
        allowed("auto"),
        {"type": "allowed_tools"},
        allowed("never", "now"),
    ):
        status, result = await calling.post("/v1/chat/completions", **body, tool_choice=choice)
        assert (status, result["error"]["param"].partition(".")[0]) == (400, "tool_choice"), result


async def test_tools_are_in_the_prompt_unless_tool_choice_is_none(calling: Cluster):
    for choice in (None, "auto", "none"):
        await calling.post(
            "/v1/chat/completions", messages=CHAT, tools=TOOLS, tool_choice=choice, max_tokens=2
        )
    auto, same, none = (
        list(unpacked_ids(m.prefill.request.prompt_ids)) for m in calling.prefills[0].submitted
    )
    text = calling.tokenizer.decode(auto, skip_special_tokens=False)
    assert auto == same
    assert json.dumps(TOOLS) in text
    assert none == encode_chat(calling.tokenizer, CHAT)
    for message in calling.prefills[0].submitted:
        assert not message.prefill.request.sampling.HasField("structured_output")
    _, result = await calling.post("/v1/chat/completions", messages=CHAT, tools=TOOLS, tool_choice="none")
    assert result["choices"][0]["message"]["content"] == CALLS
    assert result["choices"][0]["finish_reason"] == "stop"


async def test_earlier_calls_and_results_are_in_the_prompt(calling: Cluster):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": '{"a":  1}'}}
    messages = [
        *CHAT,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "noon"},
    ]
    status, tokens = await calling.post("/tokenize", messages=messages, tools=TOOLS)
    assert status == 200
    text = calling.tokenizer.decode(tokens["tokens"], skip_special_tokens=False)
    assert (
        '<|im_start|>assistant\n<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call><|im_end|>'
        in text
    )
    assert "<|im_start|>tool\nnoon<|im_end|>" in text
    body = {"messages": messages[:2], "continue_final_message": True}
    status, refused = await calling.post("/tokenize", **body, tools=TOOLS)
    assert (status, refused["error"]["param"]) == (400, "continue_final_message")


async def test_earlier_calls_are_in_the_prompt_of_a_template_that_knows_none(
    small_directory: Path, tmp_path: Path, forks_fd: int
):
    """As older templates of LFM2, to which the calls are a part of the content."""
    source = "<|tool_list_start|>{{ tools }}{% for m in messages %}|{{ m.content }}{% endfor %}"
    (tmp_path / "t.jinja").write_text(source)
    tokenizer = load_tokenizer(str(small_directory), chat_template=str(tmp_path / "t.jinja"))
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": '{"a":  "x"}'}}
    said = {"role": "assistant", "content": "Wait.", "tool_calls": [call, call]}
    async with make_cluster(tokenizer, tmp_path, forks_fd=forks_fd) as made:
        _, tokens = await made.post("/tokenize", messages=[*CHAT, said])
    text = tokenizer.decode(tokens["tokens"], skip_special_tokens=False)
    assert text.endswith('|<|tool_call_start|>[now(a="x"), now(a="x")]<|tool_call_end|>Wait.')


async def test_ids_of_other_models_in_a_history_of_mistral(
    small_directory: Path, tmp_path: Path, forks_fd: int
):
    """Its vendor's templates refuse an id that is not nine letters or digits."""
    (tmp_path / "t.jinja").write_text(
        "{% macro shown(id) %}{% if id | length != 9 %}{{ raise_exception('nine, please') }}{% endif %}"
        "({{ id }}){% endmacro %}{{ tools }}{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "[TOOL_CALLS]{{ shown(call.id) }}{% endfor %}{% if m.role == 'tool' %}{{ shown(m.tool_call_id) }}"
        "{% endif %}{% endfor %}"
    )
    tokenizer = load_tokenizer(str(small_directory), chat_template=str(tmp_path / "t.jinja"))
    function = {"name": "now", "arguments": "{}"}
    calls = [{"id": id_, "type": "function", "function": function} for id_ in ("call_1", "abcDEF123")]
    chat = [*CHAT, {"role": "assistant", "tool_calls": calls}]
    chat += [{"role": "tool", "content": "noon", "tool_call_id": call["id"]} for call in calls]
    use = [{"type": "tool_use", "id": call["id"], "name": "now", "input": {}} for call in calls]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "noon"} for call in calls]
    messages = [*CHAT, {"role": "assistant", "content": use}, {"role": "user", "content": results}]
    items = [{"type": "function_call", "call_id": call["id"], **function} for call in calls]
    outputs = [{"type": "function_call_output", "call_id": call["id"], "output": "noon"} for call in calls]
    async with make_cluster(tokenizer, tmp_path, forks_fd=forks_fd) as made:
        for path, body in (
            ("/v1/chat/completions", {"messages": chat, "max_tokens": 1}),
            ("/v1/messages", {"messages": messages, "max_tokens": 1}),
            ("/v1/responses", {"input": [*CHAT, *items, *outputs], "max_output_tokens": 1}),
        ):
            status, result = await made.post(path, **body)
            assert status == 200, result
            one, two, of_one, of_two = re.findall(r"\((\w+)\)", made.prompt)
            assert (of_one, of_two) == (one, two)
            assert (len(one), two) == (9, "abcDEF123")


async def test_template_variables_of_the_client(small_directory: Path, tmp_path: Path, forks_fd: int):
    source = "{{ messages[0].content }}{{ eos_token }}{{ think.how if think }}{{ verbosity }}"
    (tmp_path / "t.jinja").write_text(source)
    tokenizer = load_tokenizer(str(small_directory), chat_template=str(tmp_path / "t.jinja"))
    async with make_cluster(tokenizer, tmp_path, forks_fd=forks_fd) as made:
        told = {"think": {"how": "slowly"}, "messages": [], "eos_token": "!"}
        for settings, text in (
            (told, "Weather in Paris?<|im_end|>slowly"),
            (None, "Weather in Paris?<|im_end|>"),
        ):
            body = {"messages": CHAT, "chat_template_kwargs": settings}
            _, tokens = await made.post("/tokenize", **body)
            await made.post("/v1/chat/completions", **body, max_tokens=1)
            sent = list(unpacked_ids(made.prefills[0].submitted[-1].prefill.request.prompt_ids))
            assert sent == tokens["tokens"] == tokenizer.encode(text)
        chat = {"messages": CHAT, "verbosity": "high", "max_tokens": 1}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/responses", {"input": CHAT, "text": {"verbosity": "high"}, "max_output_tokens": 1}),
        ):
            status, _ = await made.post(path, **body)
            assert status == 200
            assert made.prompt == "Weather in Paris?<|im_end|>high"


async def test_one_call_at_most_without_parallel_tool_calls(calling: Cluster):
    body = {"messages": CHAT, "tools": TOOLS, "parallel_tool_calls": False}
    _, result = await calling.post("/v1/chat/completions", **body)
    streamed, reason = joined(await calling.events("/v1/chat/completions", **body))
    message = without_ids(result["choices"][0]["message"])
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]
    assert (without_ids(streamed), reason) == (message, "tool_calls")


async def test_a_text_without_calls_and_a_call_that_is_cut_off(
    tool_tokenizer: ModelTokenizer, tmp_path: Path
):
    async with make_cluster(tool_tokenizer, tmp_path) as made:
        _, result = await made.post("/v1/chat/completions", messages=CHAT, tools=TOOLS)
        assert result["choices"][0]["message"] == {"role": "assistant", "content": TEXT, **NULLS}
        assert result["choices"][0]["finish_reason"] == "stop"
        made.output_ids[:] = made.tokenizer.encode(ONE)
        _, result = await made.post("/v1/chat/completions", messages=CHAT, tools=TOOLS, max_tokens=25)
        [choice] = result["choices"]
        assert choice["finish_reason"] == "length"
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert ARGUMENTS.startswith(arguments)
        assert len(arguments) > 2


async def test_a_forced_call_that_is_cut_off_leaves_no_content(
    tool_tokenizer: ModelTokenizer, tmp_path: Path
):
    async with make_cluster(tool_tokenizer, tmp_path, text=ONE) as made:
        for max_tokens in range(1, 12):
            body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", "max_tokens": max_tokens}
            _, result = await made.post("/v1/chat/completions", **body)
            [choice] = result["choices"]
            assert (choice["message"]["content"] or None, choice["finish_reason"]) == (None, "length")
            message, reason = joined(await made.events("/v1/chat/completions", **body))
            assert (message["content"], reason) == (None, "length")


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"tool_choice": "required"}, {ONE: False, f"{ONE}\n{ONE}": False, "now": True, "x": False}),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"now": True, "now now": False}),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, {"now": True, "Rome": False}),
        (
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
            {"now": False, "Rome": True, "Oslo": False},
        ),
        ({"tool_choice": "required"}, {"now now": True, "Rome": True, "Oslo": False}),
    ],
)
async def test_tool_choice_can_enforce_a_call(calling: Cluster, body: Any, texts: Any):
    """The grammar for the workers accepts the right calls and nothing else."""
    await calling.post("/v1/chat/completions", messages=CHAT, tools=TOOLS, max_tokens=2, **body)
    grammar = calling.prefills[0].submitted[0].prefill.request.sampling.structured_output.grammar
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    city = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "CITY"}}\n</tool_call>'
    spelled = {"now": now, "now now": f"{now}\n{now}", "Rome": city.replace("CITY", "Rome"),
               "Oslo": city.replace("CITY", "Oslo")}  # fmt: skip
    found = {text: accepts(LLMatcher.grammar_from_lark(grammar), spelled.get(text, text)) for text in texts}
    assert found == texts


async def test_a_response_format_beside_tools_allows_calls_or_an_answer(calling: Cluster):
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
              "additionalProperties": False, "$defs": {"n": {"type": "integer"}}}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    status, result = await calling.post(
        "/v1/chat/completions", messages=CHAT, tools=TOOLS, response_format=form, max_tokens=2
    )
    assert status == 200, result
    grammar = calling.prefills[0].submitted[0].prefill.request.sampling.structured_output.grammar
    texts = {'{"a": 5}': True, CALLS.partition("\n")[2].replace("°C", ""): False,
             '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>': True,
             '{"a": "x"}': False, "text": False}  # fmt: skip
    assert {text: accepts(LLMatcher.grammar_from_lark(grammar), text) for text in texts} == texts


async def test_the_arguments_of_a_strict_tool_are_enforced_without_tool_choice(calling: Cluster):
    weather, now = json.loads(json.dumps(TOOLS))
    weather["function"]["strict"] = True
    status, _ = await calling.post("/v1/chat/completions", messages=CHAT, tools=[weather, now], max_tokens=2)
    assert status == 200
    grammar = calling.prefills[0].submitted[0].prefill.request.sampling.structured_output.grammar
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    texts = {
        "An answer.": True,
        "See: " + call % ("get_weather", '{"city": "Paris"}'): True,
        "See: " + call % ("get_weather", '{"town": 5}'): False,
        call % ("now", '{"any": 1}'): True,
    }
    assert {text: accepts(LLMatcher.grammar_from_lark(grammar), text) for text in texts} == texts
    await calling.post("/v1/chat/completions", messages=CHAT, tools=TOOLS, max_tokens=2)
    assert not calling.prefills[0].submitted[1].prefill.request.sampling.HasField("structured_output")


RECURSES = """{%- macro type_of(spec) %}
{%- for t in spec.type %}{{ type_of({"type": t}) }}{% endfor %}{% endmacro %}
{%- for tool in tools or [] %}{{ type_of(tool.function.parameters) }}{% endfor %}<tool_call>
{%- for message in messages %}{{ message.content }}{{ 1 // (message.content | length) }}{% endfor %}"""
"""vLLM's template for Hermes spells a type that is a list by its entries, and `null` by its letters."""


async def test_any_failure_of_a_template_is_the_clients_error(
    small_directory: Path, tmp_path: Path, forks_fd: int, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "recurses.jinja").write_text(RECURSES)
    tokenizer = load_tokenizer(str(small_directory), chat_template=str(tmp_path / "recurses.jinja"))
    async with make_cluster(tokenizer, tmp_path, forks_fd=forks_fd) as made:
        caplog.clear()
        for content, tools, reason in (("Hi", TOOLS, "recursion"), ("", [], "division")):
            messages = [{"role": "user", "content": content}]
            for path in ("/v1/chat/completions", "/tokenize"):
                status, result = await made.post(path, messages=messages, tools=tools)
                assert (status, result["error"]["param"]) == (400, "messages")
                assert reason in result["error"]["message"]
        lines = [record.message for record in caplog.records if record.name.startswith("baton.router")]
        failed = "the model's chat template failed on a request: "
        kinds = ["RecursionError", "RecursionError", "ZeroDivisionError", "ZeroDivisionError"]
        assert lines == [failed + kind for kind in kinds]
        assert not any(record.exc_info for record in caplog.records)


async def test_errors_about_tools_name_their_field(
    cluster: Cluster, calling: Cluster, small_directory: Path, tmp_path: Path, forks_fd: int
):
    async def refused(made: Cluster, **body: Any) -> tuple[str, str]:
        status, result = await made.post("/v1/chat/completions", **{"messages": CHAT, **body})
        assert status == 400
        return result["error"]["param"], result["error"]["message"]

    param, message = await refused(cluster, tools=TOOLS)
    assert param == "tools"
    assert "chat template does not support tools" in message
    param, message = await refused(
        cluster, messages=[*CHAT, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    )
    assert param == "messages[1]"
    wrong = [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]
    param, message = await refused(calling, tools=[*TOOLS, *wrong], tool_choice="required")
    assert param == "tools[2].function.parameters"
    assert "properties must be an object" in message
    deferred = {"type": "function", "function": {"name": "f"}, "defer_loading": True}
    param, message = await refused(calling, tools=[deferred])
    assert param.startswith("tools[0]")
    assert "defer_loading is not supported" in message
    (tmp_path / "unknown.jinja").write_text("{{ tools }}{{ messages }}")
    unknown = load_tokenizer(str(small_directory), chat_template=str(tmp_path / "unknown.jinja"))
    async with make_cluster(unknown, tmp_path, forks_fd=forks_fd) as made:
        param, message = await refused(made, tools=TOOLS)
        assert "--tool-call-parser" in message
        status, _ = await made.post("/v1/chat/completions", messages=CHAT, tools=TOOLS, tool_choice="none")
        assert status == 200


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ tools }}{{ messages[0].content }}"])
async def test_a_call_can_be_forced_with_any_template(
    small_directory: Path, tmp_path: Path, forks_fd: int, template: str
):
    (tmp_path / "plain.jinja").write_text(template)
    tokenizer = load_tokenizer(str(small_directory), chat_template=str(tmp_path / "plain.jinja"))
    assert tokenizer.tool_format is None
    async with make_cluster(tokenizer, tmp_path, text=ONE, forks_fd=forks_fd) as made:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            body = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice}
            status, result = await made.post("/v1/chat/completions", **body)
            assert status == 200, result
            [call] = result["choices"][0]["message"]["tool_calls"]
            assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
            assert accepts_call(made)
            streamed, _ = joined(await made.events("/v1/chat/completions", **body))
            assert streamed["tool_calls"][0]["function"] == call["function"]
        for choice in (None, "auto"):
            status, result = await made.post("/v1/chat/completions", **body | {"tool_choice": choice})
            assert (status, result["error"]["param"]) == (400, "tools")


def accepts_call(cluster: Cluster) -> bool:
    """Whether workers got a grammar that takes a call."""
    grammar = LLMatcher.grammar_from_lark(cluster.sent.sampling.structured_output.grammar)
    return accepts(grammar, ONE.replace(', "unit": "°C"', ""))


@pytest.mark.all
async def test_the_special_tokens_of_a_format_are_parsed(directory: Path, tmp_path: Path, forks_fd: int):
    model = tmp_path / "mistral"
    model.mkdir()
    described = json.loads((directory / "tokenizer.json").read_text())
    [renamed] = [t for t in described["added_tokens"] if t["id"] == 5]
    renamed["content"] = "[TOOL_CALLS]"
    del described["model"]["vocab"][next(k for k, v in described["model"]["vocab"].items() if v == 5)]
    described["model"]["vocab"]["[TOOL_CALLS]"] = 5
    (model / "tokenizer.json").write_text(json.dumps(described))
    (model / "config.json").write_text((directory / "config.json").read_text())
    (model / "chat_template.jinja").write_text("{{ tools }}{{ messages }}")
    tokenizer = load_tokenizer(str(model), tool_call_parser="mistral")
    async with make_cluster(tokenizer, tmp_path, forks_fd=forks_fd) as made:
        made.output_ids[:] = [
            5,
            *tokenizer.encode(f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'),
            2,
        ]
        body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required"}
        _, result = await made.post("/v1/chat/completions", **body)
        [call] = result["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
        grammar = made.prefills[0].submitted[0].prefill.request.sampling.structured_output.grammar
        assert grammar.startswith('start: <[5]> "["')
        strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
        await made.post("/v1/chat/completions", messages=CHAT, tools=strict)
        grammar = made.prefills[0].submitted[1].prefill.request.sampling.structured_output.grammar
        words = LLTokenizer(json.dumps(described))
        for arguments, taken in (('{"city": "Rome"}', True), ('{"city": "Oslo"}', False)):
            call = tokenizer.encode(f'[{{"name": "get_weather", "arguments": {arguments}}}]')
            said = [*tokenizer.encode("I look."), 5, *call]
            matcher = LLMatcher(words, LLMatcher.grammar_from_lark(grammar))
            assert (matcher.try_consume_tokens(said) == len(said)) == taken
