"""Structured output in the router: what workers get to enforce, and what is refused before that."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from baton.engine.api.sampling_params import MAX_LENGTH
from baton.processes.sandbox.client import ForkServer
from baton.router.api.structured import Structure
from baton.router.child_pool import ChildPool
from baton.router.errors import InvalidRequest
from baton.router.preparation.child import fork_server
from baton.router.preparation.demand import Demand, GrammarChecker
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc import inference_pb2 as ipb
from baton.rpc import worker_pb2 as pb
from baton.rpc.stubs import InferenceStub
from tests.within import eventually

from .conftest import Cluster, accepts, forks_of

CHAT = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


DEEP = "start: r0\n" + "\n".join(f"r{i}: 'a' r{i + 1} | r{i + 1}" for i in range(3000)) + "\nr3000: 'x'"
DEEP = DEEP.replace("'", '"')  # overflows the compiler's stack


async def checked(checker: GrammarChecker, given: Structure) -> Structure:
    structure, _ = await checker.check(Demand(given, 300).question, "")
    assert structure is not None
    return structure


def as_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": as_format(SCHEMA)}, pb.StructuredOutput(json_schema=json.dumps(SCHEMA))),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, pb.StructuredOutput(regex="yes|no")),
        (
            {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
            pb.StructuredOutput(grammar=any_to_lark('root ::= "a" | "b"')),
        ),
        ({"response_format": {"type": "text"}}, None),
        (
            {
                "structured_outputs": {
                    "json": {"$schema": "http://json-schema.org/draft-04/schema#", "const": 1}
                }
            },
            pb.StructuredOutput(json_schema='{"const": 1}'),
        ),
        (  # a format that workers do not know is an annotation
            {
                "response_format": as_format(
                    {"anyOf": [{"format": "path"}, {"format": "date"}], "enum": ["format"]}
                )
            },
            pb.StructuredOutput(json_schema='{"anyOf": [{}, {"format": "date"}], "enum": ["format"]}'),
        ),
    ],
)
async def test_both_workers_get_the_structure(
    cluster: Cluster, body: Any, expected: pb.StructuredOutput | None
):
    await cluster.complete(**body)
    status, _ = await cluster.post("/v1/chat/completions", messages=CHAT, max_tokens=9, **body)
    assert status == 200
    sent = [m.prefill.request.sampling for m in cluster.prefills[0].submitted]
    sent += [m.decode.request.sampling for m in cluster.decodes[0].submitted]
    assert len(sent) == 4
    for sampling in sent:
        assert sampling.HasField("structured_output") == (expected is not None)
        assert sampling.structured_output == (expected or pb.StructuredOutput())


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"response_format": as_format({"type": "strin"})}, "response_format.json_schema.schema", "strin"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", ""),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "invalid 'json' schema"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar", "nothing"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "'x' not found"),
        ({"structured_outputs": {"grammar": 'root ::= "a'}}, "structured_outputs.grammar", ""),
        ({"structured_outputs": {"grammar": "root ::= " + 5000 * "("}}, "structured_outputs.grammar", ""),
        ({"structured_outputs": {"grammar": DEEP}}, "structured_outputs.grammar", "too much"),
        ({"structured_outputs": {"regex": MAX_LENGTH * "ab"}}, "structured_outputs.regex", "characters"),
        (
            {"structured_outputs": {"choice": MAX_LENGTH // 4 * ["abcde"]}},
            "structured_outputs.choice",
            "in all",
        ),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "characters"),
        (
            {"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/x"}}},
            "structured_outputs.json",
            "not present",
        ),
    ],
)
async def test_the_error_of_an_invalid_grammar_names_its_field(
    cluster: Cluster, body: Any, param: str, reason: str
):
    status, result = await cluster.post("/v1/completions", prompt="x", **body)
    assert status == 400
    assert result["error"]["param"] == param
    assert result["error"]["message"].startswith(param)
    assert reason in result["error"]["message"]
    assert "\n" not in result["error"]["message"]
    assert not cluster.prefills[0].submitted


DRAFT_6 = {"$schema": "http://json-schema.org/draft-06/schema#"}


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"anyOf": [{"type": "number", "exclusiveMaximum": True}], "maximum": 3}, "exclusiveMaximum"),
        ({"properties": {"a": {"type": "integer", "required": True}}}, "required"),
        ({"$defs": {"a": {"items": {"divisibleBy": 3}}}, "$ref": "#/$defs/a"}, "divisibleBy"),
        ({"extends": {"type": "string"}}, "extends"),
        ({"additionalProperties": {"disallow": "string"}}, "disallow"),
        (DRAFT_6 | {"uniqueItems": True}, "'uniqueItems' at /"),
        (DRAFT_6 | {"items": {"contains": {"type": "string"}}}, "'contains' at /items"),
        (DRAFT_6 | {"if": {"pattern": "a"}, "then": {"maxLength": 1}}, "'if' at /"),
        (DRAFT_6 | {"anyOf": [{}, {}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        (
            DRAFT_6 | {"$defs": {"a/b": {"not": {"pattern": "a"}}}, "$ref": "#/$defs/a~1b"},
            "'not' at /.defs/a~1b",
        ),
    ],
)
async def test_a_keyword_that_would_have_no_effect_is_refused_by_name(
    schema: Any, keyword: str, tokenizer: ModelTokenizer
):
    async with running_checker(tokenizer) as checker:
        with pytest.raises(InvalidRequest, match=keyword):
            await checked(checker, Structure("json_schema", json.dumps(schema), "f", strict=True))


async def test_names_and_values_are_no_keywords(tokenizer: ModelTokenizer):
    schema = {
        "properties": {"extends": {"enum": [{"disallow": 1}]}, "required": {"default": {"divisibleBy": 2}}},
        "required": ["extends"],
    }
    async with running_checker(tokenizer) as checker:
        made = await checked(checker, Structure("json_schema", json.dumps(schema), "f"))
        properties = {"extends": {"enum": [{"disallow": 1}]}, "required": {}}  # a default changes nothing
        assert json.loads(made.text) == schema | {"properties": properties}
        draft_4 = {"type": "number", "minimum": 3, "exclusiveMinimum": True}
        made = await checked(checker, Structure("json_schema", json.dumps(draft_4), "f"))
        assert [
            accepts(LLMatcher.grammar_from_json_schema(made.text), text) for text in ("3", "3.1", "4")
        ] == [False, True, True]


@pytest.mark.parametrize(
    ("regex", "taken", "refused"),
    [
        (r"\d{2}-\d", ["36-9"], ["🯸6-9", "٣6-9"]),
        (r"[^\d]+", ["a٣"], ["a3"]),
        (r"[a\-\d]", ["3", "-", "a"], ["٣", "d"]),
        (r"\D", ["٣"], ["3"]),
        (r"\w+", ["a_9Z"], ["é"]),
        (r"\W", ["é"], ["_"]),
        (r"a\sb", ["a b", "a\u00a0b", "a\tb"], ["a\u2003b"]),
        (r"\S", ["\u2003"], [" ", "\u00a0"]),
        (r"\\d", ["\\d"], ["\\3", "3"]),
        (r"[\\d]", ["d", "\\"], ["3"]),
    ],
)
async def test_classes_of_characters_are_those_of_xgrammar(
    regex: str, taken: list[str], refused: list[str], tokenizer: ModelTokenizer
):
    async with running_checker(tokenizer) as checker:
        made = await checked(checker, Structure("regex", regex, "f"))
        grammar = LLMatcher.grammar_from_regex(made.text)
        assert [text for text in taken if not accepts(grammar, text)] == []
        assert [text for text in refused if accepts(grammar, text)] == []
        with pytest.raises(InvalidRequest, match="too much to compile"):
            await checked(checker, Structure("regex", r"|".join([r"\d"] * (MAX_LENGTH // 4)), "f"))


@pytest.mark.all
async def test_a_regex_that_takes_long_is_refused():
    """With a limit that it exceeds on any machine."""
    limited = "import sys; from baton.processes.sandbox import helper; "
    limited += "from baton.router.preparation import grammar_child; "
    limited += "grammar_child.CPU_SECONDS = 0.05; "
    limited += "helper.fork_children(int(sys.argv[1]), 'test', {'grammars': grammar_child.serve}, 1 << 32)"
    server = ForkServer(["-c", limited])
    checker = GrammarChecker(server)
    with pytest.raises(InvalidRequest, match="too much to compile"):
        await checked(checker, Structure("regex", "((a{1000}){1000}){1000}", "f"))
    assert (await checked(checker, Structure("regex", "a", "f"))).text == "a"
    await checker.close()
    await server.close()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (ipb.StructuredOutputs(json='{"const": 1}'), pb.StructuredOutput(json_schema='{"const": 1}')),
        (ipb.StructuredOutputs(regex="a+"), pb.StructuredOutput(regex="a+")),
        (ipb.StructuredOutputs(choice=ipb.Choice(texts=["a", "."])), pb.StructuredOutput(regex="a|\\.")),
        (ipb.StructuredOutputs(json_object=True), pb.StructuredOutput(json_schema='{"type": "object"}')),
    ],
)
async def test_structured_outputs_over_grpc(
    cluster: Cluster, given: ipb.StructuredOutputs, expected: pb.StructuredOutput
):
    async with cluster.channel() as channel:
        generate = InferenceStub(channel).Generate
        request = ipb.GenerateRequest(text="Hi", max_tokens=5, structured_outputs=given)
        assert [message async for message in generate(request)]
        assert cluster.prefills[0].submitted[0].prefill.request.sampling.structured_output == expected
        for wrong in (ipb.StructuredOutputs(regex="(a"), ipb.StructuredOutputs()):
            request = ipb.GenerateRequest(text="Hi", structured_outputs=wrong)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                _ = [message async for message in generate(request)]
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "structured_outputs" in (refusal.value.details() or "")
    assert len(cluster.prefills[0].submitted) == 1


@contextlib.asynccontextmanager
async def running_checker(tokenizer: ModelTokenizer) -> AsyncIterator[GrammarChecker]:
    server = fork_server("baton: test", tokenizer, forks_of(tokenizer))
    checker = GrammarChecker(server)
    yield checker
    await checker.close()
    await server.close()


@pytest.mark.all
async def test_a_valid_structure_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tokenizer: ModelTokenizer):
    compiled = []
    original = ChildPool.ask

    async def ask(self: ChildPool, key: str, demand: bytes, *, too_much: InvalidRequest) -> Any:
        compiled.append(json.loads(demand)["answer"]["text"])
        return await original(self, key, demand, too_much=too_much)

    monkeypatch.setattr(ChildPool, "ask", ask)
    async with running_checker(tokenizer) as checker:
        for text in ("a", "b", "a", "a"):
            await checked(checker, Structure("regex", text, "f"))
        assert compiled == ["a", "b"]
        for _ in range(2):
            with pytest.raises(InvalidRequest):
                await checked(checker, Structure("regex", "(", "f"))
        for i in range(100):
            await checked(checker, Structure("regex", str(i), "f"))
        await checked(checker, Structure("regex", "a", "f"))
        assert compiled.count("a") == 2, "what was valid long ago is forgotten"


async def test_a_cancelled_check_does_not_affect_the_next(tokenizer: ModelTokenizer):
    async with running_checker(tokenizer) as checker:
        slow = asyncio.create_task(checked(checker, Structure("regex", "((a{1000}){1000}){1000}", "f")))
        await eventually(lambda: checker._children._slots._running)
        slow.cancel()
        assert await asyncio.gather(slow, return_exceptions=True)
        assert (await checked(checker, Structure("regex", "a", "f"))).text == "a"
