"""The translation of bodies into chats takes time in proportion to their size."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from baton.router.api.anthropic import body as anthropic
from baton.router.api.openai_responses import body as openai

COUNT = 40_000
USE = anthropic.ToolUseBlock(type="tool_use", id="a", name="f", input={})
CALL = openai.FunctionCallItem(type="function_call", call_id="a", name="f", arguments="{}")


@pytest.mark.parametrize(
    "translate",
    [
        lambda: anthropic.chat_messages(
            "", [anthropic.InputMessage.model_construct(role="assistant", content=[USE] * COUNT)]
        ),
        lambda: openai.chat_messages(None, [CALL] * COUNT),
    ],
    ids=["messages", "responses"],
)
def test_many_calls_of_one_message(translate: Callable[[], list[dict[str, Any]]]):
    began = time.process_time()
    [message] = translate()
    assert time.process_time() - began < 2.0
    assert len(message["tool_calls"]) == COUNT
