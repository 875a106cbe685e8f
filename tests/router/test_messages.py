"""/v1/messages, with the official Anthropic client and without."""

import asyncio
import base64
import hmac
from pathlib import Path
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import TypeAdapter

from baton.router.admission.keys import api_keys
from baton.router.api.anthropic.reply import AnthropicErrorResponse, AnthropicMessage
from baton.router.api.jobs import SamplingDefaults
from baton.router.api.messages import parsed_arguments
from baton.router.text.sealed import seal_key, sealed, signature, unsealed
from baton.router.text.tokenizer import ModelTokenizer
from baton.rpc.token_ids import unpacked_ids
from tests.fake_worker import SECRET

from .conftest import ANSWER, ARGUMENTS, NO_DEFAULTS, TEXT, THOUGHT, Cluster, make_cluster

PATH = "/v1/messages"
TOOL: Any = {"name": "get_weather", "description": "Now.", "input_schema": {"type": "object"}}
HELLO: Any = [{"role": "user", "content": "Hi"}]
BODY = {"max_tokens": 200, "messages": HELLO}
KEY = seal_key(SECRET)


def client(cluster: Cluster, key: str = "any") -> Any:
    import anthropic  # here, since every process of a test run imports this module, and this takes a second

    return anthropic.AsyncAnthropic(base_url=cluster.url, api_key=key, max_retries=0)


@pytest.mark.all
async def test_the_anthropic_client_gets_blocks_and_sends_them_back(thinking: Cluster):
    cached = {"type": "ephemeral"}
    system: Any = [{"type": "text", "text": "Be brief. " * 30, "cache_control": cached}]
    async with client(thinking) as api:
        more: Any = {"model": "fake", "max_tokens": 200, "system": system, "tools": [TOOL]}
        first = await api.messages.create(
            messages=HELLO, thinking={"type": "enabled", "budget_tokens": 1024}, **more
        )
        thought, text, call = first.content
        assert (thought.type, thought.type == "thinking" and thought.thinking) == ("thinking", THOUGHT)
        assert text.type == "text"
        assert text.text == ANSWER
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
        assert first.stop_reason == "tool_use"
        assert first.usage.cache_read_input_tokens == 3
        prompt = len(unpacked_ids(thinking.sent.prompt_ids))
        assert first.usage.cache_creation_input_tokens == prompt // 64 * 64 - 3
        assert first.usage.input_tokens == prompt % 64, "it is in no whole chunk"
        assert thinking.sent.sampling.reasoning.budget == 1024
        counted = await api.messages.count_tokens(model="fake", system=system, tools=[TOOL], messages=HELLO)
        assert counted.input_tokens == len(unpacked_ids(thinking.sent.prompt_ids))

        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Snow", "is_error": True}
        question: Any = {"type": "text", "text": "So?"}
        turns: Any = [*HELLO, first.to_param(), {"role": "user", "content": [result, question]}]
        async with api.messages.stream(messages=turns, **more) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        expected = ["Be brief.", "Hi", f"<think>{THOUGHT}</think>{ANSWER}<tool_call>", "Error: Snow", "So?"]
        places = [thinking.prompt.index(each) for each in expected]
        assert places == sorted(places)


@pytest.mark.all
async def test_the_tool_runner_of_the_anthropic_client_sends_the_whole_conversation(thinking: Cluster):
    """It first asks the server to keep the conversation."""
    from anthropic import beta_async_tool

    @beta_async_tool
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        thinking.output_ids[:] = [*thinking.tokenizer.encode("It snows."), 2]
        return f"Snow in {city}"

    async with client(thinking) as api:
        runner = api.beta.messages.tool_runner(
            model="fake", max_tokens=200, messages=HELLO, tools=[get_weather]
        )
        final = await runner.until_done()
    assert [block.text for block in final.content] == ["It snows."]
    assert "Hi" in thinking.prompt
    assert "Snow in Paris" in thinking.prompt
    status, result = await thinking.post(PATH, **BODY, thread={"type": "create"})
    AnthropicErrorResponse.model_validate(result)
    assert (status, result["error"]["details"]) == (400, {"error_code": "thread_unsupported_request"})


async def test_a_stream_has_typed_events_in_order(thinking: Cluster):
    import anthropic

    events = await thinking.typed_events(PATH, **BODY, tools=[TOOL])
    stream_event = TypeAdapter[Any](anthropic.types.RawMessageStreamEvent)
    for event in events:
        stream_event.validate_python(event)
    kinds = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert list(dict.fromkeys(kinds)) == ["message_start", *block, "message_delta", "message_stop"]
    assert [kinds.count(kind) for kind in (block[0], block[2])] == [3, 3]
    for i, (name, whole) in enumerate((("thinking", THOUGHT), ("text", ANSWER), ("partial_json", ARGUMENTS))):
        of_block = [event for event in events if event.get("index") == i]
        assert [of_block[0]["type"], of_block[-1]["type"]] == [block[0], block[2]]
        deltas = [event["delta"] for event in of_block[1:-1]]
        if name == "thinking":
            assert deltas.pop() == {"type": "signature_delta", "signature": signature(THOUGHT, SECRET)}
        assert "".join(delta[name] for delta in deltas) == whole
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 20


async def test_thinking_comes_back_in_the_next_turn(thinking: Cluster):
    """Also what the client does not see, from another router or after a restart, and that of other models."""
    for display in ("summarized", "omitted"):
        asked = {"thinking": {"type": "adaptive", "display": display}, "tools": [TOOL]}
        _, result = await thinking.post(PATH, **BODY, **asked)
        events = await thinking.typed_events(PATH, **BODY, **asked)
        streamed = {"type": "thinking", "thinking": "", "signature": ""}
        for delta in (event["delta"] for event in events if event.get("index") == 0 and "delta" in event):
            streamed = {name: old + delta.get(name, "") for name, old in streamed.items()}
        for block in (result["content"][0], streamed | {"type": "thinking"}):
            assert block["thinking"] == (THOUGHT if display == "summarized" else "")
            assert THOUGHT.strip() not in block["signature"]
            call = result["content"][-1]
            done = {"type": "tool_result", "tool_use_id": call["id"], "content": "Snow"}
            turns = [
                *HELLO,
                {"role": "assistant", "content": [block, call]},
                {"role": "user", "content": [done]},
            ]
            await thinking.post(PATH, max_tokens=9, messages=turns, **asked)
            assert f"<think>{THOUGHT}</think>" in thinking.prompt
    other = {"type": "thinking", "thinking": "Elsewhere.", "signature": "EqQBCgIYAhIM"}
    for block in (other, other | {"signature": sealed("hidden", b"another")}, other | {"signature": "?"}):
        turns = [*HELLO, {"role": "assistant", "content": [block, {"type": "text", "text": "x"}]}, *HELLO]
        status, _ = await thinking.post(PATH, max_tokens=9, messages=turns)
        assert status == 200
        assert "hidden" not in thinking.prompt


def test_signatures():
    digest = signature("text", SECRET)
    assert digest == signature("text", SECRET) != signature("text", b"another")
    assert base64.b64decode(digest)[1:] != hmac.digest(KEY, b"text", "sha256"), "children have KEY"
    hidden = sealed("text", SECRET)
    assert hidden != sealed("text", SECRET)
    assert unsealed(hidden, KEY) == "text"
    assert unsealed(hidden, seal_key(b"another")) == unsealed(hidden[:-4] + "AAA=", KEY) == ""
    nonce, encrypted = base64.b64decode(hidden)[1:13], base64.b64decode(hidden)[13:]
    for purpose in (None, b"other"):
        with pytest.raises(InvalidTag):
            AESGCM(KEY).decrypt(nonce, encrypted, purpose)
    assert unsealed(digest, KEY) == unsealed("", KEY) == unsealed("\0é", KEY) == ""


async def test_the_vendors_block_is_not_shown(cluster: Cluster):
    billing = "x-anthropic-billing-header: cc_version=2.1.328.1b8; cc_entrypoint=sdk-cli;"
    terse = {"type": "text", "text": "You are terse."}
    await cluster.post(PATH, **BODY, system=[terse])
    plain = cluster.prompt
    for system in ([{"type": "text", "text": billing}, terse], [billing, "You are terse."]):
        _, result = await cluster.post(PATH, **BODY, system=system)
        assert cluster.prompt == plain
        used = result["usage"]
        assert used["input_tokens"] + used["cache_read_input_tokens"] == len(
            unpacked_ids(cluster.sent.prompt_ids)
        )
    later = {"role": "system", "content": [{"type": "text", "text": billing}]}
    await cluster.post(PATH, max_tokens=9, messages=[later, *HELLO], system=[terse])
    assert "billing" not in cluster.prompt
    await cluster.post(PATH, **BODY, system=billing)
    assert "billing" not in cluster.prompt


async def test_deferred_tools_are_shown_where_the_conversation_names_them(thinking: Cluster):
    search, later = TOOL | {"name": "find"}, TOOL | {"name": "later", "defer_loading": True}
    call = {"type": "tool_use", "id": "t1", "name": "find", "input": {}}
    found = {"type": "tool_reference", "tool_name": "later"}
    done = {"type": "tool_result", "tool_use_id": "t1", "content": [found]}
    asked = [*HELLO, {"role": "assistant", "content": [call]}]
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}}
    defined = {
        "type": "tool_addition",
        "tool": {"type": "tool_definition", "definition": TOOL | {"name": "later"}},
    }
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "find"}}
    tools = [search, later]
    await thinking.post(PATH, **BODY, tools=tools)
    head = thinking.prompt.partition("<|im_start|>user")[0]
    assert '"find"' in head
    assert "later" not in thinking.prompt
    for offered, turns in (
        (tools, [*asked, {"role": "user", "content": [done]}]),
        (tools, [*HELLO, {"role": "system", "content": [added]}]),
        ([search], [*HELLO, {"role": "system", "content": [defined, removed]}]),
    ):
        for path, more in ((PATH, {"max_tokens": 9}), (f"{PATH}/count_tokens", {})):
            status, result = await thinking.post(path, messages=turns, tools=offered, **more)
            assert status == 200, result
        assert thinking.prompt.startswith(head), "the prefix stays cached"
        assert '{"type": "function", "function": {"name": "later", ' in thinking.prompt
        chosen = {"type": "tool", "name": "later"}
        status, result = await thinking.post(
            PATH, messages=turns, tools=offered, max_tokens=9, tool_choice=chosen
        )
        assert status == 200, result
    assert "The tool find is not available any more." in thinking.prompt
    searched = [later, {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}]
    await thinking.post(PATH, **BODY, tools=searched)
    assert '"later"' in thinking.prompt, "Anthropic would search"


async def test_an_image_as_a_result_is_a_text_for_a_model_without_images(thinking: Cluster):
    call = {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {}}
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    for failed in (False, True):
        content = [{"type": "text", "text": "Look:"}, {"type": "image", "source": source}]
        done = {"type": "tool_result", "tool_use_id": "t1", "content": content, "is_error": failed}
        turns = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [done]}]
        status, result = await thinking.post(PATH, max_tokens=9, messages=turns, tools=[TOOL])
        assert status == 200, result
        assert ("Error:" in thinking.prompt) == failed
        assert "Look:\n[an image, which this model cannot see]" in thinking.prompt


async def test_thinking_may_be_off(thinking: Cluster):
    for more in (
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        status, result = await thinking.post(PATH, **BODY, **more, tools=[TOOL])
        assert status == 200
        assert [block["type"] for block in result["content"]] == ["text", "tool_use"]
        assert "<think>\n\n</think>" in thinking.prompt


async def test_a_document_of_plain_text_is_in_the_prompt(cluster: Cluster):
    source = {"type": "text", "media_type": "text/plain", "data": "The body."}
    block = {"type": "document", "source": source, "title": "A title", "context": "A context"}
    question = {"type": "text", "text": "So?"}
    body: dict[str, Any] = {"max_tokens": 2, "messages": [{"role": "user", "content": [block, question]}]}
    status, result = await cluster.post(PATH, **body)
    assert status == 200, result
    assert "A title\nA context\nThe body.\nSo?" in cluster.prompt
    pdf = {"type": "base64", "media_type": "application/pdf", "data": ""}
    for wrong, field in (({"source": pdf}, "source"), ({"citations": {"enabled": True}}, "citations")):
        body["messages"] = [{"role": "user", "content": [block | wrong]}]
        status, result = await cluster.post(PATH, **body)
        assert (status, field in result["error"]["message"]) == (400, True), result


async def test_why_a_message_stops(cluster: Cluster):
    import anthropic

    for more, reason, sequence, text in (
        ({}, "end_turn", None, TEXT),
        ({"max_tokens": 99_999}, "end_turn", None, TEXT),
        ({"stop_sequences": [" Par", "xx"]}, "stop_sequence", " Par", "The capital of France is"),
        ({"max_tokens": 2}, "max_tokens", None, "The capital"),
    ):
        status, result = await cluster.post(PATH, **{**BODY, **more})
        AnthropicMessage.model_validate(result)
        anthropic.types.Message.model_validate(result)
        assert (status, result["stop_reason"], result["stop_sequence"]) == (200, reason, sequence)
        assert result["content"] == [{"type": "text", "text": text}]


async def test_an_output_that_fills_the_context_says_so(tokenizer: ModelTokenizer, tmp_path: Path) -> None:
    """A client then shortens the chat. More `max_tokens` would not help."""
    ours = SamplingDefaults(max_tokens=5, limits_output=True)
    for defaults, room, reason in (
        (NO_DEFAULTS, 3, "model_context_window_exceeded"),
        (NO_DEFAULTS, 200, "end_turn"),
        (ours, 3, "model_context_window_exceeded"),
        (ours, 6, "max_tokens"),
    ):
        async with make_cluster(tokenizer, tmp_path, defaults=defaults) as cluster:
            _, counted = await cluster.post(f"{PATH}/count_tokens", messages=HELLO)
            for connection in cluster.pool.connections:
                connection.description.max_model_len = counted["input_tokens"] + room
                cluster.pool.availability_changed(connection)
            status, result = await cluster.post(PATH, **BODY)
            AnthropicMessage.model_validate(result)
            assert (status, result["stop_reason"]) == (200, reason)


async def test_fields_reach_the_workers_and_the_prompt(cluster: Cluster):
    beginning = [*HELLO, {"role": "user", "content": "You"}, {"role": "assistant", "content": "I am"}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    status, _ = await cluster.post(
        PATH, messages=beginning, max_tokens=9, temperature=0.5, top_k=3, output_config=config
    )
    assert status == 200
    sampling = cluster.sent.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 3, 9)
    assert '"integer"' in sampling.structured_output.json_schema
    assert "Hi\nYou" in cluster.prompt, "messages of one role become one"
    assert cluster.prompt.endswith("I am"), "the answer continues the last message"


async def test_errors_have_anthropics_form(tokenizer: ModelTokenizer, tmp_path: Path):
    import anthropic

    create: Any = {"messages": HELLO, "max_tokens": 5}
    async with (
        make_cluster(tokenizer, tmp_path, api_keys=api_keys(["k"], None)) as cluster,
        client(cluster, "k") as api,
        client(cluster, "wrong") as stranger,
    ):
        assert (await api.messages.create(model="fake", **create)).stop_reason == "max_tokens"
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await api.messages.create(model="other", **create)
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            await stranger.messages.create(model="fake", **create)
        with pytest.raises(anthropic.BadRequestError, match="temperature") as refusal:
            await api.messages.create(model="fake", extra_body={"temperature": -1}, **create)
        body: Any = refusal.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert body["request_id"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": ["x"]}, "stop is not supported: use stop_sequences"),
    ({"tools": [{"type": "bash_20250124", "name": "w"}]}, "tools[0]: tools of type 'bash"),
    ({"tools": [TOOL]}, "tools is not supported"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "now", "input": {}}]}
            ]
        },
        "messages[0]",
    ),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config"),
]


async def test_what_is_not_served_is_refused_by_name(cluster: Cluster):
    for body, named in REFUSED:
        status, result = await cluster.post(PATH, **{**BODY, **body})
        assert (status, result["error"]["type"]) == (400, "invalid_request_error")
        assert named in result["error"]["message"]


async def test_the_result_of_an_unknown_call_is_refused(thinking: Cluster):
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}
    asked = [*HELLO, {"role": "assistant", "content": [call]}]
    for given, turns, status in (("toolu_1", asked, 200), ("toolu_2", asked, 400), ("toolu_1", HELLO, 400)):
        result = {"type": "tool_result", "tool_use_id": given, "content": "Snow"}
        body = {"messages": [*turns, {"role": "user", "content": [result]}], "tools": [TOOL]}
        for path, more in ((PATH, {"max_tokens": 9}), (f"{PATH}/count_tokens", {})):
            answered, answer = await thinking.post(path, **body, **more)
            assert answered == status, answer
            words = (
                f"messages[{len(turns)}]: unexpected `tool_use_id` found in `tool_result` blocks: {given}. "
            )
            assert status == 200 or answer["error"]["message"].startswith(words)


async def test_harmless_fields_are_accepted(cluster: Cluster):
    edits = {"edits": [{"type": "clear_thinking_20251015"}, {"type": "clear_tool_uses_20250919"}]}
    harmless = {"cache_control": {"type": "ephemeral"}, "context_management": edits, "speed": "standard"}
    status, _ = await cluster.post(PATH, **BODY, **harmless, metadata={"user_id": "u"}, service_tier="auto")
    assert status == 200


async def test_a_budget_has_no_effect_for_a_model_that_is_not_known_to_reason(cluster: Cluster):
    """Clients send it to each model: `enabled` needs one."""
    enabled = {"type": "enabled", "budget_tokens": 1024}
    status, result = await cluster.post(PATH, **BODY, thinking=enabled)
    assert status == 200, result
    assert not cluster.sent.sampling.HasField("reasoning")


async def test_a_failed_stream_ends_with_an_error(cluster: Cluster):
    for worker in cluster.decodes:
        worker.step_seconds = 3600.0
    reading = asyncio.create_task(cluster.typed_events(PATH, **BODY))
    await cluster.expire()
    events = await reading
    assert events[-1]["type"] == "error"
    AnthropicErrorResponse.model_validate(events[-1])
    assert events[-1]["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("text", ['{"a": 1', '{"a": ' + "[" * 99_999])
def test_arguments_that_are_not_json_are_left_out(text: str):
    """Those of a call that was cut off, and those nested too deep."""
    assert parsed_arguments(text) == {}
