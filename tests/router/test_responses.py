"""/v1/responses, with the official OpenAI client and without."""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
    ResponseStreamEvent,
)
from pydantic import TypeAdapter

from baton.router.active_request import ActiveRequest
from baton.router.admission.keys import ApiKey, api_keys
from baton.router.api.responses import ResponseObject
from baton.router.endpoints import stored_responses
from baton.router.endpoints.frontend import Frontend
from baton.router.endpoints.stored_responses import Events, StoredResponse, StoredResponses, home_tag
from baton.router.errors import NotFound
from baton.router.preparation import child
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc.token_ids import unpacked_ids

from .conftest import ANSWER, ARGUMENTS, TEXT, THOUGHT, Cluster, make_cluster

PATH = "/v1/responses"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": True}
CALLED = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"}


def client(cluster: Cluster, key: str = "any") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key=key, max_retries=0)


async def test_the_openai_client_gets_items_and_continues_the_conversation(thinking: Cluster):
    async with client(thinking) as api:
        first = await api.responses.create(
            model="fake", input="Weather?", instructions="Be brief.", tools=[WEATHER], metadata={"a": "b"}
        )
        assert first.id.startswith(home_tag(urlsplit(thinking.url).netloc)), (
            "a picker finds this router again"
        )
        reasoning, message, call = first.output
        assert isinstance(reasoning, ResponseReasoningItem)
        assert reasoning.content is not None
        assert reasoning.content[0].text == THOUGHT
        assert isinstance(message, ResponseOutputMessage)
        assert first.output_text == ANSWER
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)
        assert (first.status, first.metadata, first.temperature) == ("completed", {"a": "b"}, 1.0)
        assert first.usage is not None
        assert 0 < first.usage.output_tokens_details.reasoning_tokens < first.usage.output_tokens
        assert first.usage.input_tokens == len(unpacked_ids(thinking.sent.prompt_ids))
        assert "Be brief." in thinking.prompt

        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
        second = await api.responses.create(input=[result], previous_response_id=first.id)  # pyrefly: ignore
        continued = thinking.prompt
        turns = ["Weather?", f"<think>{THOUGHT}</think>{ANSWER}<tool_call>", "Paris", "Rain"]
        assert [continued.index(turn) for turn in turns] == sorted(continued.index(turn) for turn in turns)
        assert "Be brief." not in continued, "instructions are not carried over"
        again = [{"role": "user", "content": "Weather?"}, *first.to_dict()["output"], result]  # pyrefly: ignore
        await api.responses.create(input=again, store=False)  # pyrefly: ignore
        assert thinking.prompt == continued, "as if the client had sent the items again"
        third = await api.responses.create(input="Why?", previous_response_id=second.id)
        assert "Rain" in thinking.prompt
        assert third.previous_response_id == second.id


async def test_the_output_of_an_unknown_call_is_refused(thinking: Cluster):
    status, earlier = await thinking.post(PATH, input="Hi", max_output_tokens=3)
    assert status == 200
    for given, before, status in (("call_1", [CALLED], 200), ("call_2", [CALLED], 400), ("call_1", [], 400)):
        output = {"type": "function_call_output", "call_id": given, "output": "Rain"}
        body = {"input": [*before, output], "tools": [WEATHER], "previous_response_id": earlier["id"]}
        for path in (PATH, f"{PATH}/input_tokens"):
            answered, answer = await thinking.post(path, **body)
            assert answered == status, answer
            words = f"No tool call found for function call output with call_id {given}."
            assert status == 200 or (answer["error"]["message"], answer["error"]["param"]) == (words, "input")


async def test_a_stream_has_typed_events_in_order(thinking: Cluster):
    body = {"input": "Weather?", "tools": [WEATHER]}
    events = await thinking.typed_events(PATH, **body)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "content_part.added",
        "reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done",
        "output_text.delta", "output_text.done",
        "function_call_arguments.delta", "function_call_arguments.done", "completed",
    ]  # fmt: skip
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]
    assert final["output"] == done
    for kind, whole in (
        ("reasoning_text", THOUGHT), ("output_text", ANSWER), ("function_call_arguments", ARGUMENTS),
    ):  # fmt: skip
        deltas = [e["delta"] for e in events if e["type"] == f"response.{kind}.delta"]
        assert "".join(deltas) == whole
        assert len(deltas) > 1
    async with (
        client(thinking) as api,
        api.responses.stream(model="fake", input="Hi", tools=[WEATHER]) as stream,
    ):
        assert (await stream.get_final_response()).output_text == ANSWER
    async with thinking.http.get(f"{thinking.url}{PATH}/{final['id']}") as response:
        assert await response.json() == final
    ResponseObject.model_validate(final)
    Response.model_validate(final)


async def test_a_limit_makes_a_response_incomplete(cluster: Cluster):
    status, result = await cluster.post(PATH, input="Hi", max_output_tokens=99_999)
    assert (status, result["status"], result["max_output_tokens"]) == (200, "completed", 99_999)
    assert cluster.sent.sampling.max_tokens == 8192 - len(unpacked_ids(cluster.sent.prompt_ids)), (
        "it is an upper bound"
    )
    status, result = await cluster.post(PATH, input="Hi", max_output_tokens=3)
    assert (status, result["status"]) == (200, "incomplete")
    assert result["incomplete_details"] == {"reason": "max_output_tokens"}
    assert result["output"][0]["status"] == "incomplete"
    events = await cluster.typed_events(PATH, input="Hi", max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["content"] == result["output"][0]["content"]


async def test_logprobs_of_a_message(thinking: Cluster):
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    _, result = await thinking.post(PATH, input="Hi", tools=[WEATHER], **include)
    ResponseObject.model_validate(result)
    Response.model_validate(result)
    entries = result["output"][1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries).strip() == ANSWER.strip() + "<", "of the tool call"
    assert result["output"][0]["content"][0].keys() == {"type", "text"}
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    status, result = await thinking.post(PATH, input="Hi", top_logprobs=2)
    assert (status, result["error"]["param"]) == (400, "top_logprobs")


async def test_logprobs_of_characters_of_several_tokens(cluster: Cluster):
    events = await cluster.typed_events(PATH, input="Hi", include=["message.output_text.logprobs"])
    (part,) = [event["part"] for event in events if event["type"] == "response.content_part.done"]
    assert (
        bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == part["text"] == TEXT
    )
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for entries in deltas for entry in entries] == part["logprobs"]


async def test_structured_output_reaches_the_workers(cluster: Cluster):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    status, result = await cluster.post(PATH, input="Hi", text=text, max_output_tokens=9)
    assert (status, result["text"]["format"]["schema"]) == (200, schema)
    assert '"integer"' in cluster.sent.sampling.structured_output.json_schema
    text["format"]["schema"] = {"type": "wrong"}
    status, result = await cluster.post(PATH, input="Hi", text=text)
    assert (status, result["error"]["param"]) == (400, "text.format")
    assert result["error"]["message"].startswith("text.format: ")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 3}, "max_tokens"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "always"}, "truncation"),
    ({"input": [{"type": "audio"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments"),
    ({"tools": [{"type": "telephone"}]}, "tools[0]"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"background": True, "store": False}, "background"),
    ({"input": [CALLED, {"type": "function_call_output", "call_id": "call_1", "output": "1"}]}, "input"),
    ({"tools": [WEATHER]}, "tools"),
]


async def test_encrypted_reasoning_comes_back(thinking: Cluster):
    asked = {"include": ["reasoning.encrypted_content"], "store": False}
    _, response = await thinking.post(PATH, input="Hi", **asked)
    item = response["output"][0]
    assert item["content"][0]["text"] == THOUGHT
    kept = {name: item[name] for name in ("type", "id", "summary", "encrypted_content")}
    assert THOUGHT.strip() not in str(kept)
    history = [
        {"role": "user", "content": "Hi"},
        kept,
        *response["output"][1:2],
        {"role": "user", "content": "?"},
    ]
    await thinking.post(PATH, input=history, **asked)
    assert f"<think>{THOUGHT}</think>" in thinking.prompt
    await thinking.post(PATH, input=[{**kept, "encrypted_content": "gAAAAAB"}, *history[2:]])
    assert THOUGHT not in thinking.prompt, "another server made it"
    _, response = await thinking.post(PATH, input="Hi")
    assert "encrypted_content" not in response["output"][0]


async def test_what_is_not_served_is_refused_by_name(cluster: Cluster):
    for body, param in REFUSED:
        status, result = await cluster.post(PATH, **{"input": "Hi", **body})
        assert (status, result["error"]["param"]) == (400, param), result
        assert param.partition("[")[0] in result["error"]["message"]
    _, result = await cluster.post(PATH, input=5)
    assert result["error"]["message"] == "input: must be a string or a list of items"


async def test_stored_responses_belong_to_one_key(tokenizer: ModelTokenizer, tmp_path: Path):
    async with (
        make_cluster(tokenizer, tmp_path, api_keys=api_keys(["a", "b"], None)) as cluster,
        client(cluster, "a") as mine,
        client(cluster, "b") as other,
    ):
        made = await mine.responses.create(input="Hi")
        assert (await mine.responses.retrieve(made.id)).output_text == TEXT
        with pytest.raises(openai.NotFoundError, match=f"id '{made.id}' not found"):
            await other.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError, match="a router process keeps") as refusal:
            await other.responses.create(input="x", previous_response_id=made.id)
        assert refusal.value.param == "previous_response_id"
        with pytest.raises(openai.BadRequestError, match="must begin with resp_, not 'bad'"):
            await mine.responses.create(input="x", previous_response_id="bad")
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(made.id)
        with pytest.raises(openai.BadRequestError, match="not made with background"):
            await mine.responses.cancel(made.id)
        await mine.responses.delete(made.id)
        unstored = await mine.responses.create(input="Hi", store=False)
        for id in (made.id, unstored.id):
            with pytest.raises(openai.NotFoundError):
                await mine.responses.retrieve(id)


async def test_a_response_in_the_background(cluster: Cluster):
    async with client(cluster) as api:
        made = await api.responses.create(input="Hi", background=True)
        assert made.status == "queued"
        while made.status in ("queued", "in_progress"):
            made = await api.responses.retrieve(made.id)
        assert (made.status, made.output_text) == ("completed", TEXT)
        assert (await api.responses.cancel(made.id)).status == "completed"

        for worker in cluster.workers:
            worker.step_seconds = 3600.0
        slow = await api.responses.create(input="Hi", background=True)
        with pytest.raises(openai.BadRequestError, match="not complete yet"):
            await api.responses.create(input="Hi", previous_response_id=slow.id)
        assert (await api.responses.cancel(slow.id)).status == "cancelled"
        assert (await api.responses.retrieve(slow.id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await api.responses.create(input="Hi", background=True, temperature=-1)


def numbered(events: list[dict[str, Any]]) -> list[int]:
    return [event["sequence_number"] for event in events]


async def test_a_response_in_the_background_is_streamed(cluster: Cluster):
    made = await cluster.typed_events(PATH, input="Hi", background=True)
    whole, id = made[-1]["response"], made[0]["response"]["id"]
    assert made[-1]["type"] == "response.completed"
    assert numbered(made) == list(range(len(made)))
    async with client(cluster) as api:
        for after in (None, 0, 5, len(made) - 1):
            more: Any = {} if after is None else {"starting_after": after}
            stream = await api.responses.retrieve(id, stream=True, **more)
            again = [event.to_dict() async for event in stream]
            assert numbered(again) == list(range(0 if after is None else after + 1, len(made)))
        assert (await api.responses.retrieve(id)).to_dict() == whole

        other = await api.responses.create(input="Hi")
        for worker in cluster.workers:
            worker.step_seconds = 3600.0
        stream = await api.responses.create(input="Hi", background=True, stream=True)
        first: Any = await anext(aiter(stream))
        follow = asyncio.create_task(cluster.http.get(f"{cluster.url}{PATH}/{first.response.id}?stream=true"))
        await stream.close()  # the response goes on without its first client
        followed = await follow
        assert (await api.responses.cancel(first.response.id)).status == "cancelled"
        assert b"response.created" in await followed.read(), "and its stream ends"
    refused = await cluster.get(f"{PATH}/{other.id}?stream=true", expected=400)
    assert refused["error"]["param"] == "stream"
    refused = await cluster.get(f"{PATH}/{id}?stream=true&starting_after=x", expected=400)
    assert refused["error"]["param"] == "starting_after"


async def test_a_token_without_an_event_ends_no_wait_for_a_keepalive():
    events = Events()
    waits = asyncio.create_task(events.wait(3600.0))
    await asyncio.sleep(0)
    events.add([])
    await asyncio.sleep(0)
    assert not waits.done()
    events.add([b"event: x\ndata: {}\n\n"])
    assert await waits


async def test_the_items_before_a_response_are_listed(cluster: Cluster):
    async with client(cluster) as api:
        first = await api.responses.create(input="One")
        second = await api.responses.create(
            input=[{"role": "user", "content": "Two"}], previous_response_id=first.id
        )
        items: Any = [
            item async for item in await api.responses.input_items.list(second.id, order="asc", limit=2)
        ]
        texts = [item.content[0].text for item in items]
        assert texts == ["One", TEXT, "Two"], "pages of two"
        older: Any = await api.responses.input_items.list(second.id, after=items[2].id)
        assert [item.content[0].text for item in older.data] == [TEXT, "One"]
        newest: Any = await api.responses.input_items.list(second.id, limit=1)
        assert (newest.data[0].content[0].text, newest.has_more) == ("Two", True)
        counted = await api.responses.input_tokens.count(input="Two", previous_response_id=first.id)
        assert second.usage is not None
        assert counted.input_tokens == second.usage.input_tokens
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order")):
        refused = await cluster.get(f"{PATH}/{second.id}/input_items?{query}", expected=400)
        assert refused["error"]["param"] == param
    unknown = await cluster.get(f"{PATH}/{second.id}/input_items?after=item_9", expected=404)
    assert unknown["error"]["param"] == "after", "the first page would come again and again"


@pytest.mark.all
async def test_a_child_lists_many_items_within_the_limits_of_the_key(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each item would become an object, and all of them would hold up the event loop."""
    monkeypatch.setattr(
        child.Preparation, "prepare", lambda *_: pytest.fail("the router itself reads the items")
    )
    keys = (ApiKey.of("one", "k", max_requests=1),)
    many: Any = [{"role": "user", "content": str(number)} for number in range(1000)]
    async with make_cluster(tokenizer, tmp_path, api_keys=keys) as cluster, client(cluster, "k") as api:
        made = await api.responses.create(input=many, max_output_tokens=1)
        page = await api.responses.input_items.list(made.id, after="item_502", limit=2)
        items: Any = page.data
        assert [(item.id, item.content[0].text) for item in items] == [
            ("item_501", "501"),
            ("item_500", "500"),
        ]
        assert page.has_more
        account = cluster.router.frontend.authorize("Bearer k")
        with cluster.router.frontend.admit(account), pytest.raises(openai.RateLimitError):
            await api.with_options(max_retries=0).responses.input_items.list(made.id)


async def test_a_client_that_leaves_before_its_background_response_begins(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    activate = Frontend.activate

    async def leaving(*args: Any, **more: Any) -> ActiveRequest:
        active, task = await activate(*args, **more), asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)  # the cancellation arrives
        return active

    monkeypatch.setattr(Frontend, "activate", leaving)
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await cluster.post(PATH, input="Hi", background=True)
    await cluster.idle()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_child_process_gets_the_conversation(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    _, first = await cluster.post(PATH, input="The first question.")
    monkeypatch.setattr(child, "SMALL_BYTES", 0)
    status, second = await cluster.post(
        PATH, input="The second.", previous_response_id=first["id"], instructions="Brief."
    )
    assert (status, second["instructions"]) == (200, "Brief.")
    assert cluster.prompt.index("The first question.") < cluster.prompt.index("The second.")
    assert TEXT in cluster.prompt


async def test_a_conversation_is_as_long_as_a_body_may_be(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, max_body_bytes=1000) as cluster:
        _, first = await cluster.post(PATH, input="x" * 700)
        status, result = await cluster.post(PATH, input="y" * 300, previous_response_id=first["id"])
        assert (status, result["error"]["param"]) == (413, "previous_response_id")


async def test_a_failed_stream_ends_with_response_failed(cluster: Cluster):
    for worker in cluster.decodes:
        worker.step_seconds = 3600.0
    reading = asyncio.create_task(cluster.typed_events(PATH, input="Hi"))
    await cluster.expire()
    events = await reading
    assert events[-1]["type"] == "response.failed"
    EVENT.validate_python(events[-1])
    assert events[-1]["response"]["error"]["code"] == "server_error"


def test_stored_responses_are_bounded(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(stored_responses, "MAX_RESPONSES", 3)
    monkeypatch.setattr(stored_responses, "MAX_BYTES", 200)
    keys = {"", "a", "b"}
    stored = StoredResponses(lambda: keys, lambda: now)

    def put(key: str, id: str, size: int) -> None:
        stored.put(key, id, StoredResponse(b"r" * size, (), False))

    def has(key: str, id: str) -> bool:
        try:
            return stored.get(key, id).response is not None
        except NotFound:
            return False

    for i in range(4):
        put("a", str(i), 10)
    assert [has("a", str(i)) for i in range(4)] == [False, True, True, True], "the count"
    put("a", "big", 75)
    assert [has("a", i) for i in ("2", "3", "big")] == [True, True, True]
    put("a", "more", 30)
    assert [has("a", i) for i in ("3", "big", "more")] == [False, False, True], "the bytes"
    stored.delete("a", "more")
    put("a", "whole", 100)
    assert has("a", "whole"), "what was deleted takes no room"
    put("a", "huge", 101)
    assert not has("a", "huge")
    put("b", "b", 100)
    put("a", "new", 100)
    assert has("b", "b")
    keys.remove("a")
    put("b", "more", 90)
    keys.add("a")
    assert not has("a", "new"), "the key was gone meanwhile"
    assert has("b", "more")
    now = stored_responses.MAX_SECONDS
    assert not has("b", "more"), "the time"


@pytest.mark.parametrize(
    "extra",
    ['"chat_template_kwargs": {"x": NaN}', '"previous_response_id": "\udcff"', '"x": ' + "[" * 99_999],
    ids=["NaN", "not UTF-8", "deep"],
)
async def test_json_that_not_all_parsers_take(cluster: Cluster, extra: str):
    """Otherwise NaN in a body would have let `store` and `previous_response_id` have no effect."""
    body = f'{{"input": "Hi", "store": false, {extra}}}'.encode(errors="surrogateescape")
    headers = {"Content-Type": "application/json"}
    async with cluster.http.post(cluster.url + PATH, data=body, headers=headers) as response:
        assert response.status == 400, await response.text()
        assert "not valid JSON" in (await response.json())["error"]["message"]


@pytest.mark.all
async def test_a_call_with_a_name_that_no_tool_can_have_is_text(
    thinking_tokenizer: ModelTokenizer, tmp_path: Path
):
    """The model invented the name. The conversation goes on."""
    call = f'<tool_call>{{"name": "get weather", "arguments": {ARGUMENTS}}}</tool_call>'
    text = f"<think>{THOUGHT}</think>{call}"
    async with make_cluster(thinking_tokenizer, tmp_path, text=text) as cluster:
        _, first = await cluster.post(PATH, input="Weather?", tools=[WEATHER])
        assert first["output"][-1]["content"][0]["text"] == call
        status, result = await cluster.post(PATH, input="And now?", previous_response_id=first["id"])
        assert status == 200, result
