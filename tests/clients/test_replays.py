"""Recorded requests of today's clients, sent to a router: its answers, and what the model sees."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton.router.text.model_files import read_gguf
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from tests.clients.catalog import CHAT, CLIENTS, MESSAGES, RESPONSES, TASK, script
from tests.clients.model import FINAL, SAID, following, shown_tools, thought, turn, write_model
from tests.clients.report import LEAST_CACHED, recording, turns
from tests.clients.shape import events, replayed
from tests.reports.replay import answer_of
from tests.router.conftest import shared_forks

PLACES = {"HOME": "/home/user", "WORK": "/home/user/work"}
FORGET = {"openai-agents-chat", "langchain-chat"}
"""Clients that do not send the reasoning back."""


@pytest.fixture(scope="module")
def tokenizer(
    embedded_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelTokenizer]:
    at = tmp_path_factory.mktemp("clients") / "model"
    made = load_tokenizer(str(write_model(at, read_gguf(embedded_model_path).tokenizer)))
    with shared_forks(made):
        yield made


def tools_of(body: dict[str, Any]) -> list[str]:
    """The names under which the model should see the tools of a body."""
    names = []
    for tool in body.get("tools", ()):
        match tool.get("type"):
            case "namespace":
                names += [f"{tool['name']}__{inner['name']}" for inner in tool["tools"]]
            case "function" | "custom" | None:
                names += [tool.get("function", tool)["name"]] * (not tool.get("defer_loading"))
    return names


def check_order(path: str, sent: list[dict[str, Any]], *, stream: bool) -> None:
    """The events are those of the vendor's library, in the vendor's order."""
    import anthropic

    kinds: dict[str, Any] = {
        CHAT: ChatCompletionChunk if stream else ChatCompletion,
        RESPONSES: ResponseStreamEvent if stream else Response,
        MESSAGES: anthropic.types.RawMessageStreamEvent if stream else anthropic.types.Message,
    }
    event_type = TypeAdapter[Any](kinds[path])
    for event in sent:
        event_type.validate_python(event)
    if not stream:
        return
    order = " ".join(event.get("type", "") for event in sent)
    if path == MESSAGES:
        block = r"content_block_start( content_block_delta)* content_block_stop "
        assert re.fullmatch(rf"message_start (ping |{block})+message_delta message_stop", order)
    elif path == RESPONSES:
        assert [event["sequence_number"] for event in sent] == [*range(len(sent))]
        item = r"response.output_item.added (response.(?!output_item)\S+ )*response.output_item.done "
        said = sent[-1]["response"]
        why = said["incomplete_details"]
        end = "completed" if why is None else "incomplete"
        assert re.fullmatch(rf"response.created response.in_progress ({item})+response.{end}", order)
        if why is not None:
            assert why["reason"] == "max_output_tokens"
            assert said["usage"]["output_tokens"] == said["max_output_tokens"]
    else:
        assert sent[0]["choices"][0]["delta"]["role"] == "assistant"
        ends = [choice["finish_reason"] for event in sent for choice in event["choices"]]
        assert all(end is None for end in ends[:-1])
        assert ends[-1] is not None


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", CLIENTS)
async def test_recorded_requests(name: str, tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    client, file = CLIENTS[name], recording(name)
    assert file is not None
    requests = json.loads(file.read_text())
    calls = script(client, PLACES)
    answers: list[str] = []
    async with following(calls, tokenizer, tmp_path) as (cluster, seen):
        for number, request in enumerate(requests):
            body, path = replayed(requests, number, answers), request["path"].partition("?")[0]
            url = cluster.url + request["path"]
            async with cluster.http.post(url, json=body, headers=request["headers"]) as response:
                answers.append(await response.text())
            assert response.status == 200, answers[-1]
            stream = body.get("stream", False)
            sent = events(answers[-1])
            check_order(path, sent, stream=stream)
            prompt = seen[-1].text
            assert shown_tools(prompt) == tools_of(body)
            assert "x-anthropic-billing-header" not in prompt
            if (at := turn(calls, prompt)) is None:
                continue  # a title for the session, for example
            assert path == client.endpoint
            assert TASK in prompt
            answer = answer_of(path, sent, stream=stream)
            if at == len(calls):
                assert (answer.content, answer.calls, answer.finish) == (FINAL, [], "stop")
            else:
                assert [(call.name, call.arguments) for call in answer.calls] == [calls[at]]
                assert (answer.content.strip(), answer.finish) == (SAID, "tool_calls")
                hidden = body.get("thinking", {}).get("display") == "omitted"
                assert answer.reasoning.strip() == ("" if hidden else thought(at))
    found = turns(calls, seen)
    assert len(found) == len(calls)
    for each in found:
        assert each.extends == (name not in FORGET)
        assert each.common
        assert each.share >= LEAST_CACHED


async def test_sessions_of_one_agent_without_a_key_keep_their_homes(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    """pi names no session, so all begin alike for the router. They begin at once, on all workers."""
    file = recording("pi")
    assert file is not None
    body = json.loads(file.read_text())[0]["body"] | {"stream": False, "stream_options": None}
    head, _ = body["messages"]
    async with following([], tokenizer, tmp_path) as (cluster, seen):
        chats: list[list[dict[str, Any]]] = [[head] for _ in range(8)]

        async def next_turn(session: int, number: int) -> None:
            text = f"Task {number} of session {session}: read a file of {session} lines. " * 150
            chats[session].append({"role": "user", "content": text})
            status, result = await cluster.post(CHAT, **body | {"messages": chats[session]})
            assert status == 200, result
            chats[session].append(result["choices"][0]["message"])

        starts = [asyncio.Semaphore(0) for _ in cluster.prefills]
        for worker, each in zip(cluster.prefills, starts, strict=True):
            worker.starts = each
        for number in range(4):
            sent = asyncio.gather(*(next_turn(session, number) for session in range(len(chats))))
            await cluster.until(lambda: all(worker.submitted for worker in cluster.prefills))
            for each in starts * len(chats):
                each.release()
            await sent
    found = [
        turns([], [each for each in seen if f"of session {session}:" in each.text])
        for session in range(len(chats))
    ]
    assert all(len(each) == 3 and all(turn.common for turn in each) for each in found)
    left = [turn for each in found for turn in each if turn.share < LEAST_CACHED]
    assert len(left) <= 2, f"a home that reports late on a busy machine may lose a session: {left}"
