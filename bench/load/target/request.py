"""The HTTP form of a request: path, headers, and a JSON body that the endpoint accepts."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Api = Literal["completions", "chat"]
PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class Dialect(msgspec.Struct, frozen=True):
    """Extensions of OpenAI's API that this server accepts. `endpoint.find_dialect` finds them.

    Attributes:
        usage: the last chunk has the token counts.
        running_usage: every chunk has the token counts so far.
        ignore_eos: answers are exactly as long as asked.
    """

    usage: bool = True
    running_usage: bool = True
    ignore_eos: bool = True

    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.usage:
            running = {"continuous_usage_stats": True} if self.running_usage else {}
            fields["stream_options"] = {"include_usage": True} | running
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return fields


class Target(msgspec.Struct, frozen=True):
    """Where requests go, and what they have in common."""

    urls: tuple[str, ...]  # sessions take turns; without a slash at the end
    api: Api
    model: str
    dialect: Dialect
    headers: dict[str, str] = {}
    extra_body: dict[str, Any] = {}

    def endpoint(self, session: int) -> str:
        """Where requests of this session go."""
        return self.urls[session % len(self.urls)] + PATHS[self.api]

    def body(self, prompt: str | list[int] | list[dict[str, str]], max_tokens: int) -> bytes:
        """`prompt`: for chat a list of messages, for completions text or token ids."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages" if self.api == "chat" else "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "temperature": 0.0,
        }
        return msgspec.json.encode(fields | self.dialect.fields() | self.extra_body)

    def headers_of(self, session: str) -> dict[str, str]:
        headers = {"content-type": "application/json", "accept": "text/event-stream"} | self.headers
        return headers | ({"x-session-id": session} if session else {})
