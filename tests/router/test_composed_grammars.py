"""The grammars that a router composes for workers: a child compiles them as a whole, and no text of a client
means more in them than it says."""

import json
import random
import re
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from baton.grammars.compiler import TOO_MUCH, error_of, for_texts
from baton.grammars.trials import Trials
from baton.router.api.messages import Tool
from baton.router.api.structured import Structure
from baton.router.errors import InvalidRequest, Unsupported
from baton.router.preparation.demand import Calls, Demand, OfferedTool
from baton.router.preparation.grammar_child import answer_to
from baton.router.schemas import enforce
from baton.router.schemas.enforce import enforceable
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.tools.formats import FORMATS
from baton.router.tools.marked import MarkedParser
from baton.router.tools.regex import anywhere, literal

from .conftest import Cluster, accepts
from .test_structured import running_checker

VOCAB = 300


def demand(
    name: str,
    parameters: Any,
    *,
    answer: str | None = None,
    free: bool = False,
    many: bool = True,
    strict: bool = False,
) -> Demand:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tool = Tool.model_validate({"type": "function", "function": function})
    offered = OfferedTool(tool, "tools[0].function.parameters", enforced=True)
    structure = None if answer is None else Structure("json_schema", answer, "response_format")
    in_messages = name == "openai"
    return Demand(structure, VOCAB, Calls(name, (offered,), many, free), in_messages)


def properties(value: Any, **more: Any) -> dict[str, Any]:
    return {"properties": {"a": value}, "required": ["a"], **more}


# ------------------------------------------------------------ texts of clients


@pytest.mark.parametrize(
    ("regex", "taken", "refused"),
    [
        (r"a\\/b", ["a\\/b"], ["a/b", "a\\"]),
        (r"a\\\/b", ["a\\/b"], ["a/b"]),
        ("[/]//", ["///"], ["//"]),
        (r"a\/ | /b", ["a/ ", " /b"], ["a/", "b"]),
        ("a//b", ["a//b"], ["a"]),
        ("a\nb", ["a\nb"], ["ab"]),
    ],
)
def test_a_regular_expression_is_one_literal(regex: str, taken: list[str], refused: list[str]):
    grammar = LLMatcher.grammar_from_lark(f"start: {literal(regex)} ")
    assert [text for text in taken if not accepts(grammar, text)] == []
    assert [text for text in refused if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "pattern",
    [
        "b", "^b", "b$", "^b$", "^a|b$", r"a\$", r"^a\\$", "(a|b)c", "^(a|b)$", "[|]", "[]|]b", "[^]|]b", "",
        "^$", "a{2}", r"^\^a", "[$]", "a|", "^[a[b|]]$", "(?:a|^)b", "(?i)^a|b",
    ],
)  # fmt: skip
def test_a_pattern_matches_as_in_json(pattern: str):
    """Or it is refused in both forms."""
    as_text = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    texts = ["", *(x + y + z for x in ("", "a", "b") for y in "abc$|^]\\" for z in ("", "b", "c"))]
    try:
        bare = LLMatcher.grammar_from_lark(f"start: {literal(anywhere(pattern))}")
    except ValueError:
        return
    if LLMatcher.validate_grammar(bare):
        return
    assert [text for text in texts if accepts(bare, text) != accepts(as_text, json.dumps(text))] == []


UNSAYABLE: list[dict[str, Any]] = [
    properties({"type": "string", "minLength": '0}/ | "evil" | /b{1'}),
    properties({"type": "string", "maxLength": 2.5}),
    properties({"type": "string", "minLength": True}),
    properties({"$ref": "#/properties/b"}),
    properties({"$ref": "#anchor"}, **{"$defs": {"b": {"$anchor": "anchor", "enum": ["x"]}}}),
    properties({"$id": "http://x/y", "$ref": "#/$defs/b", "$defs": {"b": {"enum": ["x"]}}},
               **{"$defs": {"b": {"enum": ["y"]}}}),
    {"$ref": "#/$defs/b", "required": ["a"], "$defs": {"b": properties({"type": "integer"})}},
    properties({"enum": ["x"], "allOf": [{"enum": ["y"]}], "type": "string"}),
    properties({"enum": ["x"], "const": "y", "type": "string"}),
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.written.pair])
async def test_what_a_format_cannot_say_is_refused_by_name(name: str, tokenizer: ModelTokenizer):
    async with running_checker(tokenizer) as checker:
        for parameters in UNSAYABLE:
            with pytest.raises(
                (InvalidRequest, Unsupported), match=r"tools(\[0\].function.parameters)?: "
            ) as refusal:
                await checker.check(demand(name, parameters, strict=True).question, "")
            assert "too much" not in str(refusal.value), parameters


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.written.pair])
async def test_what_a_format_cannot_say_is_left_to_the_model(name: str, tokenizer: ModelTokenizer):
    """Without `strict`. The rest is enforced."""
    either: dict[str, Any] = {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]}
    whole = properties({"enum": ["x"]}, dependentRequired={"b": ["c"]}, **either)
    cases = [
        (whole, {"/anyOf", "/dependentRequired"}, True),
        (properties({"$ref": "#b"}, **{"$defs": {"b": {"$anchor": "b", "enum": ["x"]}}}), {""}, False),
    ]
    async with running_checker(tokenizer) as checker:
        for parameters, places, is_enforced in cases:
            made, unenforced = await checker.check(demand(name, parameters).question, "")
            assert set(unenforced) == {"/tools/0/function/parameters" + place for place in places}
            assert made is not None
            assert ('"x"' in made.text) == is_enforced


@pytest.mark.parametrize(
    ("value", "taken", "refused"),
    [
        ({"$ref": "#/$defs/b", "maxLength": 2, "description": "x"}, ["xy"], ["x", "xyz", "ab"]),
        ({"allOf": [{"$ref": "#/$defs/c"}], "default": "r"}, ["r", "g"], ["b"]),
        ({"type": "string", "pattern": r"^\d/\\$"}, ["3/\\"], ["٣/\\", "33/\\"]),
        ({"$ref": "#/$defs/%20"}, ["y"], ["z"]),
        ({"enum": ['"', "\\", "/", "\x7f", "é"]}, ['"', "\\", "/", "\x7f", "é"], ["e"]),
    ],
)  # fmt: skip
async def test_strings_of_a_format_without_json_have_the_schema(
    value: Any, taken: list[str], refused: list[str], tokenizer: ModelTokenizer
):
    definitions = {
        "b": {"type": "string", "pattern": "^x", "minLength": 2}, "c": {"enum": ["r", "g"], "type": "string"},
        " ": {"enum": ["y"]}, "%20": {"enum": ["z"]},
    }  # fmt: skip
    async with running_checker(tokenizer) as checker:
        asked = demand("glm47", properties(value, **{"$defs": definitions}))
        made, _ = await checker.check(asked.question, "")
    assert made is not None
    grammar = LLMatcher.grammar_from_lark(made.text)

    def takes(text: str) -> bool:
        call = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
        return accepts(grammar, call)

    assert [text for text in taken if not takes(text)] == []
    assert [text for text in refused if takes(text)] == []


@pytest.mark.parametrize(
    "name", [name for name, form in FORMATS.items() if form.written.pair and form.written.value_end]
)
@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ({"type": "string", "minLength": 2}, ["aa", "a<"]),
        ({"type": "string", "pattern": "a$"}, ["a", "aba"]),
    ],
)
async def test_a_text_with_schema_never_holds_what_ends_it(
    name: str, value: Any, taken: list[str], tokenizer: ModelTokenizer
):
    """A parser would read what precedes the mark alone."""
    written = FORMATS[name].written
    mark = written.value_end.strip()
    async with running_checker(tokenizer) as checker:
        made, unenforced = await checker.check(demand(name, properties(value)).question, "")
    assert made is not None
    assert not unenforced
    grammar = LLMatcher.grammar_from_lark(made.text)
    texts = [*taken, mark, f"a{mark}b", f"{mark}aa", f"a{mark}aa", f"a{mark}"]
    assert [text for text in texts if accepts(grammar, written.text([("f", {"a": text})]))] == taken


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", [["string"], ["string", "integer", "null"]])
async def test_each_text_of_an_enum_that_may_be_written_is_read(
    name: str, kind: list[str], tokenizer: ModelTokenizer
):
    """Also one with the tags of another argument, or one that looks like a number."""
    form = FORMATS[name]
    key = (form.written.pair or "").partition("{value}")[0].replace("{key}", "b")
    end = form.written.value_end
    tags = [key, *form.specials, *form.tokens, end, getattr(form, "mark", "")]
    texts = [
        "a",
        f"a{end[:2]}b",
        f"a{end}b",
        "5",
        "null",
        "",
        "\n",
        *(before + tag + "x" for tag in tags for before in ("", "y\n")),
    ]
    values = [*texts, 7]
    parameters = properties({"type": kind, "enum": values})
    parameters["properties"]["b"] = {"type": "string"}
    asked = demand(name, parameters)
    async with running_checker(tokenizer) as checker:
        made, unenforced = await checker.check(asked.question, "")
    assert made is not None
    assert not unenforced
    grammar = LLMatcher.grammar_from_lark(made.text)
    assert asked.calls is not None
    tool = asked.calls.tools[0].tool
    written = []
    for value in values:
        text = form.written.text([("f", {"a": value})])
        if accepts(grammar, text):
            parser = form([tool])
            parts = parser.push(text) + parser.finish(ended=True)
            assert json.loads("".join(part.text for part in parts if part.kind == "call"))["a"] in values
            assert '"b"' not in "".join(part.text for part in parts), value
            written.append(value)
    assert {"a", f"a{end[:2]}b", ""} <= {*written}


async def test_a_text_that_must_hold_what_ends_it_is_refused(tokenizer: ModelTokenizer):
    asked = demand("glm45", properties({"const": "a</arg_value>"}), strict=True)
    async with running_checker(tokenizer) as checker:
        with pytest.raises(Unsupported, match=r"tools: f cannot .* has no form of 'a</arg_value>' that"):
            await checker.check(asked.question, "")


@pytest.mark.parametrize(
    "name", [name for name, form in FORMATS.items() if form.written.pair and getattr(form, "pairs", None)]
)
def test_each_key_that_may_be_written_is_read(name: str):
    form = FORMATS[name]
    assert issubclass(form, MarkedParser)
    pairs, pair = form.pairs, form.written.pair
    assert pairs is not None
    assert pair is not None
    may = [key for key in ('"', "'", "a'", "'a'", "é", "a.b", "/") if re.fullmatch(form.written.keys, key)]
    assert {"é", "a.b", "/"} <= set(may)
    for key in may:
        text = pair.replace("{key}", key).partition(pairs.before_key)[2]
        ends = [at + 1 for at, character in enumerate(text) if character == ">"]
        read = next(filter(None, (pairs.after_key.fullmatch(text[:end]) for end in ends)))
        assert read["key"] == key


async def test_arguments_have_the_order_of_the_schema_and_then_of_required(tokenizer: ModelTokenizer):
    """As in JSON."""
    flag = {"type": "boolean"}
    parameters = {"properties": {"c": flag, "a": flag}, "required": ["z", "a"]}
    async with running_checker(tokenizer) as checker:
        made, _ = await checker.check(demand("glm47", parameters).question, "")
    assert made is not None
    grammar = LLMatcher.grammar_from_lark(made.text)

    def takes(names: str) -> bool:
        pairs = (f"<arg_key>{name}</arg_key><arg_value>true</arg_value>" for name in names)
        return accepts(grammar, f"<tool_call>f{''.join(pairs)}</tool_call>")

    taken = [names for names in ("caz", "az", "acz", "zca", "ca", "z", "cz", "") if takes(names)]
    assert taken == ["caz", "az"]


# ------------------------------------------------------------ whole grammars


async def test_a_grammar_whose_parts_compile_is_refused_if_the_whole_does_not(
    cluster: Cluster, tokenizer: ModelTokenizer
):
    """The parameters alone are JSON, which compiles. The format makes of them a chain of rules that overflows
    the stack of a compiler."""
    many = {"properties": {f"p{i}": {"type": "integer"} for i in range(430)}}
    async with running_checker(tokenizer) as checker:
        assert (await checker.check(demand("hermes", many).question, "")).structure is not None
        with pytest.raises(InvalidRequest, match=f"tools: {TOO_MUCH}"):
            await checker.check(demand("qwen3_coder", many).question, "")
        made, _ = await checker.check(demand("qwen3_coder", properties({"type": "integer"})).question, "")
    assert made is not None, "the child works again"


def test_schemas_compile_as_parts_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    """Alone, too, only if the whole does not compile: so an error names the field, and what the compiler does
    not take is left out."""
    compiled = list[str]()

    def counted(alphabet: LLTokenizer, kind: str, text: str) -> str:
        compiled.append(text)
        return error_of(alphabet, kind, text)

    monkeypatch.setattr(enforce, "error_of", counted)
    taken = answer_to(demand("hermes", properties({"type": "string"})).question.text)
    structure, unenforced = msgspec.msgpack.decode(taken)
    assert (structure["kind"], unenforced, compiled) == ("grammar", [], [])
    backwards = properties({"type": "string", "pattern": r"(a)\1"})
    _, unenforced = msgspec.msgpack.decode(answer_to(demand("hermes", backwards).question.text))
    assert unenforced == ["/tools/0/function/parameters/properties/a/pattern"]
    assert compiled


# ------------------------------------------------------------ fuzz

NAMES = ["a", "b/c", "d e", "$ref", "%20", "x~1y", '"', "\\", "é", "items"]
TEXTS = ["", "x", "/", "\\", "\\/", '"', "</parameter>", "\n", "\x7f", "é", "}} | /x/", "<[5]>", "a|b", "^$"]
PATTERNS = [
    "^a+$", "[/]", r"\\/", r"\/", "a|b", r"\d{2}", "(", "[", "\\", "(?=a)", "a{1000}{1000}", "^(a|b)*$", "]",
    "$", "(?i)x", ".*" * 20, r"\u0041", "[^]",
]  # fmt: skip
COUNTS: list[Any] = [0, 1, 3, 2.0, -1, 1.5, True, "2", None, 1e300, 10**20, [], "0}/ | /"]
KINDS: list[Any] = [
    "string",
    "integer",
    "number",
    "boolean",
    "null",
    "array",
    "object",
    "strin",
    5,
    ["string", "null"],
]
REFERENCES = ["#/$defs/a", "#/$defs/b~1c", "#/$defs/%20", "#", "#x", "y", "#/$defs/é"]


OF_CALLS = "<tool_call>", "</tool_call>"
OF_ARGUMENTS = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
ADDED = {
    "hermes": OF_CALLS,
    "qwen3_coder": OF_CALLS,
    "glm45": OF_CALLS + OF_ARGUMENTS,
    "glm47": OF_CALLS + OF_ARGUMENTS,
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
}
"""Tokens of Qwen 3, GLM 4.5 and MiniMax M2, which their tokenizers do not call special."""


@pytest.mark.parametrize("text", ["", "I look. "])
@pytest.mark.parametrize("name", ADDED)
def test_a_mark_that_is_a_token_is_written_as_one(name: str, text: str):
    form = FORMATS[name]
    letters = sorted(ByteLevel.alphabet())
    model = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyrefly: ignore[read-only]
    model.decoder = ByteLevelDecoder()  # pyrefly: ignore[read-only]
    model.add_tokens(["<end>", *ADDED[name]])
    enum = ["x", "<end>"]
    parameters = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": enum}}}
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}})

    def spell(mark: str) -> str:
        return f"<[{model.token_to_id(mark)}]>" if mark in ADDED[name] else json.dumps(mark)

    grammar = form.grammar([tool], many=True, spell=spell, text=bool(text))
    matcher = LLMatcher(LLTokenizer(for_texts(model.to_str()), eos_token=model.token_to_id("<end>")), grammar)
    written = text + form.written.text([("f", {"a": "<b> & c", "b": "x"}), ("f", {"a": "d", "b": "<end>"})])
    before, _, after = written.partition("<end>")
    of_text = model.encode("<en").ids + model.encode("d>").ids
    for token in model.encode(before).ids + of_text + model.encode(after).ids:
        bits = matcher.compute_bitmask()
        assert bits[token // 8] >> token % 8 & 1, (grammar, token)
        assert matcher.consume_token(token), (grammar, matcher.get_error())
    assert matcher.is_accepting()


def drawn(rng: random.Random, depth: int = 3) -> Any:
    """A schema, often a wrong one."""
    if depth == 0 or rng.random() < 0.05:
        return rng.choice([{}, True, False, {"type": "string"}, {"type": "integer"}, None, 7, "x"])
    schema: dict[str, Any] = {}
    for _ in range(rng.choice([1, 1, 2, 3])):
        name, value = rng.choice(
            [
                ("type", lambda: rng.choice(KINDS[:6] * 3 + KINDS)),
                ("enum", lambda: rng.sample([*TEXTS, 5, None, 1.5, {"a": 1}], 3)),
                ("const", lambda: rng.choice([*TEXTS, 5, None])),
                ("pattern", lambda: rng.choice(PATTERNS)),
                (rng.choice(["minLength", "maxLength", "minItems", "maxItems"]), lambda: rng.choice(COUNTS)),
                (rng.choice(["minimum", "multipleOf"]), lambda: rng.choice([0, 2, 7, 0.5, *COUNTS])),
                ("format", lambda: rng.choice(["date", "uuid", "path", "", 5, "ipv4"])),
                ("$ref", lambda: rng.choice(REFERENCES)),
                (rng.choice(["anyOf", "oneOf", "allOf"]), lambda: [drawn(rng, depth - 1) for _ in range(2)]),
                ("items", lambda: drawn(rng, depth - 1)),
                ("properties", lambda: {name: drawn(rng, depth - 1) for name in rng.sample(NAMES, 2)}),
                ("required", lambda: rng.sample(NAMES, 2)),
                ("additionalProperties", lambda: rng.choice([False, True, drawn(rng, depth - 1)])),
                (rng.choice(["$anchor", "not", "if", "$schema"]), lambda: rng.choice(TEXTS)),
                ("$id", lambda: rng.choice(["z", 5])),
            ]
        )  # fmt: skip
        schema[name] = value()
    return schema


def parameters_of(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(NAMES if rng.random() < 0.2 else ["a", "b", "c", "items"], rng.choice([0, 1, 2, 3]))
    schema: dict[str, Any] = {"properties": {name: drawn(rng) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.5]
    schema["$defs"] = {name: drawn(rng, 1) for name in ("a", "b/c", " ", "%20")}
    if rng.random() < 0.2 and isinstance(more := drawn(rng, 1), dict):
        schema |= more | {"$id": "http://x/y"}  # with a $id as in its parts it would be another schema
    schema.pop("type", None)
    return schema


def spoken(rng: random.Random, alphabet: LLTokenizer, grammar: str) -> str | None:
    """A random output of a grammar. None: it did not end."""
    matcher = LLMatcher(alphabet, grammar, log_level=0)
    said = bytearray()
    while len(said) < 2000:
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.5):
            return said.decode(errors="replace")
        mask = matcher.compute_bitmask()
        known = [byte for byte in range(0x09, 0xFF) if mask[byte // 8] >> byte % 8 & 1]
        if not known or matcher.is_error():
            return None
        said.append(rng.choice([byte for byte in known if 0x20 < byte < 0x7F] or known))
        matcher.consume_token(said[-1])
    return None


@pytest.mark.all
@pytest.mark.parametrize(
    ("seed", "count"),
    [(1, 150), pytest.param(3, 6_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])],
)
async def test_composed_grammars_of_hostile_schemas(tokenizer: ModelTokenizer, seed: int, count: int):
    """What a child has compiled, a worker compiles, too. Each output is a call that the schema allows."""
    rng, alphabet, trials = random.Random(seed), LLTokenizer("byte"), Trials(VOCAB)
    made = called = 0
    async with running_checker(tokenizer) as checker:
        for _ in range(count):
            name, schema = rng.choice(list(FORMATS)), parameters_of(rng)
            answer = None if rng.random() < 0.7 else json.dumps(drawn(rng))
            asked = demand(name, schema, answer=answer, free=answer is None and rng.random() < 0.3)
            try:
                structure, unenforced = await checker.check(asked.question, "")
            except (InvalidRequest, Unsupported):
                continue
            if structure is None:
                continue
            made += 1
            assert trials.try_(structure.kind, structure.text).error == ""
            assert asked.calls is not None
            said = spoken(rng, alphabet, LLMatcher.grammar_from_lark(structure.text))
            if said is None or name == "openai" or answer is not None or asked.calls.free:
                continue
            if not schema["properties"] and FORMATS[name].written.pair:
                continue  # names of any kind, of which a parser takes fewer
            parser = FORMATS[name]([asked.calls.tools[0].tool])
            parts = parser.push(said) + parser.finish()
            arguments = "".join(part.text for part in parts if part.call == 0).replace("\x7f", "\\u007f")
            if unenforced:
                continue
            whole, error = enforceable(alphabet, {"type": "object", **schema})
            assert not error
            valid = LLMatcher.grammar_from_json_schema(json.dumps(whole.schema))
            assert accepts(valid, arguments), json.dumps([name, schema, said, arguments])
            called += 1
    trials.close()
    assert made > count / 8
    assert called > count / 40
