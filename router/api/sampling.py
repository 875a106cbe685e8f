"""The fields that all endpoints that generate share."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton.engine.api.sampling_params import BOUNDS, MAX_LISTED
from baton.router.api.fields import (
    MAX_STOPS,
    Nullable,
    Part,
    Stops,
    StopString,
    TokenId,
    TruncatedLength,
    within,
)
from baton.router.api.structured import StructuredOutputs, with_structured_outputs
from baton.router.api.validation import NO_NAMES, refusing

TOKEN_ID = "[0-9]{1,10}"
"""A key of `logit_bias`."""
MAX_TIMEOUT = 86_400.0  # seconds


class Body(BaseModel):
    """The fields that all bodies have."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    names: ClassVar[Mapping[str, str]] = NO_NAMES
    """For fields of this form that the client's body names otherwise: its names. Errors have these."""

    model: str | None = None

    @classmethod
    def named(cls, field: str) -> str:
        return cls.names.get(field, field)


class SessionParams(Part):
    """A session of vLLM's router (`session_id`) or of SGLang (`id`). In SGLang a request with `rid` continues
    another one. Without `rid` its other members change no answer (SGLang to 0.5.23, `session_controller.py`).
    Since 0.5.10 a session that is opened for streaming continues by itself, but Baton opens none."""

    session_id: str | None = None
    id: str | None = None

    _refuse_unsupported = refusing({"rid": ()}, nested=True)


class SamplingBody(Body):
    """How tokens are chosen, where the text ends, and how the request is scheduled."""

    stream: Nullable[bool] = False
    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1, le=BOUNDS["top_k"].most)] | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: Annotated[float, within("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, within("frequency_penalty")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LISTED)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_LISTED)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(
                max_length=MAX_LISTED,
                fail_fast=True,
                json_schema_extra={"propertyNames": {"pattern": f"^{TOKEN_ID}$"}},
            ),
        ]
        | None
    ) = None
    min_tokens: Nullable[Annotated[int, Field(ge=0, lt=2**31)]] = 0
    ignore_eos: Nullable[bool] = False
    skip_special_tokens: Nullable[bool] = True
    include_stop_str_in_output: Nullable[bool] = False
    truncate_prompt_tokens: TruncatedLength | None = None
    """-1: as many tokens as leave room for one token of output."""
    truncation_side: Literal["left", "right"] | None = None
    """Side where tokens of the prompt are dropped. None: left."""
    structured_outputs: StructuredOutputs | None = None
    priority: Nullable[Annotated[int, Field(ge=-(2**31), lt=2**31)]] = Field(
        default=0, description="lower is first; beside other API keys not below the key's `min-priority`"
    )
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT)] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Requests share cached prefixes only with those of the same API key's salt and the same `cache_salt`."""
    session_id: str | None = None
    session_params: SessionParams | None = None

    _take_old_names = model_validator(mode="before")(classmethod(with_structured_outputs))

    def given(self, kind: type["SamplingBody"]) -> dict[str, Any]:
        """Returns those fields of `kind` that the client sent."""
        return {name: getattr(self, name) for name in kind.model_fields if name in self.model_fields_set}


class OpenAIBody(SamplingBody):
    """The fields that all of OpenAI's endpoints that generate share."""

    stop: Stops = []
    user: str | None = None
    prompt_cache_key: str | None = None

    @property
    def session(self) -> str | None:
        """The name of the session in fields that are made for it."""
        params = self.session_params or SessionParams()
        return self.session_id or params.session_id or params.id or self.prompt_cache_key
