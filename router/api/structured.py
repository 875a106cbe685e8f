"""Structured output: the form that a request demands of its output, in OpenAI's fields or in vLLM's.

Both become one `Structure`. `router.preparation.demand` compiles it once to find errors, and workers
enforce it.
"""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from baton.engine.api.sampling_params import MAX_LENGTH
from baton.router.api.fields import Items, Part, Sent, invalid
from baton.router.api.messages import SPACED
from baton.router.api.schemas import in_usual_form
from baton.router.api.validation import refusing
from baton.rpc import worker_pb2 as pb

Schema = dict[str, Any]
MAX_GIVEN = 8 * MAX_LENGTH
"""Characters of the schemas of a request, which may become shorter: workers need no descriptions."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A constraint on the output."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    field: str
    """The field of the client's body that demands it."""
    strict: bool = False
    """A schema is refused if workers cannot enforce all of it."""
    pointer: str = ""
    """JSON pointer from the field to the schema."""

    @property
    def message(self) -> pb.StructuredOutput:
        return pb.StructuredOutput(**{self.kind: self.text})


def calls_or_answer(calls: str, answer: Structure, before: str) -> str:
    """Returns a Lark grammar for tool calls or an answer: its rule `start` is that of `calls`, or `answer`.

    `answer` is a JSON schema. `before`: the Lark expression of what precedes an answer.
    """
    either = f"start: calls | answer\n{calls.replace('start:', 'calls:', 1)}"
    return f"{either}\nanswer: {before} object\nobject: {json_rule(answer)}"


def json_rule(structure: Structure) -> str:
    """Returns the Lark expression of a JSON schema."""
    schema = json.loads(structure.text)
    object_ = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return f"%json {json.dumps({**SPACED, **object_})}"


class JsonSchema(Part):
    """Workers enforce the schema, as one of draft 2020-12. Keywords of draft 3 are refused by name.

    What workers cannot enforce is refused by name if `strict` is true. Else the response header
    `x-baton-unenforced` names it.
    """

    name: str | None = None
    description: str | None = None
    schema_: Annotated[
        Schema | bool | None,
        Field(alias="schema"),
        Sent(Schema | bool | None, "a JSON schema"),
        AfterValidator(in_usual_form),
    ] = None
    strict: bool | None = None


_WITH_SCHEMA: list[Any] = [
    {"properties": {"type": {"enum": ["text", "json_object"]}}},
    {
        "properties": {
            "json_schema": {
                "type": "object",
                "required": ["schema"],
                "properties": {"schema": {"type": ["object", "boolean"]}},
            }
        },
        "required": ["json_schema"],
    },
]


class ResponseFormat(Part):
    """OpenAI's field `response_format`. A `schema` beside `type`, as llama.cpp takes it, stands for that in
    `json_schema`."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _WITH_SCHEMA})

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _take_schema(cls, data: Any) -> Any:
        schema = data.get("schema") if isinstance(data, dict) and data.get("json_schema") is None else None
        if schema is None or data.get("type") not in ("json_object", "json_schema"):
            return data
        return {**data, "type": "json_schema", "json_schema": {"schema": schema}}

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise invalid("type json_schema needs a json_schema with a schema", "response_format.json_schema")
        return self

    def structure(self, sent_as: str | None = None) -> Structure | None:
        """`sent_as`: the field of the client's body in its place, whose member `schema` is the schema."""
        if self.type == "json_schema":
            assert self.json_schema is not None
            schema, strict = json.dumps(self.json_schema.schema_), bool(self.json_schema.strict)
            if sent_as is not None:
                return Structure("json_schema", schema, sent_as, strict, "/schema")
            return Structure("json_schema", schema, "response_format.json_schema.schema", strict)
        if self.type == "json_object":
            return Structure("json_schema", _ANY_OBJECT, sent_as or "response_format")
        return None


_ANY_OBJECT = '{"type": "object"}'
# Members of vLLM's field that are refused, each with the values that have no effect and are accepted.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "structural_tag": (), "whitespace_pattern": (), "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,), "disable_fallback": (False, True),
}  # fmt: skip


class StructuredOutputs(Part):
    """vLLM's field `structured_outputs`: exactly one of its members is set.

    In `regex`, `\\d` is `[0-9]`, `\\w` is `[0-9A-Za-z_]`, and `\\s` is ASCII white space and U+00A0, as in
    xgrammar, a backend of vLLM. `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`, fields
    of earlier versions of vLLM, `json_schema`, `regex` and `ebnf` of SGLang, `grammar` of llama.cpp and
    `format` of Ollama stand for it.
    """

    json_: Annotated[
        Schema | str | None,
        Field(alias="json"),
        Sent(Schema | str | None, "a JSON schema, or its text"),
        AfterValidator(in_usual_form),
    ] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[Items[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: str | None = None

    _refuse_unsupported = refusing(_UNSUPPORTED, nested=True)

    @model_validator(mode="after")
    def _check_members(self) -> Self:
        members = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in members) != 1:
            raise invalid("must have one of json, regex, choice, grammar and json_object")
        if (length := sum(map(len, self.choice or ()))) > MAX_LENGTH:
            raise invalid(
                f"must have at most {MAX_LENGTH} characters in all, not {length}", "structured_outputs.choice"
            )
        return self

    @property
    def structure(self) -> Structure:
        field = "structured_outputs"
        if self.json_ is not None:
            schema = self.json_ if isinstance(self.json_, str) else json.dumps(self.json_)
            return Structure("json_schema", schema, f"{field}.json")
        if self.regex is not None:
            return Structure("regex", self.regex, f"{field}.regex")
        if self.choice is not None:
            return Structure("regex", "|".join(map(re.escape, self.choice)), f"{field}.choice")
        if self.grammar is not None:
            return Structure("grammar", self.grammar, f"{field}.grammar")
        return Structure("json_schema", _ANY_OBJECT, field)


_OLD_NAMES = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar", "format": "json",
}  # fmt: skip
"""Members of `structured_outputs` by the fields of earlier vLLM, of SGLang, llama.cpp and Ollama."""


def with_structured_outputs(cls: type, data: Any) -> Any:
    """Is a validator of a body: puts `structured_outputs` in place of one of these fields."""
    names = {name for name in _OLD_NAMES if isinstance(data, dict) and data.get(name) is not None}
    if not names:
        return data
    if len(names) > 1 or data.get("structured_outputs") is not None:
        raise invalid("only one of its fields and structured_outputs may be set", min(names))
    name = names.pop()
    if name == "format" and data[name] in ("", "json"):  # Ollama's: any text, any object
        structure = {"json_object": True} if data[name] else None
        return {**data, name: None, "structured_outputs": structure}
    return {**data, name: None, "structured_outputs": {_OLD_NAMES[name]: data[name]}}
