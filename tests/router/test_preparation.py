"""The preparation of bodies gives the same result in the router and in a child, and checks limits first."""

import asyncio
import contextlib
import functools
import io
import itertools
import json
import re
import signal
import struct
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from pydantic import BaseModel, ValidationError

from baton.processes.sandbox import helper
from baton.router import child_pool, server
from baton.router.admission.entry import entering
from baton.router.admission.keys import ANY_CLIENT, Account, ApiKey
from baton.router.api.bodies import BatchBody, ChatOptions
from baton.router.api.fields import MAX_ITEMS
from baton.router.errors import ApiError, ContextLengthExceeded, InvalidRequest
from baton.router.generation.context import ActiveRequests
from baton.router.preparation import child
from baton.router.preparation.child import (
    MAX_OPTIONS_BYTES,
    MAX_OPTIONS_VALUES,
    SMALL_BYTES,
    Preparer,
    answer_to,
    decode,
    encode,
    read_prepared,
    request_head,
)
from baton.router.preparation.prepare import BODIES, Kind, Preparation, Prepared, Served
from baton.router.text.chat import ChatTemplate
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from baton.rpc import inference_pb2 as ipb
from baton.rpc.stubs import InferenceStub
from baton.vision.images import Image
from tests.within import WITHIN, eventually

from .conftest import Cluster, make_cluster

SERVED = Served(("fake",), 8192)
CHAT = {"messages": [{"role": "user", "content": "Hi 🙂"}]}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
SAMPLED = {
    "model": "fake", "stream": True, "stream_options": {"include_usage": True}, "n": 2, "temperature": 0.5,
    "top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": -1,
    "frequency_penalty": 1, "seed": 2**64 - 1, "stop": ["a", "ü"], "stop_token_ids": [5], "max_tokens": 7,
    "logit_bias": {"5": -100.0}, "min_tokens": 3, "skip_special_tokens": False, "return_token_ids": True,
    "priority": -3, "timeout": 3.5, "user": "me", "prompt_cache_key": "k", "unknown": None,
}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "é": [1, 2.5]}}}
LONG = "a b " * SMALL_BYTES


@pytest.mark.parametrize("cut", [1, 4, 6])
def test_a_child_ends_quietly_if_its_router_ends_within_a_frame(
    monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    """A router that is killed while its children start leaves a part of the tokenizer in the pipe."""
    frame = struct.pack("<I", 3) + b"abc"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(frame + frame[:cut])))
    assert [helper.read(), helper.read()] == [b"abc", None]


def in_child(kind: Kind, raw: bytes, tokenizer: ModelTokenizer) -> Prepared | bytes:
    def answer(request: bytes) -> bytes:
        return encode(answer_to(restored(tokenizer), request))

    reply = child_pool.answered(answer, request_head(kind, SERVED) + raw)
    return read_prepared(child_pool.read_answer(reply, decode))


@functools.cache
def restored(tokenizer: ModelTokenizer) -> ModelTokenizer:
    return ModelTokenizer.restored(tokenizer.state)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("chat", CHAT),
        ("chat", CHAT | SAMPLED | {"logprobs": True, "top_logprobs": 2, "chat_template_kwargs": {"a": 1}}),
        ("chat", CHAT | {"response_format": SCHEMA, "max_completion_tokens": 3, "stop": "x"}),
        ("chat", CHAT | {"structured_outputs": {"json": {"type": "object"}}}),
        ("completion", SAMPLED | {"prompt": "Hi\nthere", "logprobs": 3}),
        ("completion", {"prompt": ["Hi", [5, 6, 7]], "echo": True, "structured_outputs": {"choice": ["a"]}}),
        ("completion", {"prompt": "Hi", "bad_words": ["Paris", " New York"]}),
        ("responses", {"input": "Hi", "bad_words": ["Paris"]}),
        ("tokenize", {"prompt": "Hi", "model": "fake"}),
        ("tokenize", CHAT),
        ("detokenize", {"tokens": [5, 6, 7]}),
        ("invocation", CHAT | {"max_tokens": 2}),
        ("invocation", {"prompt": "Hi"}),
        ("grpc", ipb.GenerateRequest(text="Hi", stop=["a"], logprobs=2, seed=5)),
        (
            "grpc",
            ipb.GenerateRequest(chat=ipb.Chat(messages=[ipb.ChatMessage(role="user", content="Hi")])),
        ),
    ],
)
def test_a_child_prepares_as_the_router_does(tokenizer: ModelTokenizer, kind: Kind, body: Any):
    raw = json.dumps(body).encode() if isinstance(body, dict) else body.SerializeToString()
    here, there = Preparation(tokenizer, SERVED).prepare(kind, raw), in_child(kind, raw, tokenizer)
    if not isinstance(here, Prepared):
        assert there == here
        return
    assert isinstance(there, Prepared)
    assert msgspec.structs.replace(there, options=here.options) == here
    assert dict(here.options).items() >= dict(there.options).items()


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompts": [b"12345"]},
        {"prompts": [[1, 2]]},
        {"options": {"n": 1000000}},
        {"options": {"timeout": "1"}},
        {"options": {"tools": [["look", 1, None]]}},
        {"options": {"more": 1}},
        {"beginning": "end"},
        {"called": {"look": ["exec", "look"]}},
        {"images": [[[b"", 0, 1, 1, b"", 0]]]},
        {"question": "What?"},
        {"seals_reasoning": 1},
        {"more": 1},
    ],
    ids=str,
)
def test_a_child_that_a_client_has_taken_over_is_not_believed(
    tokenizer: ModelTokenizer, wrong: dict[str, Any]
):
    answer = encode(Preparation(tokenizer, SERVED).prepare("chat", json.dumps(CHAT).encode()))
    assert isinstance(decode(answer), Prepared)
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode(_merged(msgspec.msgpack.decode(answer), wrong)))


def _merged(whole: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    of_options = more.get("options", {})
    return whole | more | {"options": whole["options"] | of_options}


def test_a_child_has_left_the_pixels_that_it_names(tokenizer: ModelTokenizer):
    for sizes in ([9], [4, 4], [9, -1], [-1, 9, 0]):
        found = Preparation(tokenizer, SERVED).prepare("chat", json.dumps(CHAT).encode())
        assert isinstance(found, Prepared)
        found.images = [[Image(b"", at, 1, 1, memoryview(b"")) for at in range(len(sizes))]]
        found.pixel_bytes = sizes
        with pytest.raises(ValueError, match="has not left the pixels"):
            read_prepared(found, bytes(7))


@pytest.mark.all
def test_a_child_returns_tools_unchanged(directory: Path, tmp_path: Path):
    (tmp_path / "tools.jinja").write_text("{{ tools | tojson }}{{ messages | tojson }}<tool_call>")
    tokenizer = load_tokenizer(str(directory), chat_template=str(tmp_path / "tools.jinja"))
    choice = {"type": "function", "function": {"name": "look"}}
    body = CHAT | {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": choice}
    raw = json.dumps(body).encode()
    here, there = Preparation(tokenizer, SERVED).prepare("chat", raw), in_child("chat", raw, tokenizer)
    assert isinstance(here, Prepared)
    assert isinstance(there, Prepared)
    assert there.prompts == here.prompts
    assert isinstance(here.options, ChatOptions)
    assert isinstance(there.options, ChatOptions)
    [ours], [theirs] = here.options.offered_tools, there.options.offered_tools
    assert theirs.function.name == ours.function.name == "look"
    assert theirs.function.parameters == ours.function.parameters
    assert (there.options.names_tool, there.options.must_call) == (True, True)


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        ("chat", b'{"messages": ['),
        ("chat", b'{"messages": []}'),
        ("chat", json.dumps(CHAT | {"model": "other"}).encode()),
        ("chat", json.dumps({"messages": CHAT["messages"] * 9000}).encode()),
        ("completion", json.dumps({"prompt": "a b " * 5000}).encode()),
        ("completion", json.dumps({"prompt": [5] * 8192}).encode()),
        ("completion", b'{"prompt": [99999999]}'),
        ("detokenize", b'{"tokens": [99999999]}'),
        ("grpc", b"\xff\xff\xff"),
    ],
)
def test_a_child_refuses_as_the_router_does(tokenizer: ModelTokenizer, kind: Kind, raw: bytes):
    refused: list[ApiError] = []
    in_router = Preparation(tokenizer, SERVED).prepare
    for attempt in (in_router, functools.partial(in_child, tokenizer=tokenizer)):
        with pytest.raises(ApiError) as refusal:
            attempt(kind, raw)
        refused.append(refusal.value)
    here, there = refused
    assert here.status in (400, 404)
    assert (type(there), there.message, there.param) == (type(here), here.message, here.param)


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ModelTokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    monkeypatch.setattr(ChatTemplate, "render", lambda *_, **__: pytest.fail("it was rendered"))
    most = 8192 * tokenizer.longest_token
    monkeypatch.setattr(ModelTokenizer, "decode", lambda *_, **__: pytest.fail("it was decoded"))
    bodies: list[tuple[Kind, dict[str, Any]]] = [
        ("chat", {"messages": CHAT["messages"] * 8193}),
        ("completion", {"prompt": "a" * (most + 1)}),
        ("tokenize", {"prompt": "a" * (most + 1)}),
        ("detokenize", {"tokens": [5] * (most + 1)}),
    ]
    for kind, body in bodies:
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 8192"):
            Preparation(tokenizer, SERVED).prepare(kind, json.dumps(body).encode())
    monkeypatch.setattr(ChatTemplate, "render", lambda *_, **__: "a" * (most + 1))
    bodies = [
        ("chat", CHAT), ("tokenize", CHAT), ("count_tokens", CHAT), ("input_tokens", {"input": "x"}),
        ("responses", {"input": "x"}), ("messages", CHAT | {"max_tokens": 5}),
    ]  # fmt: skip
    for kind, body in bodies:
        with pytest.raises(ContextLengthExceeded, match=f"{most + 1} characters"):
            Preparation(tokenizer, SERVED).prepare(kind, json.dumps(body).encode())


@pytest.mark.parametrize("side", ["left", "right"])
def test_only_the_part_of_a_text_that_is_kept_is_tokenized(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch, side: str
):
    text = " ".join(f"{n} word" for n in range(20_000))
    lengths: list[int] = []

    def encode(self: ModelTokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return whole(self, text, add_special_tokens=add_special_tokens)

    whole = ModelTokenizer.encode
    expected = whole(tokenizer, text)
    monkeypatch.setattr(ModelTokenizer, "encode", encode)
    body = {"prompt": text, "truncate_prompt_tokens": 90, "truncation_side": side}
    prepared = Preparation(tokenizer, Served(("fake",), 100)).prepare("completion", json.dumps(body).encode())
    assert isinstance(prepared, Prepared)
    assert prepared.prompts == [array("I", expected[:90] if side == "right" else expected[-90:])]
    assert max(lengths) <= (100 + 1024) * tokenizer.longest_token < len(text)


NESTED: dict[Kind, dict[str, Any]] = {
    "chat": CHAT | {
        "messages": [{"role": "user", "tool_calls": [{"id": "a", "function": FUNCTION}], "content": [{}]}],
        "tools": [{"type": "function", "function": FUNCTION}], "stream_options": {}, "tool_choice": {},
        "structured_outputs": {"choice": ["a"]}, "response_format": {"json_schema": {}, "type": "text"},
    },
    "completion": {"prompt": ["a", [5]]},
    "responses": {
        "input": [{"type": "message", "role": "user", "content": [{}]}, {"type": "reasoning", "content": []}],
        "tools": [FUNCTION], "reasoning": {}, "text": {"format": {}}, "stream_options": {},
    },
    "messages": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{}]}]}],
        "max_tokens": 5, "thinking": {},
        "tools": [{"name": "a", "input_schema": {}, "input_examples": [{}]}],
        "output_config": {"format": {}},
        "metadata": {}, "system": [{}], "tool_choice": {},
    },
    "count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "tokenize": CHAT,
    "detokenize": {"tokens": [5]},
}  # fmt: skip
FLOODS: list[Any] = [[0] * 2000, [{}] * 2000, ["x"] * 2000, {str(i): [] for i in range(2000)}]


def flooded(value: Any) -> Iterator[Any]:
    """Yields `value` with one part of it, and then another, in place of each kind of flood."""
    yield from ([*value, *more] if isinstance(value, list) else more for more in FLOODS)
    if isinstance(value, dict):
        yield {**value, **FLOODS[-1]}
    for key, part in (
        value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else [])
    ):
        for changed in flooded(part):
            copy = value.copy()
            copy[key] = changed
            yield copy


BATCH = {
    "input_file_id": "a", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"},
    "output_expires_after": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "body"), [(BatchBody, BATCH), *((BODIES[kind], body) for kind, body in NESTED.items())]
)
def test_validation_stops_at_the_first_errors(model: type[BaseModel], body: dict[str, Any]):
    """An error takes 500 bytes: those of 16 MB of zeros once were more than a child may allocate."""
    bodies = [*flooded(body)]
    bodies += [body | {name: flood} for name in model.model_fields for flood in FLOODS]
    counts = [errors_of(model, body) for body in bodies]
    assert max(counts) < 2000
    assert counts.count(0) < len(bodies) // 2


def errors_of(model: type[BaseModel], body: Any) -> int:
    """How many errors pydantic makes."""
    try:
        model.model_validate_json(json.dumps(body))
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.all
async def test_a_large_body_with_millions_of_errors_gets_its_answer(cluster: Cluster):
    body = b'{"messages":[0%b]}' % (b",0" * 2_000_000)
    headers = {"Content-Type": "application/json"}
    async with (
        asyncio.timeout(WITHIN),
        cluster.http.post(f"{cluster.url}/v1/chat/completions", data=body, headers=headers) as response,
    ):
        assert response.status == 400
        assert "messages[0]: input should be" in (await response.json())["error"]["message"]


@pytest.mark.all
async def test_a_list_of_messages_has_a_limit_before_objects_are_made(tokenizer: ModelTokenizer):
    raw = json.dumps({"messages": [{"role": "user"}] * (MAX_ITEMS + 1)}).encode()
    with pytest.raises(InvalidRequest, match=f"messages: list should have at most {MAX_ITEMS} items"):
        Preparation(tokenizer, SERVED).prepare("chat", raw)


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"user": "x" * MAX_OPTIONS_BYTES}, "the fields beside the prompt take"),
        ({"user": "[" * (MAX_OPTIONS_VALUES + 1)}, "the fields beside the prompt have"),
        ({"bad_words": ["日本" * 500] * 64}, "bad_words: [0-9]+ tokens in all"),
    ],
)
def test_the_fields_beside_the_prompt_have_limits(
    tokenizer: ModelTokenizer, fields: dict[str, Any], refused: str
):
    """The event loop reads them, and each choice has a copy of some."""
    with pytest.raises(InvalidRequest, match=refused):
        in_child("chat", json.dumps(CHAT | fields).encode(), tokenizer)


async def test_small_bodies_of_keys_take_turns(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """A body waits for the one that is prepared, not for all that another key has sent before."""
    order: list[str] = []
    first, all_wait = threading.Event(), threading.Event()

    def noted(preparation: Preparation, *_: Any) -> Prepared | bytes:
        first.set()
        assert all_wait.wait(WITHIN)
        order.append(preparation.salt.decode())
        return b""

    monkeypatch.setattr(Preparation, "prepare", noted)
    preparer = cluster.router.frontend._preparer

    async def send(key: str) -> None:
        await preparer.run("tokenize", b"{}", SERVED, ApiKey(key, b"", cache_salt=key.encode()))

    async with asyncio.TaskGroup() as group:
        for key in "a" * 200 + "b" + "a" * 20 + "c":
            group.create_task(send(key))
        await asyncio.to_thread(first.wait, WITHIN)
        all_wait.set()
    assert sorted(order[1:3]) == ["b", "c"]
    assert len(order) == 222


async def test_many_bodies_at_once_do_not_hold_the_event_loop_up(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    """It turns while a body is prepared, which are one at a time. A body with long `bad_words` goes to a
    child."""
    turned, at_once = threading.Event(), threading.Semaphore(1)
    prepared = 0

    prepare = Preparation.prepare

    def waiting(preparation: Preparation, kind: Kind, raw: bytes) -> Prepared | bytes:
        nonlocal prepared
        assert at_once.acquire(blocking=False)
        prepared += 1
        turned.clear()
        assert turned.wait(WITHIN), "the event loop prepares it"
        at_once.release()
        return prepare(preparation, kind, raw)

    async def turn() -> None:
        while True:
            turned.set()
            await asyncio.sleep(0)

    monkeypatch.setattr(Preparation, "prepare", waiting)
    preparer, turning = cluster.router.frontend._preparer, asyncio.create_task(turn())
    small = json.dumps({"prompt": "x", "bad_words": ["a b"] * 60}).encode()
    await asyncio.gather(*(preparer.run("completion", small, SERVED, ApiKey("", b"")) for _ in range(40)))
    assert prepared == 40
    long = json.dumps({"prompt": "x", "bad_words": ["a b"] * 60, "user": "x" * SMALL_BYTES}).encode()
    done = await preparer.run("completion", long, SERVED, ApiKey("", b""))
    turning.cancel()
    assert isinstance(done, Prepared)
    assert len(done.bad_words) == 120
    assert prepared == 40, "a child did it"


async def test_prompts_become_jobs_one_by_one(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    """Many long prompts take the loop a fifth of a second together."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    hints: list[int] = []

    def hinted(*_: Any) -> list[int]:
        hints.append(turns)
        return []

    monkeypatch.setattr("baton.router.preparation.jobs.prompt_hints", hinted)
    counting = asyncio.create_task(count())
    await cluster.complete(prompt=[[5]] * 20, max_tokens=1)
    counting.cancel()
    assert len(set(hints)) == 20


def test_a_defect_in_a_child_is_logged_without_the_clients_text(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: Any) -> Any:
        raise RuntimeError("of a ".join(["text", "client"]))

    monkeypatch.setattr(Preparation, "prepare", broken)
    with pytest.raises(ApiError) as failure:
        in_child("chat", b"{}", tokenizer)
    assert failure.value.status == 500
    assert "RuntimeError" in caplog.text
    assert "text of a client" not in caplog.text


# ---------------------------------------------------------------- with a real child


def processes(cluster: Cluster) -> list[psutil.Process]:
    found = [child._process for child in cluster.router.frontend._preparer._children._children]
    return [psutil.Process(process.pid) for process in found if process is not None]


async def kill(process: psutil.Process) -> None:
    process.kill()
    await eventually(lambda: not psutil.pid_exists(process.pid))


@pytest.mark.all
async def test_large_bodies_are_prepared_in_a_child_that_is_replaced_when_it_dies(cluster: Cluster):
    text = "word " * 4000
    expected = cluster.tokenizer.encode(text)
    dead = {0}
    for _ in range(2):
        sizes = {"prompt": text, "max_tokens": 2, "ignore_eos": True}
        result = await cluster.complete(**sizes, return_token_ids=True)
        assert result["choices"][0]["prompt_token_ids"] == expected
        status, result = await cluster.post("/tokenize", prompt=text)
        assert (status, result["tokens"]) == (200, expected)
        async with cluster.channel() as channel:
            request = ipb.GenerateRequest(text=text, max_tokens=1)
            last = [message async for message in InferenceStub(channel).Generate(request)][-1]
            assert last.usage.prompt_tokens == len(expected)
        used = processes(cluster)
        assert used
        assert not dead & {process.pid for process in used}
        for process in used:
            dead.add(process.pid)
            await kill(process)


@pytest.mark.all
async def test_a_child_keeps_no_memory_of_a_large_body(cluster: Cluster):
    def private_mib() -> int:
        """Of the largest child."""
        return max(process.memory_full_info().uss for process in processes(cluster)) >> 20

    await cluster.post("/tokenize", prompt="word " * 4000)
    before = private_mib()
    for messages in ([{"role": "user", "content": "a"}] * 150_000, [0] * 2_000_000):
        status, _ = await cluster.post("/v1/chat/completions", messages=messages)
        assert status == 400
        await cluster.until(lambda: private_mib() - before < 48)  # it replies first


@pytest.mark.parametrize(
    ("number", "kills"),
    [(signal.SIGPROF, 0), (signal.SIGABRT, 0), (signal.SIGKILL, 0), (signal.SIGKILL, 1)],
)
async def test_a_body_that_kills_a_child_is_refused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, kills: int
):
    """Unless a person killed the child. Then another child prepares it, but not if memory had ended."""
    counts = itertools.count(5, kills)
    monkeypatch.setattr(child_pool, "oom_kills", lambda: next(counts))
    await cluster.post("/tokenize", prompt=LONG)
    (process,) = processes(cluster)
    process.suspend()
    asked = asyncio.create_task(cluster.post("/tokenize", prompt=LONG))
    await cluster.until(lambda: bool(cluster.router.frontend._preparer._children._slots._running))
    process.send_signal(number)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()
    status, result = await asked
    if number is signal.SIGKILL and not kills:
        assert (status, result["tokens"]) == (200, cluster.tokenizer.encode(LONG))
    else:
        assert status == 400
        assert re.search("takes more than 20 s or [0-9]+ MiB", result["error"]["message"])


@pytest.mark.all
async def test_a_child_takes_what_its_container_allows(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
):
    """A body that takes more is refused, and the next one is prepared."""
    monkeypatch.setattr(child, "child_bytes", lambda processes: 48 << 20)
    forks = child.fork_server("baton: test", tokenizer)
    preparer = Preparer(tokenizer, forks)
    try:
        for _ in range(2):
            assert await preparer.run("tokenize", json.dumps({"prompt": LONG}).encode(), SERVED, ANY_CLIENT)
            text = json.dumps({"prompt": "a b " * 150_000}).encode()
            with pytest.raises(InvalidRequest, match="takes more than 20 s or 48 MiB"):
                await preparer.run("tokenize", text, SERVED, ANY_CLIENT)
    finally:
        await preparer.close()
        await forks.close()


async def test_prompts_are_counted_before_the_router_makes_lists_of_them(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The estimate from the bytes of a body knows only one prompt."""
    monkeypatch.setattr(server, "prompt_tokens", lambda config: 10_000)
    async with make_cluster(tokenizer, tmp_path) as cluster:
        entry = cluster.router.services.admission
        account = cluster.router.frontend.authorize("")
        entry.reserve(account, 1)
        status, result = await cluster.post("/v1/completions", prompt=[[5] * 6000] * 4, max_tokens=1)
        assert (status, result["error"]["code"]) == (429, "overloaded")
        entry.release(account, 1)
        assert entry.waiting_tokens == 0


async def test_a_drain_waits_for_a_request_that_is_being_prepared():
    active = ActiveRequests()
    with active.counting():
        waiting = asyncio.create_task(active.none.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


# ---------------------------------------------------------------- limits come first


async def test_limits_are_checked_before_the_preparation(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    key = ApiKey.of("a", "secret", max_requests=1)
    monkeypatch.setattr(server, "prompt_tokens", lambda config: 5000)
    async with make_cluster(tokenizer, tmp_path, api_keys=(key,)) as cluster:
        http, admission = cluster.http, cluster.router.services.admission
        headers = {"Authorization": "Bearer secret"}
        monkeypatch.setattr(Preparer, "run", lambda *_: pytest.fail("work began"))
        account = cluster.router.frontend.authorize("Bearer secret")

        async def refused(path: str, body: Any) -> str:
            async with http.post(cluster.url + path, json=body, headers=headers) as response:
                assert response.status == 429
                return (await response.json())["error"]["code"]

        with entering(admission, Account(ANY_CLIENT)) as other:
            other.expect(3000)
            assert await refused("/v1/completions", {"prompt": LONG}) == "overloaded"
        account.enter()
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert await refused(path, CHAT) == "rate_limit_exceeded"
        account.leave()
        assert account.requests == 0
        assert admission.waiting_tokens == 0


def test_an_echo_of_ids_that_are_cut_off(tokenizer: ModelTokenizer):
    """Only the ids that are kept were checked. The tokenizer remembers each id that it has seen."""
    body = {"prompt": [4_000_000_000, 200, 300, 301], "truncate_prompt_tokens": 2, "echo": True}
    prepared = Preparation(tokenizer, SERVED).prepare("completion", json.dumps(body).encode())
    assert isinstance(prepared, Prepared)
    assert prepared.echoes == [tokenizer.decode([300, 301])]
