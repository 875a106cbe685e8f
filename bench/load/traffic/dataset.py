"""Prompts that users have: a file in ShareGPT's form, JSONL of messages, or OpenAI's batch form.

    ShareGPT  [{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}, …]
    messages  {"messages": [{"role": "user", "content": "…"}], "max_tokens": 200}
    batch     {"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": […], …}}

A record of messages or of a batch is one request. A conversation of ShareGPT is a session, with a turn for
each question; answers come from the server. Without `max_tokens` the recorded answer says how long one is.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from baton.bench.load.traffic.workload import Session, Turn
from baton.system.lines import bounded_lines

CHARACTERS = 4
"""Of a token, as an estimate of the length of a recorded answer."""
DEFAULT_OUTPUT = 128
"""Tokens of an answer that the file says nothing of."""
MOST_RECORDS = 10_000
"""That are sent without --requests."""
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_FORMS = "ShareGPT's JSON, JSONL with messages, or OpenAI's batch form"
Message = dict[str, str]


def read_dataset(path: Path, *, first: int | None, output_len: int | None) -> tuple[Session, ...]:
    """Returns the first records as sessions. `output_len`: tokens of each answer; None: as the file says.

    Raises ValueError that names the file and the record.
    """
    sessions: list[Session] = []
    for number, record in enumerate(_records(path), 1):
        turns = _turns(record, f"dataset {path}, record {number}", output_len)
        if turns:
            sessions.append(Session(turns))
        if len(sessions) == (first or MOST_RECORDS):
            break
    if not sessions:
        raise ValueError(f"dataset {path} has no questions. Give {_FORMS}.")
    return tuple(sessions)


def _records(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file:
            if file.read(1) == b"[":
                file.seek(0)
                yield from json.load(file)
                return
            file.seek(0)
            for _, line in bounded_lines(file):
                if line.strip():
                    yield json.loads(line)
    except OSError as error:
        raise ValueError(f"dataset {path}: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"dataset {path} cannot be read ({error}). Give {_FORMS}.") from error


def _turns(record: Any, place: str, output_len: int | None) -> tuple[Turn, ...]:
    if not isinstance(record, dict):
        raise ValueError(f"{place} is no object. Give {_FORMS}.")
    if "conversations" in record:
        return tuple(_conversation(record["conversations"], place, output_len))
    body = record.get("body", record)
    prompt = body.get("prompt") if isinstance(body, dict) else None
    history = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else body.get("messages")
    messages = _messages(history, "role", "content", place)
    if messages[-1]["role"] == "assistant":  # a recorded answer
        answer, messages = messages[-1]["content"], messages[:-1]
    else:
        answer = ""
    if not messages:
        return ()
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    length = output_len or (limit if isinstance(limit, int) and limit > 0 else _length(answer))
    return (Turn(length, messages=tuple(messages)),)


def _conversation(record: Any, place: str, output_len: int | None) -> Iterator[Turn]:
    question: list[Message] = []
    for message in _messages(record, "from", "value", place):
        if message["role"] != "assistant":
            question.append(message)
        elif question:
            yield Turn(output_len or _length(message["content"]), messages=tuple(question))
            question = []


def _messages(records: Any, role: str, content: str, place: str) -> list[Message]:
    """Messages with the names of the roles that OpenAI's API has. Parts of a content become its text."""
    if not isinstance(records, list) or not records or not all(isinstance(each, dict) for each in records):
        raise ValueError(f"{place} has no messages. Give {_FORMS}.")
    return [
        {"role": _ROLES.get(each.get(role, ""), "user"), "content": _text(each.get(content), place)}
        for each in records
    ]


def _text(content: Any, place: str) -> str:
    if isinstance(content, list):
        parts: Sequence[Any] = content
        content = "\n".join(part.get("text", "") for part in parts if isinstance(part, dict))
    if not isinstance(content, str):
        raise ValueError(f"{place}: the content of a message is no text.")
    return content


def _length(answer: str) -> int:
    return max(1, len(answer) // CHARACTERS) if answer else DEFAULT_OUTPUT
