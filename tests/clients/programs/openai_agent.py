"""The task as a program of openai-agents: openai_agent.py PROVIDER."""

import os
import sys
from pathlib import Path

from agents import (  # pyrefly: ignore[missing-import]
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

NOTE = Path("note.txt")
set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{os.environ['BATON_URL']}/v1", api_key="sk-none")
models = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@function_tool
def write_note(text: str) -> str:
    """Writes the note."""
    NOTE.write_text(text)
    return "written"


@function_tool
def read_note() -> str:
    """Reads the note."""
    return NOTE.read_text()


agent = Agent(
    name="notes",
    instructions="You keep notes. " * 200,
    model=models[sys.argv[1]](model="fake", openai_client=client),
    tools=[write_note, read_note],
)
print(Runner.run_sync(agent, os.environ["BATON_TASK"]).final_output)
