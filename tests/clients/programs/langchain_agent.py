"""The task as a program of langchain: langchain_agent.py PROVIDER."""

import os
import sys
from pathlib import Path

from langchain.agents import create_agent  # pyrefly: ignore[missing-import]
from langchain_anthropic import ChatAnthropic  # pyrefly: ignore[missing-import]
from langchain_openai import ChatOpenAI  # pyrefly: ignore[missing-import]

URL, NOTE = os.environ["BATON_URL"], Path("note.txt")
settings = {"model": "fake", "api_key": "sk-none"}
models = {
    "chat": lambda: ChatOpenAI(base_url=f"{URL}/v1", **settings),
    "responses": lambda: ChatOpenAI(base_url=f"{URL}/v1", use_responses_api=True, **settings),
    "anthropic": lambda: ChatAnthropic(base_url=URL, **settings),
}


def write_note(text: str) -> str:
    """Writes the note."""
    NOTE.write_text(text)
    return "written"


def read_note() -> str:
    """Reads the note."""
    return NOTE.read_text()


agent = create_agent(
    models[sys.argv[1]](), tools=[write_note, read_note], system_prompt="You keep notes. " * 200
)
state = agent.invoke({"messages": [{"role": "user", "content": os.environ["BATON_TASK"]}]})
print(state["messages"][-1].text)
