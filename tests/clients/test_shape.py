"""Recordings have the form of requests and none of their texts. What `turns` says of caches."""

import json

from baton.content import CHUNK_TOKENS
from tests.clients.model import Call, Seen
from tests.clients.recorder import Exchange
from tests.clients.report import turns
from tests.clients.shape import own_words, paths, recorded, replayed, whole

SECRET = "a private text of a person"
DEVICE = "0f" * 32
ANSWER = {"id": "resp_1", "output": [{"type": "function_call", "call_id": "c1", "id": "fc_1"}]}


def exchange(**body: object) -> Exchange:
    headers = {"user-agent": "agent/1.2", "authorization": f"Bearer {SECRET}", "session-id": DEVICE}
    return Exchange("POST", "/v1/responses", headers, body, 200, json.dumps(ANSWER))


def test_a_recording_has_the_form_of_requests_and_texts_of_ours() -> None:
    head = {"instructions": SECRET, "metadata": {"user": json.dumps({"device": DEVICE})}, "top_p": 0.5}
    first = exchange(**head, tools=[{"type": "function", "name": "f"}], input=f"cat /tmp/x/{SECRET}")
    history = [{"type": "function_call_output", "call_id": "c1", "output": SECRET}, {"id": "fc_1"}]
    second = exchange(**head, input=history)
    requests = recorded([first, second], ["kept"], {"/tmp/x": "/home"})
    assert SECRET not in json.dumps(requests)
    assert DEVICE not in json.dumps(requests)
    assert requests[0]["headers"] == {"user-agent": "agent/1.2", "session-id": "1" * 64}
    assert paths(whole(requests, 0)) == paths(first.body)
    assert paths(whole(requests, 1)) == paths(second.body)
    assert requests[1]["body"].keys() == {"input"}, "what the request before has is left out"
    now = json.dumps(ANSWER).replace("c1", "other").replace("fc_1", "fc_2")
    assert replayed(requests, 1, [now])["input"] == [
        {"type": "function_call_output", "call_id": "other", "output": own_words(len(SECRET))},
        {"id": "fc_2"},
    ]


def seen(ids: list[int], cached: int, output: tuple[int, ...] = ()) -> Seen:
    tool = json.dumps({"function": {"name": "f"}})
    text = "<|im_start|>tools\nCall.\n" + tool + "\n<|im_end|>\n"
    return Seen(tuple(ids), text, output, cached)


def test_of_a_turn_the_chunks_count_that_it_shares_with_the_turn_before() -> None:
    first = [*range(3 * CHUNK_TOKENS + 5)]
    extended = [*first, 7, 8, 9]
    changed = [*first[: 2 * CHUNK_TOKENS + 1], 0]
    other = Seen((1,), "a title", (), 0)
    found = turns([Call("f", {})], [seen(first, 0, (7, 8)), other, seen(extended, 128), seen(changed, 128)])
    assert [(each.common, each.share, each.extends) for each in found] == [
        (3 * CHUNK_TOKENS, 128 / (3 * CHUNK_TOKENS), True),
        (2 * CHUNK_TOKENS, 1.0, False),
    ]
