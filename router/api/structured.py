"""Structured output: what a request says about the form of its answer, in OpenAI's words and in vLLM's.

    response_format, structured_outputs ──▶ Structure ──▶ checked ──▶ worker's StructuredOutput

The workers enforce it. Here it is only compiled, by the same library over an alphabet of bytes and within
narrow bounds, so that who wrote what is no schema, regular expression or grammar learns it before any worker
is asked, and nothing reaches a worker that a compiler cannot take.
"""

import json
import re
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from router.api.fields import invalid, one_of
from router.api.unsupported import refuse
from router.errors import ApiError, InvalidRequest
from router.processes.children import ChildDied, Children
from rpc import worker_pb2 as pb

MAX_LENGTH = 1 << 17
"""Characters of a schema, regular expression or grammar; workers have the same bound."""
WHITESPACE = r"[ \n\r\t]{1,32}"
"""Between the parts of a tool's arguments; workers have the same for other JSON."""
_REMEMBERED = 64
"""Texts that were found valid last, and are not compiled again."""

_CHILD = str(Path(__file__).with_name("grammar_child.py"))

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Structure:
    """What the output must be like."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: str
    field: str
    """Where the client said so."""

    @property
    def message(self) -> pb.StructuredOutput:
        return pb.StructuredOutput(**{self.kind: self.text})


class JsonSchema(BaseModel):
    """Always enforced, whatever `strict` says."""

    model_config = ConfigDict(strict=True, frozen=True)

    name: str | None = None
    description: str | None = None
    schema_: Annotated[
        Schema | bool | None, Field(alias="schema"), one_of(dict | bool | None, "a JSON schema")
    ] = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's."""

    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise invalid("type json_schema needs a json_schema with a schema", "response_format.json_schema")
        return self

    @property
    def structure(self) -> Structure | None:
        if self.type == "json_schema":
            assert self.json_schema is not None
            field = "response_format.json_schema.schema"
            return Structure("json_schema", json.dumps(self.json_schema.schema_), field)
        return _JSON_OBJECT if self.type == "json_object" else None


_JSON_OBJECT = Structure("json_schema", '{"type": "object"}', "response_format")
# vLLM's, and what may stand there all the same because it asks for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "structural_tag": (), "whitespace_pattern": (), "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,), "disable_fallback": (False, True),
}  # fmt: skip


class StructuredOutputs(BaseModel):
    """vLLM's: one of these."""

    model_config = ConfigDict(strict=True, frozen=True)

    json_: Annotated[
        Schema | str | None, Field(alias="json"), one_of(dict | str | None, "a JSON schema, or its text")
    ] = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return refuse(data, _UNSUPPORTED, nested=True)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(value is not None for value in given) != 1:
            raise invalid("must have one of json, regex, choice, grammar and json_object")
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
        return _JSON_OBJECT


class Checker:
    """Finds out whether structures can be compiled, and remembers those that can.

    What clients write may hang or crash the compiler: a child process compiles (`grammar_child`).
    """

    def __init__(self, name: str) -> None:
        self._valid: OrderedDict[Structure, Structure] = OrderedDict()
        self._children = Children([sys.executable, "-I", _CHILD, name], 1)

    async def check(self, given: Structure, key: str) -> Structure:
        """Returns what workers understand; `key` names the client's key. Raises InvalidRequest naming the
        field, and ApiError when the compiler cannot start."""
        if not 0 < len(given.text) <= MAX_LENGTH:
            text = f"{given.field}: must have 1 to {MAX_LENGTH} characters, not {len(given.text)}"
            raise InvalidRequest(text, param=given.field)
        if (checked := self._valid.get(given)) is None:
            wrong, text = await self._compile(given, key)
            if wrong is not None:
                reason = " ".join(wrong.removesuffix("<non-verbose/>").split())
                raise InvalidRequest(f"{given.field}: {reason}", param=given.field)
            checked = self._valid[given] = Structure(given.kind, text, given.field)
            if len(self._valid) > _REMEMBERED:
                self._valid.popitem(last=False)
        return checked

    async def close(self) -> None:
        await self._children.close()

    async def _compile(self, given: Structure, key: str) -> tuple[str | None, str]:
        """Returns what is wrong with it, and the text in the form of workers."""
        question = json.dumps([given.kind, given.text]).encode()
        try:
            return json.loads(await self._children.ask(key, question))
        except ChildDied as died:
            if died.blameless:
                raise ApiError(f"the router has no process to compile this grammar: {died}") from died
            return "too much to compile", ""
