"""The turns of a session have one name, whatever header or field of their client says it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.router.api.sessions import claude_session, session_name
from baton.router.text.tokenizer import ModelTokenizer

from .conftest import Cluster, make_cluster

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
JSON_USER = {"device_id": "d", "account_uuid": "", "session_id": "{0}"}


@pytest.fixture
async def three(tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with make_cluster(tokenizer, tmp_path, prefill=3) as made:
        yield made


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("path", "headers", "fields"),
    [
        (CHAT, {"X-Session-Id": "{0}"}, {}),
        (CHAT, {"x-session-affinity": "{0}"}, {}),  # opencode
        (CHAT, {"X-SMG-Routing-Key": "{0}"}, {"user": "one for all"}),
        (CHAT, {"X-Correlation-ID": "{0}"}, {}),  # aiperf
        (CHAT, {"X-Correlation-ID": "{1}"}, {"user": "{0}"}),  # a gateway that draws one for each request
        (CHAT, {}, {"session_id": "{0}", "prompt_cache_key": "one for all"}),  # vLLM
        (CHAT, {}, {"session_params": {"session_id": "{0}"}, "prompt_cache_key": "k"}),  # its router
        (RESPONSES, {}, {"session_params": {"session_id": "{0}"}}),
        (CHAT, {}, {"session_params": {"id": "{0}"}, "prompt_cache_key": "k"}),  # SGLang
        (MESSAGES, {}, {"session_params": {"id": "{0}"}, "metadata": {"user_id": "one for all"}}),
        (MESSAGES, {}, {"session_id": "{0}", "metadata": {"user_id": "one for all"}}),
        (RESPONSES, {"session-id": "one for all", "thread-id": "t"}, {"prompt_cache_key": "{0}"}),  # Codex
        (RESPONSES, {"session-id": "one for all", "thread-id": "{0}"}, {}),  # behind a gateway
        (RESPONSES, {"session_id": "{0}"}, {"user": "one for all"}),
        (MESSAGES, {"X-Claude-Code-Session-Id": "{0}"}, {"metadata": {"user_id": "one for all"}}),
        (MESSAGES, {}, {"metadata": {"user_id": json.dumps(JSON_USER)}}),
        (MESSAGES, {}, {"metadata": {"user_id": json.dumps(JSON_USER | {"turn": "{1}"})}}),
        (MESSAGES, {}, {"metadata": {"user_id": "user_ab_account_{1}_session_{0}"}}),
        (MESSAGES, {}, {"metadata": {"user_id": "{0}"}}),
    ],
)
async def test_a_session_has_one_home(
    three: Cluster, path: str, headers: dict[str, str], fields: dict[str, Any]
) -> None:
    """{0} is the name of the session, and {1} is another text in each request."""

    def filled(value: Any, *texts: str) -> Any:
        if isinstance(value, dict):
            return {key: filled(each, *texts) for key, each in value.items()}
        for number, text in enumerate(texts):
            value = value.replace(f"{{{number}}}", text)
        return value

    homes: dict[str, list[int]] = {}
    sessions = "abcdefghijklmnopqrstuvwx"  # so many do not all have one home by chance
    for turn in range(4):
        for session in sessions[:4] if turn else sessions:
            before = [len(each.submitted) for each in three.prefills]
            texts = session, f"{turn} {session}"
            message = {"role": "user", "content": f"Turn {turn} of {session}, unlike the others. " * 20}
            named = {"input" if path == RESPONSES else "messages": [message]}
            limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 1}
            body = {"model": "fake", **named, **limit, **filled(fields, *texts)}
            async with three.http.post(
                three.url + path, json=body, headers=filled(headers, *texts)
            ) as response:
                assert response.status == 200, await response.text()
            after = [len(each.submitted) for each in three.prefills]
            homes.setdefault(session, []).extend(
                row for row in range(3) for _ in range(after[row] - before[row])
            )
    assert all(len(homes[session]) == 4 and len(set(homes[session])) == 1 for session in sessions[:4]), homes
    assert len({rows[0] for rows in homes.values()}) > 1, "all sessions would have one home"


def test_the_most_certain_name_comes_first() -> None:
    names = {
        "x-session-id": "1", "x-session-affinity": "2", "x-smg-routing-key": "3", "prompt_cache_key": "4",
        "x-claude-code-session-id": "5", "thread-id": "6", "session-id": "7", "session_id": "8", "user": "9",
        "x-correlation-id": "10",
    }  # fmt: skip
    found = []
    while (name := session_name(names, names.get("prompt_cache_key"), names.get("user"))) is not None:
        found.append(name)
        del names[next(key for key, value in names.items() if value == name)]
    assert found == [str(number) for number in range(1, 11)]
    assert session_name({"x-session-id": "", "x-correlation-id": ""}, "", "") is None


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ('{"session_id": "s"}', "s"),
        ("user_ab_account__session_s", "s"),
        ("user_session_of_session_s", "s"),
        ("s", "s"),
        ("", ""),
        (None, None),
        *((text, text) for text in (
            "{", "{}", '{"session_id": 7}', '{"session_id": ""}', '{"session_id": null}', "{\ud800}",
            '{"x": ' + "[" * 100_000, "user_ab_session_", "my_session_s", "_session_s",
        )),
    ],
)  # fmt: skip
def test_what_claude_code_says_of_its_user(user_id: str | None, session: str | None) -> None:
    """Anything else is the name of a user, as Anthropic's API has it."""
    assert claude_session(user_id) == session
