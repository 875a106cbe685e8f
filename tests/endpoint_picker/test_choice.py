"""The router that a request goes to: conversations stay together, and no router gets too much."""

import itertools
import json
from collections import Counter
from typing import Any

import pytest

from baton.endpoint_picker.conversation import Conversation, conversation
from baton.endpoint_picker.routers import Routers, reported_requests
from baton.router.discovery import FileDiscovery
from baton.router.endpoints.stored_responses import home_tag
from baton.router.metrics import Metrics

ADDRESSES = tuple(f"10.0.0.{i}:8000" for i in range(1, 6))
SYSTEM = {"role": "system", "content": "Be brief. " * 1000}


def key_of(body: dict[str, Any], **headers: str) -> int | None:
    return conversation(headers, json.dumps(body).encode()).key


def chat(*turns: str, **more: Any) -> dict[str, Any]:
    """A chat in which user and assistant take turns."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"messages": [SYSTEM, *messages], **more}


@pytest.fixture
def routers() -> Routers:
    routers = Routers(FileDiscovery(None, ()), None)
    routers.update(frozenset(ADDRESSES))
    return routers


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (chat("Hello"), chat("Hello", "Hi.", "Why?", temperature=0)),
        ({"prompt": "x" * 5000}, {"prompt": "x" * 5000 + "y"}),
        ({"prompt": [1] * 3000}, {"prompt": [1] * 3000 + [2]}),
        (
            {"instructions": "Be brief.", "input": [{"role": "user", "content": "Hello"}]},
            {"instructions": "Be brief.", "input": [{"role": "user", "content": "Hello"}, {"type": "x"}]},
        ),
        (chat("Hello", user="ann"), chat("Something else", user="ann")),
        (chat("Hello", prompt_cache_key="k", user="ann"), chat("Hi", prompt_cache_key="k", user="bob")),
    ],
)
def test_the_turns_of_a_conversation_have_one_key(first: dict[str, Any], second: dict[str, Any]):
    assert key_of(first) == key_of(second) is not None
    assert key_of(first | {"session_id": "s"}) == key_of(second, **{"x-session-id": "s"})
    assert key_of(first | {"session_params": {"session_id": "s"}}) == key_of(second | {"session_id": "s"})
    assert key_of(first | {"session_params": {"id": "s"}}) == key_of(second | {"session_id": "s"})
    assert key_of(first, **{"x-session-id": "s"}) == key_of(second, **{"x-session-id": "s"}) != key_of(first)


def test_a_name_in_the_body_of_messages_is_that_of_the_header():
    named = {"metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'}}
    path = {":path": "/v1/messages?beta=true"}
    right = key_of(chat("Hello"), **{"x-claude-code-session-id": "s"}, **path)
    assert key_of(chat("Hello", **named), **path) == key_of(chat("Hi", **named), **path) == right
    for metadata in ({}, None, [], {"user_id": 7}):
        assert key_of(chat("Hello", metadata=metadata), **path) == key_of(chat("Hello"), **path)
    assert key_of(chat("Hello", **named)) == key_of(chat("Hello")), "metadata of a chat names no session"


def test_other_conversations_have_other_keys():
    bodies = [
        chat("Hello"), chat("Hallo"), chat("Hello", user="ann"), chat("Hello", user="bob"),
        {"prompt": "Hello"}, {"input": "Hallo"}, {"system": "a", "messages": []},
    ]  # fmt: skip
    assert len({key_of(body) for body in bodies}) == len(bodies)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"messages": 3}',
        b'{"user": 3}',
        b"\xff",
        b"[" * 9999,
        b'{"messages": [{"role": "\xff"}]}',
    ],
)
def test_any_bytes_have_a_conversation(body: bytes):
    assert (conversation({}, body).key is None) == (body == b"")


def test_few_messages_tell_a_conversation_without_a_user():
    results = [{"role": "tool", "content": str(i)} for i in range(100)]
    assert key_of({"messages": results}) == key_of({"messages": [*results, {"role": "user", "content": "?"}]})


def test_a_part_of_a_body_has_the_key_of_a_later_turns_part():
    first, second = (json.dumps(chat("Hello", *more)).encode() for more in ((), ("Hi.", "Why?")))
    assert conversation({}, first[:8000]) == conversation({}, second[:8000])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", b'{"input": "Why?", "previous_response_id": "resp_0a1b"}'),
        ("/v1/responses/resp_0a1b", b""),
        ("/v1/responses/resp_0a1b/cancel", b""),
        ("/v1/responses/resp_0a1b?stream=false", b""),
    ],
)
def test_a_request_names_an_earlier_response(path: str, body: bytes):
    assert conversation({":path": path}, body).response_id == "resp_0a1b"


def test_a_response_is_continued_where_it_was_made_however_busy_that_router_is(routers: Routers):
    for address in ADDRESSES:
        of = Conversation(response_id=home_tag(address) + "00" * 14)
        assert {routers.choose(of) for _ in range(50)} == {address}
    assert routers.choose(Conversation(1, "resp_unknown")) in ADDRESSES


def test_conversations_spread_and_stay(routers: Routers):
    homes = {key: routers.choose(Conversation(key * 2**59)) for key in range(32)}
    routers.requests = dict.fromkeys(ADDRESSES, 0.0)
    again = {key: routers.choose(Conversation(key * 2**59)) for key in range(32)}
    assert homes == again
    routers.requests = dict.fromkeys(ADDRESSES, 0.0)
    assert len({routers.choose(Conversation(7)) for _ in range(10)}) == 1, "few requests are no load"
    assert set(homes.values()) == set(ADDRESSES)


def test_no_router_gets_more_than_the_bound(routers: Routers):
    chosen = Counter(routers.choose(Conversation(7)) for _ in range(1000))
    assert max(chosen.values()) <= 261, "1.25 times the mean, and the slack"


def test_without_a_key_the_least_loaded_router_is_chosen(routers: Routers):
    routers.requests |= dict.fromkeys(ADDRESSES[1:], 3.0)
    routers.update(frozenset(ADDRESSES))  # each router keeps its requests when others come and go
    assert [routers.choose(Conversation()) for _ in range(3)] == [ADDRESSES[0]] * 3
    assert Counter(routers.choose(Conversation()) for _ in range(5)) == dict.fromkeys(ADDRESSES, 1)


def test_only_allowed_routers_that_answer_are_chosen(routers: Routers):
    allowed = [*ADDRESSES[:2], "10.9.9.9:8000"]
    assert {routers.choose(Conversation(key << 58), allowed) for key in range(64)} == set(ADDRESSES[:2])
    routers.silent = {ADDRESSES[0]}
    assert {routers.choose(Conversation(key << 58), allowed) for key in range(64)} == {ADDRESSES[1]}
    assert routers.choose(Conversation(1), [ADDRESSES[0]]) == ADDRESSES[0], "better than none"
    assert routers.choose(Conversation(1), []) is None
    routers.update(frozenset())
    assert routers.choose(Conversation(1)) is None


def test_the_load_is_what_a_router_exports():
    metrics = Metrics("a model")
    metrics.running.set(3)
    metrics.waiting.set(2)
    assert reported_requests(metrics.exposition().decode()) == 5
    with pytest.raises(ValueError, match="how many requests"):
        reported_requests("go_goroutines 7\n")
