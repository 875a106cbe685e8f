"""Numbers of a schema that llguidance 1.9.1 would change, or would not take."""

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher

from baton.grammars.compiler import Alphabet
from baton.router.schemas.enforce import enforceable

from .conftest import accepts

ALPHABET = Alphabet(300).tokenizer()
EXACT = 2**53
MOST = 2**63 - 1024
FEW = [-(10**30), -MOST - 1, -MOST, -EXACT - 1, -1, 0, 1, EXACT, EXACT + 1, 2**60 - 1, 2**60, MOST, MOST + 1]


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, FEW[2:-1]),  # as bounds of int64 are written
        ({"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1}, FEW[2:-1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, FEW[5:-1]),
        ({"maximum": 2**63 - 1}, FEW[:-1]),
        ({"minimum": -(2.0**63), "maximum": 2.0**63}, FEW[2:-1]),  # the same, written as doubles
        ({"minimum": 0.0, "maximum": 2.0**64}, FEW[5:-1]),
        ({"maximum": 2.0**60}, FEW[:11]),
        ({"minimum": EXACT + 1}, [2**60 - 1, 2**60, MOST, MOST + 1]),  # the next double is 2**53 + 2
        ({"maximum": EXACT + 1}, FEW[:8]),
        ({"minimum": -EXACT, "maximum": EXACT}, FEW[4:8]),
        ({"minimum": -EXACT - 1}, FEW[4:]),
        ({"const": 2**60}, [2**60]),
        ({"enum": [1, MOST]}, [1, MOST]),
        ({"const": {"id": [2**60]}}, []),
    ],
)
def test_great_bounds_and_values_are_enforced(schema: dict[str, Any], taken: list[int]):
    """No number that the schema excludes is taken. Some at a bound that no double holds may be excluded."""
    schema = {"type": ["integer", "object"] if isinstance(schema.get("const"), dict) else "integer"} | schema
    made, error = enforceable(ALPHABET, schema)
    assert (error, made.unenforced) == ("", ())
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(made.schema))
    assert [each for each in FEW if accepts(grammar, str(each))] == taken
    assert [each for each in taken if not Draft202012Validator(schema).is_valid(each)] == []


@pytest.mark.parametrize(
    ("schema", "keywords", "rest"),
    [
        # Enforced, the value would be 2**53: another one.
        ({"const": EXACT + 1}, ["const"], {"type": ["integer"]}),
        ({"enum": [1, "a", EXACT + 1]}, ["enum"], {"type": ["integer", "string"]}),
        ({"enum": [[{"id": -EXACT - 1}]], "type": "array"}, ["enum"], {"type": "array"}),
        # It is read as a double that differs in its last bit.
        ({"const": 123456789.12345679}, ["const"], {"type": ["number"]}),
        ({"type": "integer", "maximum": 10**30}, ["maximum"], {"type": "integer"}),
        ({"type": "integer", "exclusiveMinimum": EXACT + 3}, ["exclusiveMinimum"], {"type": "integer"}),
        ({"type": "integer", "minimum": 2**60}, ["minimum"], {"type": "integer"}),
        ({"type": "integer", "minimum": 2**63, "maximum": 2**64},
         ["minimum", "maximum"], {"type": "integer"}),
        ({"type": "number", "minimum": -1e308, "maximum": 9}, ["minimum"], {"type": "number", "maximum": 9}),
        ({"type": "number", "minimum": 1e-300}, ["minimum"], {"type": "number"}),
        ({"not": {"maximum": 2**60 + 1}}, ["not"], {}),  # the bound that is enforced is not that one
        ({"type": "object", "minProperties": 2}, ["minProperties"], {"type": "object", "minProperties": 2}),
        ({"patternProperties": {"^x": {}}, "additionalProperties": False, "minProperties": 2},
         ["minProperties"],
         {"patternProperties": {"^x": {}}, "additionalProperties": False, "minProperties": 2}),
    ],
)  # fmt: skip
def test_what_the_compiler_would_change_is_named(
    schema: dict[str, Any], keywords: list[str], rest: dict[str, Any]
):
    made, error = enforceable(ALPHABET, schema)
    assert (error, made.schema) == ("", rest)
    assert made.unenforced == tuple(f"/{keyword}" for keyword in keywords)


@pytest.mark.parametrize(("keyword", "sign"), [("maximum", 1), ("minimum", -1)])
def test_a_bound_of_numbers_excludes_them_also_as_the_compiler_writes_it(keyword: str, sign: int):
    """2**60 is written as 1152921504606847000."""
    bound = sign * (2**60 + 9)
    other = {"minimum", "maximum"}.difference({keyword}).pop()
    made, error = enforceable(ALPHABET, {"type": "number", keyword: bound, other: -sign})
    assert (error, made.unenforced) == ("", ())
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(made.schema))
    taken = [accepts(grammar, str(bound - sign * by)) for by in (-1, 1000)]
    assert taken == [False, True]


@pytest.mark.parametrize("value", [0, -1, 0.1, -2.5, 1e-7, 1e15, 1e16, EXACT, -EXACT, 0.00001234, 1e22])
def test_a_value_that_the_compiler_keeps_is_enforced(value: float):
    made, error = enforceable(ALPHABET, {"const": value})
    assert (error, made) == ("", ({"const": value}, (), False))
    matcher = LLMatcher(ALPHABET, LLMatcher.grammar_from_json_schema(json.dumps(made.schema)))
    assert json.loads(bytes(matcher.compute_ff_tokens())) == value, "the only text"
