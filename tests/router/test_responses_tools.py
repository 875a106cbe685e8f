"""Tools of /v1/responses beside functions: namespaces, custom tools, a local shell, searches of a client."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from baton.router.api.openai_responses.body import ResponsesBody
from baton.router.api.openai_responses.lark import MAX_REGEX, regex_of
from baton.router.api.openai_responses.tools import CustomInput
from baton.router.api.validation import parse
from baton.router.endpoints.stored_responses import StoredResponse, StoredResponses
from baton.router.errors import BodyTooLarge, InvalidRequest, NotFound
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer

from .conftest import Cluster, accepts, make_cluster, shared_forks
from .test_tools import TEMPLATE

PATH = "/v1/responses"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
ASK = {"type": "function", "name": "ask", "parameters": {"type": "object", "properties": {"a": {}}}}
TEAM = {"type": "namespace", "name": "team", "description": "helpers", "tools": [ASK]}
PATCH = {"type": "custom", "name": "patch", "description": "Changes files."}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
SHELL = {"type": "local_shell"}
TEXT = 'line "one"\n\\two 😀'


@pytest.fixture(scope="module")
def tool_tokenizer(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelTokenizer]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    made = load_tokenizer(str(directory), chat_template=str(template))
    with shared_forks(made):
        yield made


async def events_of(cluster: Cluster, **body: Any) -> list[dict[str, Any]]:
    async with cluster.http.post(cluster.url + PATH, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        raw = (await response.read()).decode()
    return [json.loads(each.partition("data: ")[2]) for each in raw.split("\n\n") if each]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = {
    "team__ask": ({"a": 1}, {"type": "function_call", "name": "ask", "namespace": "team",
                  "arguments": '{"a": 1}'}),
    "patch": ({"input": TEXT}, {"type": "custom_tool_call", "name": "patch", "input": TEXT}),
    "local_shell": ({"command": ["ls"]}, {"type": "local_shell_call",
                    "action": {"type": "exec", "command": ["ls"], "env": {}}}),
    "tool_search": ({"query": "x"}, {"type": "tool_search_call", "execution": "client",
                    "arguments": {"query": "x"}}),
}  # fmt: skip


@pytest.fixture
async def calling(tool_tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    """A cluster whose model calls each of the tools."""
    text = "".join(call(name, **arguments) for name, (arguments, _) in CALLS.items())
    async with make_cluster(tool_tokenizer, tmp_path, text=text) as made:
        yield made


@pytest.mark.all
async def test_each_tool_is_a_function_for_the_model_and_its_call_an_item_of_its_kind(calling: Cluster):
    tools = [TEAM, PATCH, SHELL, SEARCH, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}]
    status, response = await calling.post(PATH, input="Go", tools=tools)
    assert status == 200, response
    described = json.loads(calling.prompt.partition("</tool_call>: ")[2].partition("<|im_end|>")[0])
    assert [tool["function"]["name"] for tool in described] == [*CALLS]
    for item, (_, expected) in zip(response["output"], CALLS.values(), strict=True):
        assert {key: item.get(key) for key in expected} == expected
    assert response["tools"][0]["tools"][0]["name"] == "ask", "the response repeats what was sent"

    streamed = await events_of(calling, input="Go", tools=tools)
    for event in streamed:
        EVENT.validate_python(event)
    assert [item | {"id": ""} for item in streamed[-1]["response"]["output"]] == [
        item | {"id": "", "call_id": new["call_id"]}
        for item, new in zip(response["output"], streamed[-1]["response"]["output"], strict=True)
    ]
    deltas = [
        event["delta"] for event in streamed if event["type"] == "response.custom_tool_call_input.delta"
    ]
    assert "".join(deltas) == TEXT
    assert len(deltas) > 1
    done = [event for event in streamed if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == streamed[-1]["response"]["output"]

    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
        for item in response["output"]
    ]
    results[1]["type"] = "custom_tool_call_output"
    results[2] = {"type": "local_shell_call_output", "id": results[2]["call_id"], "output": "done"}
    results[3] = {"type": "tool_search_output", "call_id": results[3]["call_id"], "tools": [ASK]}
    history = [{"role": "user", "content": "Go"}, *response["output"], *results]
    status, second = await calling.post(PATH, input=history, tools=tools)
    assert status == 200, second
    for name, (arguments, _) in CALLS.items():
        shown = [json.loads(each) for each in re.findall("<tool_call>({.*?})</tool_call>", calling.prompt)]
        assert {"name": name, "arguments": arguments} in shown
    assert calling.prompt.count("<|im_start|>tool\n") == 4
    status, _ = await calling.post(PATH, input=results, previous_response_id=response["id"], tools=tools)
    assert status == 200


@pytest.mark.all
async def test_tools_that_items_describe_can_be_called_and_leave_the_beginning_of_the_prompt(
    calling: Cluster,
):
    """So the prefix of the conversation stays cached."""
    before = [{"role": "user", "content": "Go"}]
    await calling.post(PATH, input=before, tools=[PATCH])
    head = calling.prompt.partition("<|im_start|>user")[0]
    more = {"type": "additional_tools", "role": "developer", "tools": [TEAM]}
    _, response = await calling.post(PATH, input=[*before, more], tools=[PATCH])
    assert calling.prompt.startswith(head)
    assert '"name": "team__ask"' in calling.prompt.removeprefix(head)
    assert response["output"][0]["namespace"] == "team"
    status, _ = await calling.post(
        PATH, input=[*before, more], tools=[PATCH], tool_choice={"type": "function", "name": "ask"}
    )
    assert status == 200


async def test_functions_that_wait_for_a_search_are_not_shown(calling: Cluster):
    deferred = {**ASK, "defer_loading": True}
    for tools, shown in (
        ([SEARCH, deferred], False),
        ([{"type": "tool_search"}, deferred], True),
        ([deferred], True),
    ):
        await calling.post(PATH, input="Go", tools=tools)
        assert ('"ask"' in calling.prompt) == shown
        assert "defer_loading" not in calling.prompt


async def test_a_grammar_constrains_the_input_of_a_custom_tool(calling: Cluster):
    definition = 'start: "+" /[a-z]+/ LF\n%import common.LF'
    for syntax, text in (("lark", definition), ("regex", r"\+[a-z]+\n")):
        form = {"type": "grammar", "syntax": syntax, "definition": text}
        for choice in ("required", {"type": "custom", "name": "patch"}):
            tools = [{**PATCH, "format": form}]
            status, response = await calling.post(PATH, input="Go", tools=tools, tool_choice=choice)
            assert status == 200, response
            grammar = calling.sent.sampling.structured_output.grammar
            assert accepts(grammar, call("patch", input="+abc\n"))
            assert not accepts(grammar, call("patch", input="+ABC\n"))
    for syntax, text in (("lark", "begin: x"), ("regex", "("), ("lark", 'start: "a')):
        form = {"type": "grammar", "syntax": syntax, "definition": text}
        status, response = await calling.post(
            PATH, input="Go", tools=[{**PATCH, "format": form}], tool_choice="required"
        )
        assert status == 400, response
        assert response["error"]["param"].startswith("tools")


PATCHES = """
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Add File: " name LF add+ | "*** Delete File: " name LF -> gone
?name: /(.+)/
add: "+" /(.*)/ LF  // a line
%import common.LF
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (PATCHES, ["*** Begin Patch\n*** Add File: a.txt\n+x\n+\n*** Delete File: b\n*** End Patch"],
         ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\nx\n*** End Patch", "x"]),
        ('start: A ~ 2 | "b"i [C]\nA: "x".."z"\nC.2: /c\\//s', ["xz", "B", "bc/"], ["x", "bc", "xyz"]),
        ('start: NUMBER (OP NUMBER)*\nOP: "+" | "-"\n%import common (NUMBER, WS_INLINE)\n%ignore WS_INLINE',
         ["1", " 1 + 2.5 - 3e4 "], ["1 +", "+", ""]),
        ('start: "a\\n\\"" | ', ['a\n"', ""], ["a"]),
        ('start: "a" "b"\n%ignore "//"  // between them', ["ab", "a//b"], ["a/b"]),
        ("start: INT\n%import common.INT  # a comment", ["12"], ["x"]),
        ("?start: _x\n_x: WORD\n%import common.CNAME -> WORD", ["a_1"], ["1a"]),
    ],
)  # fmt: skip
def test_a_grammar_becomes_a_regular_expression(grammar: str, texts: list[str], others: list[str]):
    regex = regex_of(grammar)
    assert regex is not None
    assert all(re.fullmatch(regex, text) for text in texts)
    assert not any(re.fullmatch(regex, text) for text in others)


BALANCED = 'start: pair*\npair: "(" start ")"'
"""No regular expression has the same texts."""


def custom(name: str, grammar: str) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": "lark", "definition": grammar}
    return {"type": "custom", "name": name, "format": form}


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ("auto", "/tools/2/format,/tools/3/tools/0/format"),
        ("none", None),
        ({"type": "custom", "name": "a"}, None),
        ({"type": "custom", "name": "b"}, "/tools/2/format"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "g__b"}]},
            "/tools/3/tools/0/format",
        ),
    ],
)
async def test_the_header_names_grammars_of_custom_tools_without_a_regular_expression(
    calling: Cluster, choice: Any, named: str | None
):
    tools = [
        {"type": "web_search"},
        custom("a", 'start: "a"+'),
        custom("b", BALANCED),
        {"type": "namespace", "name": "g", "tools": [custom("b", BALANCED)]},
    ]
    body = {"input": "x", "tools": tools, "tool_choice": choice}
    async with calling.http.post(calling.url + PATH, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.headers.get("x-baton-unenforced") == named


def test_a_grammar_without_a_regular_expression_has_none():
    assert regex_of('start: "(" start ")" | ""') is None
    assert regex_of("start: x\n%declare x") is None
    double = "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(40))
    assert regex_of(f'start: a0\n{double}a40: "x"') is None, "its length is bounded"
    assert regex_of("start: " + "(" * 9000 + '"x"' + ")" * 9000) is None
    long = regex_of("start: " + '"xyz" ' * 2000)
    assert long is not None
    assert len(long) < MAX_REGEX
    assert regex_of("start: INT\n%") is None
    spaces = "start: INT\n%import common.INT" + " " * 4_000 + "!"
    repeated = 'start: "a"' + "?" * 8_000
    wrong = ["", "x", "begin: x", "start: y", 'start: "a', "start: )", "start: *", 'start: "ab".."c"']
    for grammar in (*wrong, spaces, repeated, 'start: "a"+?'):
        with pytest.raises(ValueError, match=r"."):
            regex_of(grammar)


@pytest.mark.parametrize("text", ["", TEXT, "😀" * 3, "plain"])
@pytest.mark.parametrize("escaped", [True, False])
def test_each_split_of_an_input_gives_the_same_text(text: str, escaped: bool):
    arguments = json.dumps({"input": text}, ensure_ascii=escaped)
    for cut in range(len(arguments) + 1):
        read = CustomInput()
        assert read.push(arguments[:cut]) + read.push(arguments[cut:]) == text
    assert "".join(map(CustomInput().push, arguments)) == text
    assert "".join(map(CustomInput().push, '{"other": 1}')) == '{"other": 1}'


async def test_a_reference_stands_for_a_stored_item(tool_tokenizer: ModelTokenizer, tmp_path: Path):
    async with (
        make_cluster(tool_tokenizer, tmp_path, text="I look." + call("patch", input="x")) as made,
        openai.AsyncOpenAI(base_url=made.url + "/v1", api_key="any", max_retries=0) as api,
    ):
        tools: Any = [PATCH]
        first = await api.responses.create(input="Go", tools=tools)
        output: Any = [item.to_dict() for item in first.output]
        user: Any = {"role": "user", "content": "Go"}
        result: Any = {"type": "custom_tool_call_output", "call_id": output[-1]["call_id"], "output": "ok"}
        await api.responses.create(input=[user, *output, result], tools=tools)
        whole = made.prompt
        references: Any = [{"type": "item_reference", "id": item["id"]} for item in output]
        second = await api.responses.create(input=[user, *references, result], tools=tools)
        assert made.prompt == whole
        bare: Any = [{"id": item["id"]} for item in output]
        await api.responses.create(input=[user, *bare, result], tools=tools)
        assert made.prompt == whole
        await api.responses.delete(first.id)
        await api.responses.create(input="On", tools=tools, previous_response_id=second.id)
        assert whole.partition("<|im_start|>assistant\n")[0] in made.prompt, "kept with a later one"
        with pytest.raises(openai.NotFoundError, match=output[0]["id"]):
            await api.responses.create(input=[user, *references, result], tools=tools)
        unstored = await api.responses.create(input="Go", store=False)
        gone: Any = [user, {"type": "item_reference", "id": unstored.output[0].id}]
        with pytest.raises(openai.NotFoundError):
            await api.responses.create(input=gone)


def test_references_are_counted_before_they_are_resolved():
    stored = StoredResponses(lambda: {"k"})
    output = b'[{"id":"big","content":"' + b"x" * 1_000 + b'"},{"id":"small"}]'
    stored.put("k", "resp_1", StoredResponse(b"{}", (b"[]", output), False, ("big", "small")))
    assert stored.items("k", ["small", "big"], 2_000)["small"] == b'{"id":"small"}'
    for ids, most in ((["big", "big"], 2_000), (["small"], 1_000)):
        with pytest.raises(BodyTooLarge):
            stored.items("k", ids, most)
    clock = [0.0]
    old = StoredResponses(lambda: {"k"}, lambda: clock[0])
    old.put("k", "resp_1", StoredResponse(b"{}", (b"[]", output), False, ("big", "small")))
    clock[0] = 1e9
    with pytest.raises(NotFound):
        old.items("k", ["small"], 2_000)


async def test_an_image_as_a_result_is_a_text_for_a_model_without_images(calling: Cluster):
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    _, first = await calling.post(PATH, input="Go", tools=[PATCH])
    output = [{"type": "input_text", "text": "Look:"}, image]
    result = {"type": "custom_tool_call_output", "output": output}
    result["call_id"] = first["output"][1]["call_id"]
    status, response = await calling.post(
        PATH, input=[result], previous_response_id=first["id"], tools=[PATCH]
    )
    assert status == 200, response
    assert "Look:\n[an image, which this model cannot see]" in calling.prompt
    status, _ = await calling.post(PATH, input=[{"role": "user", "content": [image]}])
    assert status == 400, "the client may ask another model"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (
            {"type": "namespace", "name": "n" * 500, "tools": [{"type": "function", "name": "f" * 11}]},
            "tools[0]",
        ),
        (
            {"type": "tool_search", "execution": "client", "parameters": {"type": "array"}},
            "tools[0].parameters",
        ),
    ],
)
def test_a_tool_that_makes_no_function_is_refused_by_its_place(tool: dict[str, Any], param: str):
    body = {"input": "Hi", "tools": [tool]}
    with pytest.raises(InvalidRequest) as refused:
        parse(ResponsesBody, json.dumps(body).encode())
    assert refused.value.param == param
