"""The document `/openapi.json`, made from the models of requests and responses."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from baton.router.api import responses
from baton.router.api.admin_bodies import (
    FinishWeightsBody,
    InitTransferBody,
    LoadAdapterBody,
    MemoryBody,
    UnloadAdapterBody,
    UpdateInfoBody,
    UpdateWeightsBody,
)
from baton.router.api.anthropic.body import CountTokensBody, MessagesBody
from baton.router.api.anthropic.reply import AnthropicErrorResponse, AnthropicMessage
from baton.router.api.bodies import (
    BatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    FileForm,
    InvocationBody,
    TokenizeBody,
)
from baton.router.api.openai_responses.body import ResponsesBody

_JSON = "application/json"
_SCHEMA = "#/components/schemas/{model}"
REQUEST_ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)
"""HTTP statuses of the errors of an endpoint with a body."""


@dataclass(frozen=True)
class Operation:
    """One endpoint."""

    method: str
    path: str
    does: str
    response: type[BaseModel] | str | None = None
    """Of a success: the model of its JSON, or its content type. None: the response is empty."""
    body: type[BaseModel] | None = None
    streams: bool = False
    """Can send server-sent events instead."""
    also: tuple[int, ...] = ()
    """HTTP statuses of errors that endpoints like this one do not have."""
    error: type[BaseModel] = responses.ErrorResponse
    """The body of its errors."""
    uploads: bool = False
    """Takes a form with a file."""
    open: bool = False
    """Needs no API key."""
    admin: Literal["", "port", "key"] = ""
    """port: is on the admin port, if the router has one. key: so it is, and needs the admin key."""

    @property
    def summary(self) -> str:
        return f"{self.does} Needs the admin key." if self.admin == "key" else self.does

    @property
    def errors(self) -> tuple[int, ...]:
        """HTTP statuses of its errors."""
        if self.body is not None or self.uploads:
            return REQUEST_ERRORS
        return tuple(sorted({*self.also, *(() if self.open else (401,))}))

    @property
    def parameters(self) -> list[str]:
        """Names in the path."""
        return re.findall(r"{(\w+)}", self.path)


_ROUTABLE = "A load balancer may send requests here. 503: the router reaches no worker of its list."
OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "Complete a chat.", responses.ChatResponse,
        body=ChatBody, streams=True,
    ),
    Operation(
        "post", "/v1/completions", "Complete a text.", responses.CompletionResponse,
        body=CompletionBody, streams=True,
    ),
    Operation(
        "post", "/v1/responses", "Respond to an input, and keep the response.", responses.ResponseObject,
        body=ResponsesBody, streams=True,
    ),
    Operation(
        "get", "/v1/responses/{id}", "A response that is kept, or runs in the background.",
        responses.ResponseObject, streams=True, also=(400, 404),
    ),
    Operation("delete", "/v1/responses/{id}", "Forget a response.", _JSON, also=(404,)),
    Operation(
        "get", "/v1/responses/{id}/input_items", "The items before a response.", _JSON,
        also=(400, 404, 429, 503, 504),
    ),
    Operation(
        "post", "/v1/responses/input_tokens", "How long the prompt of a response is (`input_tokens`).", _JSON,
        body=ResponsesBody,
    ),
    Operation(
        "post", "/v1/responses/{id}/cancel", "End a response in the background.", responses.ResponseObject,
        also=(400, 404),
    ),
    Operation(
        "post", "/v1/messages", "Complete a chat, in Anthropic's form.", AnthropicMessage,
        body=MessagesBody, streams=True, error=AnthropicErrorResponse,
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "How long a prompt is (`input_tokens`).", _JSON,
        body=CountTokensBody, error=AnthropicErrorResponse,
    ),
    Operation(
        "post", "/invocations", "As /v1/chat/completions if the body has messages, else as /v1/completions.",
        _JSON, body=InvocationBody,
    ),
    Operation(
        "post", "/v1/files", "Keep a file of requests (fields `file`, `purpose`, which is batch, and"
        " optionally `expires_after[anchor]`, which is created_at, and `expires_after[seconds]`).", _JSON,
        uploads=True,
    ),
    Operation("get", "/v1/files", "The files of this API key.", _JSON, also=(400, 404)),
    Operation("get", "/v1/files/{id}", "What is known of a file.", _JSON, also=(404,)),
    Operation("delete", "/v1/files/{id}", "Remove a file.", _JSON, also=(400, 404)),
    Operation("get", "/v1/files/{id}/content", "The content of a file.", "application/jsonl", also=(404,)),
    Operation("post", "/v1/batches", "Send the requests of a file.", _JSON, body=BatchBody),
    Operation("get", "/v1/batches", "The batches of this API key.", _JSON, also=(400, 404)),
    Operation("get", "/v1/batches/{id}", "How far a batch is, and its files.", _JSON, also=(404,)),
    Operation("post", "/v1/batches/{id}/cancel", "End a batch. Its results stay.", _JSON, also=(404,)),
    Operation("get", "/v1/models", "The model that is served.", responses.ModelList),
    Operation("get", "/v1/models/{id}", "The model with this id.", responses.ModelCard, also=(404,)),
    Operation("post", "/tokenize", "Text or messages to token ids (`tokens`).", _JSON, body=TokenizeBody),
    Operation("post", "/detokenize", "Token ids to text (`prompt`).", _JSON, body=DetokenizeBody),
    Operation("get", "/health", "The process serves. Also says if the cluster is paused.", _JSON, open=True),
    Operation("get", "/ping", "As /health.", _JSON, open=True),
    Operation("post", "/ping", "As /health.", _JSON, open=True),
    Operation("get", "/api/hello", "As /health, for Claude Code.", _JSON, open=True),
    Operation("get", "/load", "How many requests this process generates for (`server_load`).", _JSON),
    Operation("get", "/server_info", "How the router serves.", _JSON),
    Operation("get", "/tokenizer_info", "The chat template and the special tokens.", _JSON),
    Operation("get", "/ready", "Each pool of the cluster has a worker.", also=(503,), open=True),
    Operation("get", "/routable", _ROUTABLE, also=(503,), open=True),
    Operation("get", "/metrics", "For Prometheus.", "text/plain", open=True, admin="port"),
    Operation(
        "get", "/metrics/targets", "Where Prometheus finds the workers' metrics (HTTP service discovery).",
        _JSON, admin="port",
    ),
    Operation("get", "/version", "The version of Baton.", _JSON, open=True),
    Operation("get", "/openapi.json", "This description.", _JSON, open=True),
    Operation("get", "/docs", "This description as a page.", "text/html", open=True),
    Operation("get", "/chat", "A page that chats with the model.", "text/html", open=True),
    Operation("get", "/dashboard", "A page that shows the cluster.", "text/html", open=True, admin="port"),
    Operation("get", "/", "A page with links to these three.", "text/html", open=True),
    Operation("get", "/status", "The router and its workers.", _JSON, admin="port"),
    Operation(
        "get", "/status/requests/{id}", "What happened to a request that ended lately, by its x-request-id.",
        _JSON, also=(404,), admin="port",
    ),
    Operation(
        "get", "/get_world_size", "Ranks of all workers (`world_size`).", _JSON,
        also=(404,), admin="key",
    ),
    Operation(
        "post", "/update_weights_from_disk", "Give all workers new weights.", _JSON,
        body=UpdateWeightsBody, admin="key",
    ),
    Operation(
        "post", "/init_weight_transfer_engine", "Choose how weights come.", _JSON,
        body=InitTransferBody, admin="key",
    ),
    Operation(
        "post", "/start_weight_update", "Begin an update of the weights.", _JSON,
        also=(404,), admin="key",
    ),
    Operation(
        "post", "/update_weights", "Let all workers read and check new weights.", _JSON,
        body=UpdateInfoBody, admin="key",
    ),
    Operation(
        "post", "/finish_weight_update", "Let all workers compute with these weights.",
        _JSON, body=FinishWeightsBody, admin="key",
    ),
    Operation(
        "post", "/v1/load_lora_adapter", "Load an adapter on all workers.", "text/plain",
        body=LoadAdapterBody, admin="key",
    ),
    Operation(
        "post", "/v1/unload_lora_adapter", "Unload an adapter on all workers.",
        "text/plain", body=UnloadAdapterBody, admin="key",
    ),
    Operation(
        "post", "/pause", "Pause all workers: `?mode=abort`, `wait` or `keep`.", _JSON,
        also=(400, 404, 500, 503, 504), admin="key",
    ),
    Operation(
        "post", "/resume", "Let paused workers go on.", _JSON, also=(404, 500, 503),
        admin="key",
    ),
    Operation(
        "post", "/release_memory_occupation", "Give memory of all workers back.", _JSON,
        body=MemoryBody, admin="key",
    ),
    Operation(
        "post", "/resume_memory_occupation", "Take that memory again.", _JSON,
        body=MemoryBody, admin="key",
    ),
    Operation(
        "get", "/is_paused", "Whether the cluster is paused (`is_paused`).", _JSON,
        also=(404,), admin="key",
    ),
)  # fmt: skip


@cache
def description(version: str, keys: bool, admin: bool) -> dict[str, Any]:
    """Returns an OpenAPI 3.1 document.

    `keys`: the router demands API keys. `admin`: it serves the admin endpoints itself, without an admin port.
    """
    bodies = [operation.body for operation in OPERATIONS if operation.body]
    sent = [o.response for o in OPERATIONS if isinstance(o.response, type)]
    models = [(model, "validation") for model in bodies]
    models += [(model, "serialization") for model in dict.fromkeys([*sent, *(o.error for o in OPERATIONS)])]
    _, schemas = models_json_schema(models, ref_template=_SCHEMA)  # pyrefly: ignore[bad-argument-type]
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        if operation.admin and not admin:
            continue
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": version},
        "paths": paths,
        "components": components,
    }


def encoded(version: str, *, keys: bool, admin: bool) -> bytes:
    """Returns the document as JSON. The first call takes a quarter of a second, so no event loop makes it."""
    return msgspec.json.encode(description(version, keys=keys, admin=admin))


def _operation(operation: Operation, keys: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(operation.response, str):
        content[operation.response] = {}
    elif operation.response is not None:
        content[_JSON] = _schema(operation.response)
    if operation.streams:
        content["text/event-stream"] = {}
    errors = [code for code in operation.errors if keys or code != 401]
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "Success", **({"content": content} if content else {})},
            **{
                str(code): {"description": "An error", "content": {_JSON: _schema(operation.error)}}
                for code in errors
            },
        },
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {_JSON: _schema(operation.body)}}
    if operation.uploads:
        described["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": _upload()}},
        }
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in operation.parameters
        ]
    if keys and not operation.open:
        described["security"] = [{"key": []}]
    return described


def _upload() -> dict[str, Any]:
    """The schema of a form with a file. Fields of an object in it are named `object[field]`."""
    form = FileForm.model_json_schema()
    fields = form.pop("$defs")["ExpiresAfter"]["properties"]
    del form["properties"]["expires_after"]
    form["properties"] |= {f"expires_after[{name}]": schema for name, schema in fields.items()}
    form["properties"]["file"] = {"type": "string", "format": "binary"}
    form["required"].append("file")
    return form


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return {"schema": {"$ref": _SCHEMA.format(model=model.__name__)}}
