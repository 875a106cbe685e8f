"""The translation of bodies into chats takes time in proportion to their size."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from baton.router.api.anthropic import content
from baton.router.api.openai_responses import items

COUNT = 40_000
USE = content.ToolUseBlock(type="tool_use", id="a", name="f", input={})
CALL = items.FunctionCallItem(type="function_call", call_id="a", name="f", arguments="{}")


@pytest.mark.parametrize(
    "translate",
    [
        lambda: content.chat_messages(
            "", [content.InputMessage.model_construct(role="assistant", content=[USE] * COUNT)]
        ),
        lambda: items.chat_messages(None, [CALL] * COUNT),
    ],
    ids=["messages", "responses"],
)
def test_many_calls_of_one_message(translate: Callable[[], list[dict[str, Any]]]):
    began = time.process_time()
    [message] = translate()
    assert time.process_time() - began < 2.0
    assert len(message["tool_calls"]) == COUNT
