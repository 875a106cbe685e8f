"""The JSON of /v1/messages, as models for `/openapi.json` and for tests."""

from typing import Any, Literal

from pydantic import RootModel

from baton.router.api.responses import ResponseModel

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputThinking(ResponseModel):
    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class OutputText(ResponseModel):
    type: Literal["text"]
    text: str


class OutputToolUse(ResponseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = OutputThinking | OutputText | OutputToolUse


class ThinkingTokens(ResponseModel):
    thinking_tokens: int


class MessageUsage(ResponseModel):
    input_tokens: int
    """Without those that were found in a prefix cache."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class AnthropicMessage(ResponseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ResponseModel):
    input_tokens: int


class AnthropicErrorDetail(ResponseModel):
    type: str
    message: str
    details: dict[str, str] | None = None


class AnthropicErrorResponse(ResponseModel):
    """The body of every response that is not a success, and the last event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class MessageStart(ResponseModel):
    type: Literal["message_start"]
    message: AnthropicMessage


class BlockStart(ResponseModel):
    type: Literal["content_block_start"]
    index: int
    content_block: OutputBlock


class ThinkingDelta(ResponseModel):
    type: Literal["thinking_delta"]
    thinking: str


class TextDelta(ResponseModel):
    type: Literal["text_delta"]
    text: str


class InputJsonDelta(ResponseModel):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(ResponseModel):
    type: Literal["content_block_delta"]
    index: int
    delta: ThinkingDelta | TextDelta | InputJsonDelta


class BlockStop(ResponseModel):
    type: Literal["content_block_stop"]
    index: int


class MessageEnd(ResponseModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(ResponseModel):
    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(ResponseModel):
    type: Literal["message_stop"]


class MessageEvent(
    RootModel[
        MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
        | AnthropicErrorResponse
    ]
):  # fmt: skip
    """One event of a stream. There is no [DONE] at the end."""
