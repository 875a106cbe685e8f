"""The rewriter of schemas, against jsonschema: what it returns is equal to what it was given, or allows more
and says where. And what the compiler allows is what the new schema says."""

import datetime
import decimal
import enum
import json
import pathlib
import random
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from baton.grammars.compiler import Alphabet, source
from baton.router.schemas.enforce import enforceable
from baton.router.schemas.lookahead import without_lookahead
from baton.router.schemas.probe import Probe
from baton.router.schemas.rewriter import rewritten

from .conftest import accepts

ALPHABET = Alphabet(300).tokenizer()
PROBE = Probe(ALPHABET)
NAMES = ["a", "b", "kind"]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    3.5,
    "",
    "a",
    "b",
    "ab",
    "x1",
    [],
    [1],
    [1, 1],
    ["a", 1],
    [0, 1, 2],
]
VALUES += [
    {},
    {"a": 1},
    {"b": "a"},
    {"a": 1, "b": 2},
    {"a": "x1", "kind": "a"},
    {"kind": "b", "b": 0},
    {"z": 1},
]
VALUES += [
    {"a": None, "b": True, "kind": "a"},
    {"a": {"a": 1}},
    {"a": [1], "z": "a"},
    {"kind": "b"},
    {"kind": "a"},
]
names = st.sampled_from(NAMES)
small = st.integers(0, 3)


def simple(*references: str) -> st.SearchStrategy[Any]:
    some = {}, True, False, {"type": ["string", "null"]}, {"minimum": 1}, {"maximum": 2}, {"minLength": 2}
    patterns = {"pattern": "^[ab]*$"}, {"type": "string", "pattern": "^(?![ab]*$).+$"}, {"maxItems": 1}
    kinds = ({"type": kind} for kind in ("string", "integer", "number", "object", "array", "boolean"))
    to = ({"$ref": f"#/$defs/{name}", **more} for name in references for more in ({}, {"title": "t"}))
    values = st.sampled_from([0, 1, "a", "b", True, None])
    return st.one_of(
        st.builds(lambda value: {"const": value}, values),
        st.builds(lambda listed: {"enum": listed}, st.lists(values, min_size=1)),
        st.sampled_from([*some, *patterns, *kinds, *to]),
    )


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=3)
    members = st.dictionaries(names, inner, max_size=3)
    some = st.lists(names, unique=True, max_size=2)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", "object", "array", "string", ["object", "null"]]),
            "properties": members, "required": some, "additionalProperties": inner, "propertyNames": inner,
            "patternProperties": st.dictionaries(st.sampled_from(["^a$", "^[ab]$", "^k"]), inner, max_size=1),
            "oneOf": several, "anyOf": several, "allOf": several, "not": inner, "if": inner, "then": inner,
            "else": inner, "dependentRequired": st.dictionaries(names, some, max_size=3),
            "dependentSchemas": st.dictionaries(names, inner, max_size=2), "uniqueItems": st.booleans(),
            "contains": inner, "minContains": small, "unevaluatedProperties": inner, "items": inner,
            "unevaluatedItems": inner, "minProperties": small, "maxProperties": small,
            "enum": st.lists(st.sampled_from(VALUES), min_size=1, max_size=3), "title": st.just("t"),
        },
    ).map(lambda schema: dict(list(schema.items())[:5]))  # fmt: skip


def schemas(*references: str) -> st.SearchStrategy[Any]:
    return st.recursive(simple(*references), keywords, max_leaves=8)


def whole(schema: Any, a: Any, b: Any) -> Any:
    return {**(schema if isinstance(schema, dict) else {"allOf": [schema]}), "$defs": {"A": a, "B": b}}


roots = st.builds(whole, schemas("A", "B"), schemas("B"), simple())


def check_equal(schema: Any) -> bool:
    """Returns whether all was enforced."""
    made = rewritten(schema, PROBE)
    before, after = Draft202012Validator(schema), Draft202012Validator(made.schema)
    for value in VALUES:
        old, new = before.is_valid(value), after.is_valid(value)
        assert new or not old, (value, made)
        assert new == old or made.unenforced, (value, made)
    return not made.unenforced


@pytest.mark.all
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=roots)
def test_the_new_schema_allows_the_same_values_or_says_what_it_leaves_out(schema: Any):
    check_equal(schema)


def spoken(schema: Any, seed: int, characters: int = 120) -> str | None:
    """A random text of the grammar of a schema. None: it did not end. Raises ValueError for a dead end."""
    rng, alphabet = random.Random(seed), LLTokenizer("byte")
    matcher = LLMatcher(alphabet, source("json_schema", json.dumps(schema)), log_level=0)
    said = bytearray()
    while len(said) < characters:
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.5):
            return said.decode(errors="replace")
        mask = matcher.compute_bitmask()
        known = [byte for byte in range(0x20, 0x7F) if mask[byte // 8] >> byte % 8 & 1]
        if matcher.is_error():
            raise ValueError(f"{said!r}: {matcher.get_error()[:100]}")
        liked = [byte for byte in known if byte in b'abk"{}[],:01']
        if not known:
            return None
        said.append(rng.choice(liked if liked and rng.random() < 0.8 else known))
        matcher.consume_token(said[-1])
    return None


def check_spoken(schema: Any, seed: int = 0) -> bool:
    """Returns whether a text came of the schema, and all of it was enforced."""
    made, error = enforceable(ALPHABET, schema)
    if error:
        return False
    said = spoken(made.schema, seed)
    if said is None or made.unenforced:
        return False
    try:
        value = json.loads(said)
    except json.JSONDecodeError:
        return False
    assert Draft202012Validator(schema).is_valid(value), (said, made.schema)
    return True


@pytest.mark.all
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=roots, seed=st.integers(0, 1000))
def test_what_the_grammar_says_has_the_schema(schema: Any, seed: int):
    check_spoken(schema, seed)


# ------------------------------------------------------------ single forms

KINDS = [
    {"type": "object", "properties": {"kind": {"const": name}, "n": {"$ref": "#/$defs/N"}},
     "required": ["kind"]}
    for name in ("x", "y")
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "places"),
    [
        ({"$ref": "#/$defs/N", "$defs": {"N": {"oneOf": KINDS}}}, ()),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, ()),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, ("/oneOf",)),
        ({"oneOf": [{"type": "integer", "maximum": 1}, {"type": "number", "minimum": 2}]}, ()),
        ({"type": "string", "uniqueItems": True, "contains": {"const": 1}}, ()),
        ({"type": "array", "contains": {}, "minContains": 2}, ()),
        ({"propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a"], "title": "E"}}}, ()),
        ({"propertyNames": {"minLength": 1}, "type": "object"}, ()),
        ({"propertyNames": {"pattern": "^[ab]$"}, "type": "object", "required": ["a"]}, ()),
        ({"propertyNames": {"format": "date"}, "type": "object"}, ("/propertyNames",)),
        ({"properties": {"a/b": {"not": {"pattern": "x"}}}}, ("/properties/a~1b/not",)),
        ({"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a"}}}, ("/$dynamicRef",)),
        ({"allOf": [{"$ref": "#/$defs/B"}], "properties": {"a": {}}, "unevaluatedProperties": False,
          "$defs": {"B": {"properties": {"b": {"const": 1}}}}}, ()),
        ({"anyOf": [{"properties": {"a": {}}}, {}], "unevaluatedProperties": False},
         ("/unevaluatedProperties",)),
        ({"type": "object", "properties": {"c": {"enum": [0, 1, 2]}},
          "if": {"properties": {"c": {"const": 1}}},
          "then": {"required": ["c"]}, "else": {"properties": {"d": {"type": "string"}}}}, ()),
        ({"if": {"pattern": "a"}, "then": {"maxLength": 1}}, ("/if",)),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 1}, ()),
        ({"properties": {"a": {}, "b": {}}, "minProperties": 2}, ("/minProperties",)),
        ({"patternProperties": {"^a": {}, "b": {}}}, ("/patternProperties",)),
        ({"type": "string", "pattern": r"\bx"}, ("/pattern",)),
        ({"properties": {"a": {"oneOf": [{"const": 1}, {"const": 2}]},
                         "b": {"$ref": "#/properties/a/oneOf/1"}}}, ()),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {
            "n": {"type": "object", "$ref": "#/$defs/A"}}}}}, ()),
    ],
)  # fmt: skip
def test_what_is_enforced(schema: Any, places: tuple[str, ...]):
    made, error = enforceable(ALPHABET, schema)
    assert (error, made.unenforced) == ("", places)
    if "$dynamicRef" in schema:
        return
    for value in VALUES:
        old, new = (Draft202012Validator(each).is_valid(value) for each in (schema, made.schema))
        assert new == old or (new and places), value


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # as pydantic writes it


@pytest.mark.parametrize(
    ("pattern", "taken", "refused"),
    [
        (DECIMAL, ["1", "-1.5", ".5", "00"], ["", "-", ".", "+.", "1a", "1.2.3"]),
        (r"^(?=.*[A-Z])(?=.*\d).{3,}$", ["aB3", "3xB"], ["ab3", "AB", "aBc"]),
        (r"^(?!\s*$).+", [" a", "a"], ["", "  "]),
        (r"^(?!$)a*", ["a", "b"], [""]),
        (r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+$", ["a.b@c", "a.@c"], [".a@c", "a..b@c", "@c"]),  # zod: an email
        (r"^(?=.{1,5}\.?$)[a-z]+(?:\.[a-z]+)*\.?$", ["ab.cd", "ab.cd."], ["ab.cde", "."]),  # zod: a host name
        (r"^(?=a|b).c$", ["ac", "bc"], ["cc"]),
        (r"^(?!-)[a-z-]*$", ["", "a-"], ["-a", "-"]),
        (r"^(?![^ab]*$)[a-z]+$", ["xa", "b"], ["x", "A"]),
    ],
)
def test_a_pattern_with_look_aheads_at_its_beginning_is_enforced(
    pattern: str, taken: list[str], refused: list[str]
):
    made, error = enforceable(ALPHABET, {"type": "string", "pattern": pattern})
    assert (error, made.unenforced) == ("", ())
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(made.schema))
    assert [text for text in taken if not accepts(grammar, json.dumps(text))] == []
    assert [text for text in refused if accepts(grammar, json.dumps(text))] == []


@pytest.mark.parametrize(
    "pattern",
    [
        "a(?=b)",
        "^(?=a)b|c",
        "^(?!ab)c",
        "^(?!.*ab)c",
        "^(?<=a)b",
        "^(?=(?=a)b)c",
        "^(?=a)*b",
        "^(?=[)]",
        "^(?!a*$",
    ],
)
def test_other_look_arounds_are_not(pattern: str):
    assert without_lookahead(pattern) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a$": {"minimum": 0}}},
        {"properties": {"a": {}, "b": {}}, "patternProperties": {"^[ab]$": {"const": 1}}, "required": ["a"]},
        {"patternProperties": {"^k$": {"const": 0}}, "required": ["k"]},
        {"propertyNames": {"pattern": "^k$"}, "required": ["k"]},
    ],
)
def test_a_pattern_of_named_properties_alone_leads_to_no_dead_end(schema: Any):
    """The compiler allowed a comma behind the last property, and then no name."""
    whole = {"type": "object", "additionalProperties": False, **schema}
    if "propertyNames" in schema:
        del whole["additionalProperties"]
    made, error = enforceable(ALPHABET, whole)
    assert (error, made.unenforced) == ("", ())
    said = [text for seed in range(40) if (text := spoken(made.schema, seed)) is not None]
    assert said
    assert all(Draft202012Validator(whole).is_valid(json.loads(text)) for text in said)


def wide(depth: int) -> Any:
    """Definitions that each name the next one twice."""
    definitions: dict[str, Any] = {
        f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"not": {"$ref": f"#/$defs/d{i + 1}"}}]}
        for i in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{depth}": {"enum": ["a"]}}}


@pytest.mark.parametrize(
    "schema",
    [
        wide(50),
        {"allOf": [{"$ref": "#"}, {"$ref": "#"}], "unevaluatedProperties": False},
        {
            "oneOf": [
                {"required": [f"p{i}"], "properties": {f"p{j}": {} for j in range(60)}} for i in range(60)
            ]
        },
        {"dependentRequired": {f"p{i}": [f"p{i + 1}"] for i in range(500)}},
        {"properties": {f"p{i}": {} for i in range(500)}, "minProperties": 1},
        {"not": {"not": {"not": {"enum": list(range(500))}}}, "enum": list(range(500))},
        {"oneOf": [{"const": i} for i in range(500)]},
    ],
)
def test_the_work_and_the_result_are_bounded(schema: Any):
    counted = 0

    class Counted(dict[str, Any]):
        """Counts how often a schema is walked."""

        def items(self) -> Any:
            nonlocal counted
            counted += 1
            return super().items()

    def counting(value: Any) -> Any:
        if isinstance(value, dict):
            return Counted({name: counting(each) for name, each in value.items()})
        return [counting(each) for each in value] if isinstance(value, list) else value

    made = rewritten(counting(schema), PROBE)
    assert counted < 20_000
    assert len(json.dumps(made.schema)) < 20 * len(json.dumps(schema)) + 10_000


def test_a_schema_that_is_too_deep_is_refused():
    schema: Any = {"type": "string"}
    for _ in range(200):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="deep"):
        rewritten(schema, PROBE)


# ------------------------------------------------------------ as libraries write them


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    friends: "list[Annotated[Cat | Dog, pydantic.Field(discriminator='kind')]]" = []


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        (Pet, ()),
        (list[Pet], ()),
        (dict[Color, int], ()),
        (dict[Literal["a", "b"], Pet], ()),
        (dict[Annotated[str, pydantic.StringConstraints(min_length=1)], float], ()),
        (dict[Annotated[str, pydantic.StringConstraints(pattern="^[a-z]+$")], float], ()),
        (decimal.Decimal, ()),
        (Annotated[decimal.Decimal, pydantic.Field(max_digits=5, decimal_places=2, gt=0)], ()),
        (set[int], ("/uniqueItems",)),
        (tuple[int, str], ()),
        (int | str | None, ()),
        (Annotated[list[int], pydantic.Field(min_length=1, max_length=3)], ()),
        (pydantic.Json, ()),
        (uuid.UUID | datetime.datetime | pathlib.Path, ()),
        (bytes, ()),
        (pydantic.AnyUrl, ()),
        (dict[str, pydantic.JsonValue], ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_schemas_that_pydantic_writes(kind: Any, places: tuple[str, ...], mode: Any):
    schema = pydantic.TypeAdapter(kind).json_schema(mode=mode)
    made, error = enforceable(ALPHABET, schema)
    assert (error, made.unenforced) == ("", places)


PYDANTIC_2_12 = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}], "title": "D"}
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
ZOD: list[tuple[Any, tuple[str, ...]]] = [
    (PYDANTIC_2_12, ()),
    ({"type": "string", "format": "email", "pattern": EMAIL}, ()),
    ({"type": "integer", "minimum": -(2**53 - 1), "maximum": 2**53 - 1}, ()),
    ({"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "number"}}, ()),
    ({"type": "object", "propertyNames": {"type": "string", "minLength": 2}, "additionalProperties": {}}, ()),
    ({"type": "object", "properties": {"x": {"not": {}}}, "additionalProperties": False}, ()),
    ({"anyOf": [{"type": "string", "const": "a"}, {"type": "null"}], "default": None}, ()),
    ({"allOf": [{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}]}, ()),
    ({"oneOf": [{"type": "object", "properties": {"t": {"type": "string", "const": each}}, "required": ["t"]}
                for each in "ab"]}, ()),
    ({"type": "string", "pattern": r"^[cC][^\s-]{8,}$"}, ()),
    ({"type": "array", "items": {"type": "number"}, "contains": {"const": 1}}, ("/contains",)),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "places"), ZOD)
def test_schemas_as_zod_and_earlier_pydantic_write_them(schema: Any, places: tuple[str, ...]):
    made, error = enforceable(ALPHABET, {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    assert (error, made.unenforced) == ("", places)
