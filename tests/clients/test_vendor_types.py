"""Each type of item, tool and block that the vendors' own libraries have is taken, or is named here."""

import contextlib
import json
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
import typing_extensions
from anthropic.types.beta import beta_content_block_param, beta_tool_result_block_param, beta_tool_union_param
from openai.types.responses import response_input_item_param, tool_param

from baton.router.api.anthropic.body import MessagesBody
from baton.router.api.bodies import ChatBody
from baton.router.api.openai_responses.body import ResponsesBody
from baton.router.api.validation import parse
from baton.router.errors import ApiError, Unsupported

NAME = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
TEXT = [{"type": "input_text", "text": "What it says."}]
ITEMS: dict[str, list[dict[str, Any]]] = {
    "message": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "message", "role": "user", "content": TEXT},
    ],
    "reasoning": [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAAAB"},
        CALL,
    ],
    "function_call": [CALL | {"id": "fc_1", "status": "completed"}],
    "function_call_output": [
        CALL,
        {"type": "function_call_output", "call_id": "c", "output": TEXT, "status": None},
    ],
    "custom_tool_call": [{"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"}],
    "custom_tool_call_output": [
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": TEXT},
    ],
    "local_shell_call": [
        {
            "type": "local_shell_call",
            "id": "ls_1",
            "call_id": "c",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": None},
        }
    ],
    "local_shell_call_output": [
        {
            "type": "local_shell_call",
            "id": "ls_1",
            "call_id": "c",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
    ],
    "tool_search_call": [
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "q"}}
    ],
    "tool_search_output": [
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "q"}},
        {
            "type": "tool_search_output",
            "call_id": "c",
            "execution": "client",
            "tools": [NAME | {"name": "g"}],
        },
    ],
    "additional_tools": [{"type": "additional_tools", "role": "developer", "tools": [NAME | {"name": "g"}]}],
    "program": [{"type": "program", "id": "p", "call_id": "c", "code": "f()", "fingerprint": "x"}],
    "program_output": [
        {"type": "program_output", "id": "p", "call_id": "c", "result": "1", "status": "completed"}
    ],
    "shell_call": [{"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}],
    "shell_call_output": [{"type": "shell_call_output", "call_id": "c", "output": []}],
    "apply_patch_call": [
        {"type": "apply_patch_call", "call_id": "c", "status": "completed", "operation": {}}
    ],
    "apply_patch_call_output": [
        {"type": "apply_patch_call_output", "call_id": "c", "status": "completed", "output": ""}
    ],
    "mcp_approval_response": [{"type": "mcp_approval_response", "approval_request_id": "m", "approve": True}],
}
"""By type: what the conversation has. Types that are missing have only an id."""
RESOLVED = {"item_reference"}
"""Another item is in its place before the body is validated."""
REFUSED = {
    # The answer would be another one: the conversation is in a text that OpenAI alone can read, the client
    # waits for such a text, or the answer is to have another form.
    "compaction", "compaction_trigger", "configuration_update",
    # The client runs them, and the model knows no schema of theirs.
    "bash_20241022", "bash_20250124", "browser_toolset_20260801", "computer_20241022", "computer_20250124",
    "computer_20251124", "computer_toolset_20260801", "memory_20250818", "text_editor_20241022",
    "text_editor_20250124", "text_editor_20250429", "text_editor_20250728",
}  # fmt: skip

TOOLS: dict[str, dict[str, Any]] = {
    "function": NAME | {"strict": None, "description": None},
    "custom": {"type": "custom", "name": "patch", "format": {"type": "text"}},
    "namespace": {"type": "namespace", "name": "n", "description": "d", "tools": [NAME]},
    "tool_search": {"type": "tool_search", "execution": "client", "parameters": None},
}
BLOCK_CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "Yes.", "citations": None, "cache_control": {"type": "ephemeral"}},
    "image": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
    "document": {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "A text."},
        "citations": None,
    },
    "search_result": {
        "type": "search_result",
        "source": "a",
        "title": "t",
        "content": [{"type": "text", "text": "A"}],
    },
    "thinking": {"type": "thinking", "thinking": "Well.", "signature": "of another"},
    "redacted_thinking": {"type": "redacted_thinking", "data": "x"},
    "tool_use": BLOCK_CALL,
    "tool_result": {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]},
    "tool_addition": {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
    "tool_removal": {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
    "tool_reference": {"type": "tool_reference", "tool_name": "f"},
    "compaction": {"type": "compaction", "content": "What was said so far."},
}


def kinds(union: Any) -> Iterator[str]:
    """The values that `type` has in the members of a union."""
    origin, inner = get_origin(union), get_args(union)
    if origin is Annotated:
        yield from kinds(inner[0])
    elif origin in (typing.Union, types.UnionType):
        for each in inner:
            yield from kinds(each)
    elif typing_extensions.is_typeddict(union):
        literal = typing_extensions.get_type_hints(union)["type"]
        yield from _strings(literal)


def _strings(hint: Any) -> Iterator[str]:
    for each in get_args(hint):
        yield from (each,) if isinstance(each, str) else _strings(each)


@contextlib.contextmanager
def refused(kind: str) -> Iterator[None]:
    """By name, if it is in `REFUSED`."""
    with pytest.raises(Unsupported, match=kind) if kind in REFUSED else contextlib.nullcontext():
        yield


def responses(**fields: Any) -> ChatBody:
    body = {"input": "Go.", "tools": [NAME], **fields}
    chat, _ = parse(ResponsesBody, json.dumps(body).encode()).chat(b"", lambda sealed: "")
    return chat


def messages(*content: dict[str, Any], role: str = "user", **fields: Any) -> ChatBody:
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    said = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": [BLOCK_CALL]}]
    body = {
        "max_tokens": 9,
        "tools": tools,
        "messages": [*said, {"role": role, "content": content}],
        **fields,
    }
    chat, _ = parse(MessagesBody, json.dumps(body).encode()).chat(lambda sealed: "")
    return chat


@pytest.mark.parametrize(
    "kind", sorted({*kinds(response_input_item_param.ResponseInputItemParam)} - RESOLVED)
)
def test_items_of_responses(kind: str) -> None:
    """Those of OpenAI's own tools have no effect."""
    items = ITEMS.get(kind, [{"type": kind, "id": "x", "status": "completed"}])
    with refused(kind):
        chat = responses(input=[*items, {"role": "user", "content": "Go on."}])
        assert chat.messages[-1].content == "Go on."


@pytest.mark.parametrize("kind", sorted({*kinds(tool_param.ToolParam)}))
def test_tools_of_responses(kind: str) -> None:
    responses(tools=[TOOLS.get(kind, {"type": kind}), NAME | {"name": "g"}])


@pytest.mark.parametrize("kind", sorted({*kinds(beta_tool_union_param.BetaToolUnionParam)}))
def test_tools_of_messages(kind: str) -> None:
    own = {"input_schema": {}} if kind == "custom" else {}
    with refused(kind):
        tools = [{"type": kind, "name": "t", **own}, {"name": "f", "input_schema": {}}]
        messages(BLOCKS["text"], tools=tools)


@pytest.mark.parametrize("kind", sorted({*kinds(beta_content_block_param.BetaContentBlockParam)}))
def test_blocks_of_messages(kind: str) -> None:
    roles = {"tool_addition": "system", "tool_removal": "system", "tool_result": "user", "image": "user"}
    role = roles.get(kind, "assistant")
    messages(BLOCKS.get(kind, {"type": kind, "id": "x"}), role=role)


@pytest.mark.parametrize("kind", sorted({*kinds(beta_tool_result_block_param.Content)}))
def test_blocks_of_results(kind: str) -> None:
    messages({"type": "tool_result", "tool_use_id": "t", "content": [BLOCKS.get(kind, {"type": kind})]})


ALLOWED = [{"type": "function", "name": "f"}, {"type": "mcp", "server_label": "x"}, {"type": "web_search"}]


@pytest.mark.parametrize(
    "choice",
    [
        "auto",
        {"type": "function", "name": "f"},
        {"type": "allowed_tools", "mode": "auto", "tools": ALLOWED},
    ],
)
def test_choices_among_tools_of_responses(choice: Any) -> None:
    chat = responses(tools=[NAME, {"type": "web_search"}], tool_choice=choice)
    assert [tool.function.name for tool in chat.callable_tools] == ["f"]


def test_a_summary_of_the_conversation_is_shown() -> None:
    chat = messages(BLOCKS["compaction"], role="assistant")
    assert chat.messages[-1].content == "What was said so far."
    assert messages({"type": "compaction", "content": None}, role="assistant").messages[-1].content == ""


PDF = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
SEEN = {"type": "text", "text": "Read."}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "document", "source": PDF},
        {"type": "image", "source": {"type": "file", "file_id": "file_1"}},
        {"type": "browser_state", "url": "https://a"},
    ],
)
def test_what_a_tool_returns_is_taken_by_messages(part: dict[str, Any]) -> None:
    """The client cannot know it, and would send it again with each turn."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": [SEEN, part]}
    shown = f"Read.\n[a part of type {part['type']}, which this model cannot see]"
    assert messages(result).messages[-1].content == shown
    with pytest.raises(Unsupported):
        messages(part)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"},
        {"type": "input_image", "file_id": "file_1"},
        {"type": "encrypted_content", "encrypted_content": "gAAAAAB"},
    ],
)
def test_what_a_tool_returns_is_taken_by_responses_and_chats(part: dict[str, Any]) -> None:
    shown = f"Read.\n[a part of type {part['type']}, which this model cannot see]"
    output = {"type": "function_call_output", "call_id": "c", "output": [TEXT[0] | {"text": "Read."}, part]}
    assert responses(input=[CALL, output]).messages[-1].content == shown
    with pytest.raises(ApiError):
        responses(input=[{"role": "user", "content": [part]}])
    said = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": CALL}]}
    body = {"messages": [said, {"role": "tool", "tool_call_id": "c", "content": [SEEN, part]}]}
    assert parse(ChatBody, json.dumps(body).encode()).messages[-1].content == shown


def test_examples_of_a_tool_are_shown() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "input_examples": [{"path": "a"}]}
    tools = messages(BLOCKS["text"], tools=[tool]).tools
    assert tools
    assert tools[0].function.parameters == {"type": "object", "examples": [{"path": "a"}]}


def test_what_anthropic_runs_or_sells_has_no_effect() -> None:
    messages(BLOCKS["text"], speed="fast", mcp_servers=[{"type": "url", "url": "https://a", "name": "a"}])


@pytest.mark.parametrize("form", [[], {}, 1])
def test_a_source_whose_type_is_no_text_is_refused(form: object) -> None:
    part = {"type": "image", "source": {"type": form}}
    with pytest.raises(ApiError) as error:
        messages({"type": "tool_result", "tool_use_id": "t", "content": [SEEN, part]})
    assert error.value.status == 400
