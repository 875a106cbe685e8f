"""The client against a real server on a real socket.

A busy machine makes everything late, so no test limits how long something takes. Where waiting is what a test
is about, the server waits for an event of the test.
"""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest

from baton.bench.load.target.answer import Answer, Record
from baton.bench.load.target.request import Api, Dialect, SessionAs, Target, exchange
from baton.bench.load.target.tokenization import Composer
from baton.bench.load.traffic.client import Client
from baton.bench.load.traffic.client_process import line_of
from baton.bench.load.traffic.workload import Listed, Session, Workload
from baton.system.python_path import python_path
from tests.bench.mock_server import ANSWERED, Behavior, Fault, MockServer
from tests.bench.support import EXACT, client_config, open_loop, run_client, short_prompts

SHORT = short_prompts()


async def _answered(behavior: Behavior, workload: Workload = SHORT, **more: Any) -> list[Record]:
    """The records of a client. `more`: fields of its configuration."""
    async with MockServer(behavior) as server:
        return await run_client(client_config(server.url, workload, **more))


async def test_records_match_what_the_server_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server writes a token when the client has read the one before."""
    read, feed = asyncio.Semaphore(1), Answer.feed

    def fed(answer: Answer, data: bytes, now: float) -> None:
        feed(answer, data, now)
        read.release()

    monkeypatch.setattr(Answer, "feed", fed)
    start = time.monotonic()
    async with MockServer(Behavior(ttft=0, gate=lambda *_: read.acquire())) as server:
        config = client_config(server.url, short_prompts(5), sessions=1)
        (record,) = await run_client(config, start=start)
        (served,) = server.served
    assert record.ok
    assert (record.output_tokens, record.generated, len(record.arrivals)) == (5, 5, 5)
    assert record.tokens == [1] * 5
    chunks = zip((at - start for at in served.writes), record.arrivals, strict=True)
    moments = [record.intended, record.sent, served.arrived - start, *itertools.chain(*chunks), record.ended]
    assert moments == sorted(moments)


async def test_a_closed_loop_keeps_its_users_busy() -> None:
    """The first answers come when all users have asked."""

    async def all_have_asked(number: int, _: int) -> None:
        await server.requests(5)

    async with MockServer(Behavior(ttft=0, gate=all_have_asked)) as server:
        records = await run_client(client_config(server.url, SHORT, sessions=20, concurrency=5))
    events = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])
    in_flight = list(itertools.accumulate(change for _, change in events))
    assert len(records) == 20
    assert max(in_flight) == 5


async def test_clients_share_the_sessions_and_the_users() -> None:
    async with MockServer(Behavior(ttft=0)) as server:
        configs = [
            client_config(server.url, SHORT, sessions=11, concurrency=5, index=i, clients=3) for i in range(3)
        ]
        found = await asyncio.gather(*map(run_client, configs))
    assert [c.users for c in configs] == [2, 2, 1]
    assert sorted(r.index for records in found for r in records) == list(range(11))


async def test_an_open_loop_keeps_its_times_beside_a_slow_server() -> None:
    """The first answer comes when all have asked."""

    async def all_have_asked(number: int, _: int) -> None:
        await server.requests(20)

    async with MockServer(Behavior(ttft=0, gate=all_have_asked)) as server:
        records = await run_client(client_config(server.url, SHORT, duration=0.4, **open_loop(50.0)))
    assert sorted(r.intended for r in records) == pytest.approx([i / 50 for i in range(20)])
    assert all(r.ok for r in records)


async def test_a_trace_is_replayed_at_its_times_scaled_by_its_speed() -> None:
    sessions = tuple(Session(SHORT.session(0).turns, at=at) for at in (0.0, 1.0, 1.5, 4.0))
    records = await _answered(Behavior(ttft=0), Listed(sessions), concurrency=0, time_scale=10.0)
    assert [r.intended for r in records] == pytest.approx([0.0, 0.1, 0.15, 0.4])
    assert all(r.sent >= r.intended for r in records)


async def test_waiting_for_a_free_place_counts_as_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer comes when the client would have sent all four."""
    begun, make = asyncio.Event(), Answer.__init__
    intended: list[float] = []

    def made(answer: Answer, record: Record, **more: Any) -> None:
        make(answer, record, **more)
        intended.append(record.intended)
        if len(intended) == 4:
            begun.set()

    monkeypatch.setattr(Answer, "__init__", made)
    behavior = Behavior(ttft=0, gaps=(0,), gate=lambda *_: begun.wait())
    records = await _answered(behavior, duration=0.19, **open_loop(20.0) | {"concurrency": 1})
    *_, before, held = records
    assert held.intended == intended[3] == pytest.approx(0.15)
    assert held.intended + held.lag < before.ended <= held.sent, "the client itself was in time"
    assert held.ttft > before.ended - held.intended


async def test_sessions_keep_their_id_history_and_think_time() -> None:
    workload = short_prompts(2, turns=3, think_seconds=0.1)
    async with MockServer(Behavior(ttft=0.01)) as server:
        target = Target((server.url,), "chat", "mock", Dialect())
        config = client_config("", workload, sessions=2, concurrency=2, target=target)
        records = await run_client(config)
        served = server.served
    assert len(records) == 6
    assert {s.session for s in served} == {"run-0", "run-1"}
    mine = [s for s in served if s.session == "run-0"]
    assert [s.name for s in mine] == ["run-0-0", "run-0-1", "run-0-2"]
    assert [len(s.prompt) for s in mine] == [1, 3, 5]
    assert [m["role"] for m in mine[2].prompt] == ["user", "assistant"] * 2 + ["user"]
    assert mine[2].prompt[1]["content"] == " t0 t1", "what the server had said"
    asked = workload.session(0).turns[2].segments
    assert mine[2].prompt[4]["content"] == Composer(EXACT).compose(asked, first=False)
    first, second, _ = [r for r in records if r.index == 0]
    assert second.sent >= second.intended >= first.ended + 0.1


async def test_the_history_of_token_ids_has_those_of_the_answers() -> None:
    words = EXACT.words
    exact = msgspec.structs.replace(EXACT, ids=tuple(range(100, 100 + len(words)))).of_ids()
    workload = short_prompts(2, turns=2)
    composer = Composer(exact)
    one, two = (
        [int(word) for word in composer.compose(turn.segments).split(",")]
        for turn in workload.session(0).turns
    )
    async with MockServer(Behavior(ttft=0)) as server:
        target = Target((server.url,), "completions", "mock", Dialect(), form="ids")
        config = client_config("", workload, sessions=1, target=target, tokenization=exact)
        records = await run_client(config)
        assert [s.prompt for s in server.served] == [one, [*one, ANSWERED, ANSWERED + 1, *two]]
    assert [r.asked_input for r in records] == [3, 8]


async def test_what_a_refused_turn_asked_comes_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float, do: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        slept.append(seconds)
        await do(seconds if seconds < 0.5 else 0.0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(Client, "_sleep_until", lambda client, due: asyncio.sleep(due - client._now()))
    workload, composer = short_prompts(2, turns=4), Composer(EXACT)
    one, two, three, four = (turn.segments for turn in workload.session(0).turns)
    async with MockServer(Behavior(ttft=0, faults=("429", "none", "429", "none"))) as server:
        records = await run_client(client_config(server.url, workload, sessions=1))
        second = composer.compose([*one, *two])
        assert server.served[1].prompt == second
        assert server.served[3].prompt == f"{second} t0 t1\n{composer.compose([*three, *four], first=False)}"
    assert [r.error_class for r in records] == ["http_429", "", "http_429", ""]
    assert [r.skipped_turns for r in records] == [0] * 4
    assert sum(seconds > 0.5 for seconds in slept) == 2, "as long as the server wants"


@pytest.mark.all
async def test_the_drain_time_begins_with_the_last_turn() -> None:
    """The only session has started long before."""
    session = Session(short_prompts(1, turns=3, think_seconds=0.4).session(0).turns)
    records = await _answered(Behavior(ttft=0), Listed((session,)), concurrency=0, drain=0.7)
    assert [r.error_class for r in records] == [""] * 3


@pytest.mark.parametrize(
    ("session_as", "seen"), [("header", ("run-7", "")), ("user", ("", "run-7")), ("none", ("", ""))]
)
async def test_bound_requests_go_to_one_server(session_as: SessionAs, seen: tuple[str, str]) -> None:
    sessions = tuple(Session(SHORT.session(i).turns, bound=bound) for i, bound in enumerate((7, 0, 7, 7)))
    async with MockServer(Behavior(ttft=0)) as one, MockServer(Behavior(ttft=0)) as other:
        target = Target((one.url, other.url), "completions", "mock", Dialect(), session_as=session_as)
        await run_client(client_config("", Listed(sessions), concurrency=0, target=target))
        assert [len(server.served) for server in (one, other)] == [1, 3]
        assert {(served.session, served.user) for served in other.served} == {seen}


async def test_a_failed_turn_ends_its_session() -> None:
    behavior = Behavior(ttft=0, faults=("none", "half"))
    records = await _answered(behavior, short_prompts(turns=4), sessions=1)
    assert [r.error_class for r in records] == ["", "half_streamed"]
    assert records[-1].skipped_turns == 2


FAULTS: dict[Fault, str] = {
    "none": "",
    "429": "http_429",
    "500": "http_500",
    "reset": "disconnected",
    "half": "half_streamed",
    "done_only": "half_streamed",
    "garbage": "garbage",
    "not_json": "garbage",
    "bad_types": "garbage",
    "html": "garbage",
    "error_event": "stream_error",
    "abort": "stream_error",
    "empty": "empty",
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_every_failure_is_named_and_counted(api: Api) -> None:
    async with MockServer(Behavior(ttft=0, faults=tuple(FAULTS))) as server:
        target = Target((server.url,), api, "mock", Dialect())
        config = client_config("", SHORT, sessions=2 * len(FAULTS), concurrency=4, target=target)
        records = await run_client(config)
        server.behavior.faults = ("hang",)
        late = await run_client(msgspec.structs.replace(config, sessions=1, timeout=0.2))
    assert [r.error_class for r in late] == ["timeout"]
    assert len(records) == 2 * len(FAULTS), "one record for each request, whatever came"
    assert Counter(r.error_class for r in records) == Counter([*FAULTS.values()] * 2)
    assert all(r.ok or r.detail for r in records + late)
    busy = next(r for r in records if r.error_class == "http_429")
    assert "too many requests" in busy.detail


async def test_users_back_off_from_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The open loop keeps its schedule: its load does not depend on the server."""
    slept: list[float] = []

    async def sleep(seconds: float, do: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        slept.append(seconds)
        await do(0)

    def pauses() -> list[float]:
        found = [seconds for seconds in slept if seconds >= 0.1]
        slept.clear()
        return found

    monkeypatch.setattr(asyncio, "sleep", sleep)
    records = await run_client(client_config("http://127.0.0.1:1", SHORT, sessions=6))
    assert [r.error_class for r in records] == ["refused"] * 6
    assert pauses() == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    records = await _answered(Behavior(ttft=0, faults=["500", "500", "none"]), sessions=6)
    assert len(records) == 6
    assert pauses() == [0.1, 0.2, 0.1, 0.2], "an answer ends the pause"


async def test_an_unknown_host_is_unreachable() -> None:
    records = await run_client(client_config("http://host.invalid:80", SHORT, sessions=1))
    assert [r.error_class for r in records] == ["unreachable"]


async def test_a_connection_that_a_server_did_not_accept_before_its_end_is_disconnected() -> None:
    """The kernel answers for a listener, and resets the connection when the listener is closed."""
    listener = socket.create_server(("127.0.0.1", 0))

    class Late(socket.socket):
        def connect(self, address: Any, /) -> None:
            try:
                super().connect(address)
            finally:
                listener.close()

    answer = Answer(Record(index=0, intended=0.0, sent=0.0))
    target = Target((f"http://127.0.0.1:{listener.getsockname()[1]}",), "completions", "mock", Dialect())
    connector = aiohttp.TCPConnector(socket_factory=lambda info: Late(*info[:3]))
    async with aiohttp.ClientSession(connector=connector) as http:
        await exchange(http, target, b"{}", answer)
    assert answer.record.error_class == "disconnected"


@pytest.mark.all
async def test_a_server_that_ends_in_the_middle_of_a_stream() -> None:
    """The first answer is whole. Then the server ends while another one streams."""
    whole, half = asyncio.Event(), asyncio.Event()

    async def gate(number: int, sent: int) -> None:
        if number and sent == 2:
            await whole.wait()
            half.set()
            await asyncio.Event().wait()

    def enough(records: list[Record]) -> bool:
        whole.set()
        classes = Counter(r.error_class for r in records)
        return classes["half_streamed"] > 0 and classes["refused"] >= 5

    async with MockServer(Behavior(ttft=0, gaps=(0,), gate=gate)) as server:
        running = asyncio.create_task(
            run_client(client_config(server.url, SHORT, **open_loop(100.0)), stop_when=enough)
        )
        await half.wait()
    classes = Counter(r.error_class for r in await running)
    assert classes[""] == 1
    assert set(classes) <= {"", "refused", "half_streamed", "disconnected", "interrupted"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("load", "count"),
    [
        (open_loop(20.0), 4),
        ({"concurrency": 3}, 3),  # users of a closed loop, however late they begin
        (open_loop(50.0) | {"concurrency": 1}, 10),  # all but one wait for a free place
    ],
)
async def test_an_answer_after_the_drain_time_has_failed(
    load: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "arrivals" not in load:
        monkeypatch.setattr(Client, "_now", lambda client: 0.0)
    records = await _answered(Behavior(ttft=3600.0), duration=0.2, drain=0.2, **load)
    assert [r.error_class for r in records] == ["unfinished"] * count


@pytest.mark.parametrize("shape", [{"concurrency": 3}, open_loop(20.0)])
async def test_a_stop_keeps_what_was_measured(shape: dict) -> None:
    async with MockServer(Behavior(ttft=0.01, faults=("none", "hang"))) as server:
        # Every second request hangs. So when two have ended, the one between them is under way.
        config = client_config(server.url, SHORT, duration=3600.0, **shape)
        records = await run_client(config, stop_when=lambda found: len(found) == 2)
    classes = Counter(r.error_class for r in records)
    assert classes[""] >= 2
    assert classes["interrupted"] >= 1
    assert set(classes) == {"", "interrupted"}
    indices = [r.index for r in records]
    assert len(set(indices)) == len(indices)


async def test_a_client_process_ends_quietly_if_its_parent_dies() -> None:
    """The pipes of the process close while its request is under way. The server does not answer it."""
    held, (told, telling) = asyncio.Event(), os.pipe()
    async with MockServer(Behavior(ttft=0, gate=lambda *_: held.wait())) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "baton.bench.load.traffic.client_process",
            stdin=subprocess.PIPE, stdout=telling, stderr=subprocess.PIPE,
            env=os.environ | python_path(),
        )  # fmt: skip
        os.close(telling)
        assert process.stdin
        process.stdin.write(line_of(client_config(server.url, SHORT, sessions=1)))
        assert await asyncio.to_thread(os.read, told, 1)
        process.stdin.write(line_of(time.monotonic()))
        await server.requests(1)
        process.stdin.close()  # `communicate` does it from Python 3.12 on
        os.close(told)
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
