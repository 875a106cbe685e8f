"""The clients, and how each does one task of three turns with tools.

The model writes a note with one tool and reads it with another, then says what it read. `$URL` is the router,
`$HOME` and `$WORK` are empty directories, `$INSTALLED` has the packages, and `$PROGRAMS` our programs.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from string import Template
from typing import Any

from tests.clients.model import Call

TASK = "Write a note that it snows, then read it."
NOTE = "it snows"
PROVIDER = {"BATON_URL": "$URL", "BATON_TASK": TASK}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@dataclass(frozen=True)
class Client:
    """A client that people use.

    Attributes:
        npm, pip: packages. The version of the first one is the client's.
        endpoint: where its turns go.
        calls: what the model calls in each turn but the last.
        command: does the task in `$WORK`.
        before: commands before it.
        environment: beside PATH, HOME and LANG.
        files: texts by path.
    """

    endpoint: str
    calls: tuple[Call, ...]
    command: tuple[str, ...]
    npm: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def packages(self) -> tuple[str, ...]:
        return self.npm or self.pip


def _calls(write: str, written: dict[str, Any], read: str, shown: dict[str, Any]) -> tuple[Call, ...]:
    return Call(write, written), Call(read, shown)


def _programs(
    name: str,
    program: str,
    providers: Mapping[str, str],
    *,
    npm: tuple[str, ...] = (),
    pip: tuple[str, ...] = (),
) -> dict[str, Client]:
    """A library with one of our programs, once for each provider of models that it has."""
    interpreter = "node" if npm else "$INSTALLED/bin/python"
    return {
        f"{name}-{provider}": Client(
            endpoint,
            _calls("write_note", {"text": NOTE}, "read_note", {}),
            (interpreter, program, provider),
            npm=npm,
            pip=pip,
            environment=PROVIDER,
        )
        for provider, endpoint in providers.items()
    }


_BIN = "$INSTALLED/node_modules/.bin"
_OPENAI = {"chat": CHAT, "responses": RESPONSES}
_ALL = {**_OPENAI, "anthropic": MESSAGES}
_PATH = "$WORK/note.txt"
_SHOW = "cat note.txt"
_CODEX = 'model_providers.baton={name="baton", base_url="$URL/v1", env_key="OPENAI_API_KEY"}'
_OPENCODE = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "$URL/v1", "apiKey": "sk-none"},
    "models": {"fake": {"name": "fake"}},
}
_PI = {
    "baseUrl": "$URL/v1", "api": "openai-completions", "apiKey": "sk-none", "models": [{"id": "fake"}]
}  # fmt: skip


def filled(text: str, places: Mapping[str, str]) -> str:
    """Replaces the places that a client's texts name."""
    return Template(text).safe_substitute(places)


def script(client: Client, places: Mapping[str, str]) -> list[Call]:
    """What the model calls in each turn."""
    return [Call(*json.loads(filled(json.dumps(call), places))) for call in client.calls]


CLIENTS: dict[str, Client] = {
    "claude-code": Client(
        MESSAGES,
        _calls("Write", {"file_path": _PATH, "content": NOTE}, "Bash", {"command": _SHOW}),
        (f"{_BIN}/claude", "-p", TASK, "--model", "fake", "--allowedTools", "Write,Bash"),
        npm=("@anthropic-ai/claude-code",),
        environment={
            "ANTHROPIC_BASE_URL": "$URL",
            "ANTHROPIC_API_KEY": "sk-none",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "codex": Client(
        RESPONSES,
        _calls("exec_command", {"cmd": f"echo {NOTE} > note.txt"}, "exec_command", {"cmd": _SHOW}),
        (
            f"{_BIN}/codex",
            "exec",
            "--skip-git-repo-check",
            "-s",
            "danger-full-access",
            "-m",
            "fake",
            "-c",
            "model_provider=baton",
            "-c",
            _CODEX,
            TASK,
        ),
        npm=("@openai/codex",),
        environment={"OPENAI_API_KEY": "sk-none"},
    ),
    **_programs(
        "ai-sdk",
        "$INSTALLED/ai_sdk.mjs",
        {"openai": RESPONSES, "compatible": CHAT, "anthropic": MESSAGES},
        npm=("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
    ),
    **_programs(
        "pydantic-ai",
        "$PROGRAMS/pydantic_ai_agent.py",
        _ALL,
        pip=("pydantic-ai-slim[openai,anthropic]",),
    ),
    **_programs("openai-agents", "$PROGRAMS/openai_agent.py", _OPENAI, pip=("openai-agents",)),
    **_programs(
        "langchain",
        "$PROGRAMS/langchain_agent.py",
        _ALL,
        pip=("langchain", "langchain-openai", "langchain-anthropic"),
    ),
    "opencode": Client(
        CHAT,
        _calls("write", {"filePath": _PATH, "content": NOTE}, "bash", {"command": _SHOW, "description": "."}),
        (f"{_BIN}/opencode", "run", "-m", "baton/fake", TASK),
        npm=("opencode-ai",),
        environment={"OPENCODE_CONFIG": "$HOME/opencode.json", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        files={"$HOME/opencode.json": json.dumps({"provider": {"baton": _OPENCODE}})},
    ),
    "qwen-code": Client(
        CHAT,
        _calls(
            "write_file",
            {"file_path": _PATH, "content": NOTE},
            "run_shell_command",
            {"command": _SHOW, "is_background": False},
        ),
        (f"{_BIN}/qwen", "--yolo", "-p", TASK),
        npm=("@qwen-code/qwen-code",),
        environment={"OPENAI_BASE_URL": "$URL/v1", "OPENAI_API_KEY": "sk-none", "OPENAI_MODEL": "fake"},
    ),
    "pi": Client(
        CHAT,
        _calls("write", {"path": _PATH, "content": NOTE}, "bash", {"command": _SHOW}),
        (f"{_BIN}/pi", "-p", "--provider", "baton", "--model", "fake", TASK),
        npm=("@earendil-works/pi-coding-agent",),
        files={"$HOME/.pi/agent/models.json": json.dumps({"providers": {"baton": _PI}})},
    ),
    "cline": Client(
        CHAT,
        _calls("editor", {"path": _PATH, "new_text": NOTE}, "run_commands", {"commands": [_SHOW]}),
        (f"{_BIN}/cline", TASK),
        npm=("cline",),
        before=((f"{_BIN}/cline", "auth", "-p", "openai", "-k", "sk-none", "-m", "fake", "-b", "$URL/v1"),),
    ),
}
