"""Schemas as today's libraries write them (TypeBox, zod 4, msgspec, generators of OpenAPI and Go): all is
enforced. Those of pydantic are in `test_schema_rewriter`."""

from copy import deepcopy
from typing import Any

import pytest

from baton.grammars.compiler import Alphabet
from baton.router.api.schemas import in_usual_form
from baton.router.schemas.enforce import enforceable

TEXT = {"type": "string"}


def an_object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


FORMS: dict[str, dict[str, Any]] = {
    "TypeBox, a union of literals": an_object(k={"anyOf": [TEXT | {"const": "a"}, TEXT | {"const": "b"}]}),
    "TypeBox, a record of any key": {"type": "object", "patternProperties": {"^(.*)$": TEXT}},
    "TypeBox, a record of numbers": {"type": "object", "patternProperties": {"^(0|[1-9][0-9]*)$": TEXT}},
    "TypeBox, an intersection": {
        "type": "object",
        "allOf": [an_object(("a",), a=TEXT), an_object(("b",), b=TEXT)],
        "unevaluatedProperties": False,
    },
    "TypeBox, a tuple": an_object(
        t={"type": "array", "items": [TEXT, {"type": "number"}], "additionalItems": False, "minItems": 2}
    ),
    "zod, a loose record": {
        "type": "object",
        "propertyNames": {"pattern": "^x"},
        "additionalProperties": TEXT,
    },
    "zod, any JSON": an_object(v={"$ref": "#/$defs/__schema0"})
    | {
        "$defs": {
            "__schema0": {
                "anyOf": [
                    TEXT,
                    {"type": "array", "items": {"$ref": "#/$defs/__schema0"}},
                    {
                        "type": "object",
                        "propertyNames": TEXT,
                        "additionalProperties": {"$ref": "#/$defs/__schema0"},
                    },
                ]
            }
        }
    },
    "zod, base64": an_object(
        d=TEXT
        | {
            "format": "base64",
            "contentEncoding": "base64",
            "pattern": "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
        }
    ),
    "zod, itself": an_object(("c",), c={"type": "array", "items": {"$ref": "#"}}),
    "OpenAPI 3.0, bounds": an_object(a={"type": "number", "minimum": 0, "exclusiveMinimum": True}),
    "OpenAPI, annotations": an_object(
        a=TEXT | {"example": "x", "xml": {"name": "a"}, "readOnly": True, "x-order": 1},
        b={"type": "integer", "format": "int64"},
    ),
    "OpenAPI, a discriminator": an_object(
        x={
            "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
            "discriminator": {"propertyName": "t", "mapping": {"a": "#/$defs/A"}},
        }
    )
    | {"$defs": {"A": an_object(("t",), t={"enum": ["a"]}), "B": an_object(("t",), t={"enum": ["b"]})}},
    "a generic name": an_object(a={"$ref": "#/$defs/A%3CB%3E"}) | {"$defs": {"A<B>": TEXT}},
    "an anchor": an_object(a={"$ref": "#foo"}) | {"$defs": {"F": {"$anchor": "foo"} | TEXT}},
    "Go, a reference at the top": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/t",
        "$ref": "#/$defs/T",
        "$defs": {"T": an_object(("a",), a=TEXT)},
    },
    "msgspec, a tagged class": an_object(x={"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]})
    | {"$defs": {"A": an_object(("type",), type={"enum": ["A"]})}},
    "a named group": an_object(a=TEXT | {"pattern": r"^(?<y>\d{4})$"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_of_it_is_enforced(form: str) -> None:
    schema = in_usual_form(deepcopy(FORMS[form]))
    made, error = enforceable(Alphabet(512).tokenizer(), schema, forms_of_the_whole=True)
    assert (error, made.unenforced) == ("", ())
