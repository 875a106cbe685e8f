"""The task as a program of pydantic-ai: pydantic_ai_agent.py PROVIDER."""

import os
import sys
from pathlib import Path

from pydantic_ai import Agent  # pyrefly: ignore[missing-import]
from pydantic_ai.models.anthropic import AnthropicModel  # pyrefly: ignore[missing-import]
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # pyrefly: ignore[missing-import]
from pydantic_ai.providers.anthropic import AnthropicProvider  # pyrefly: ignore[missing-import]
from pydantic_ai.providers.openai import OpenAIProvider  # pyrefly: ignore[missing-import]

URL, NOTE = os.environ["BATON_URL"], Path("note.txt")
openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="sk-none")
models = {
    "chat": lambda: OpenAIChatModel("fake", provider=openai),
    "responses": lambda: OpenAIResponsesModel("fake", provider=openai),
    "anthropic": lambda: AnthropicModel("fake", provider=AnthropicProvider(base_url=URL, api_key="sk-none")),
}
agent = Agent(models[sys.argv[1]](), system_prompt="You keep notes. " * 200)


@agent.tool_plain
def write_note(text: str) -> str:
    """Writes the note."""
    NOTE.write_text(text)
    return "written"


@agent.tool_plain
def read_note() -> str:
    """Reads the note."""
    return NOTE.read_text()


print(agent.run_sync(os.environ["BATON_TASK"]).output)
