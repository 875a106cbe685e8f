"""The client against a real server on a real socket. The sleeps are what these tests are about."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter

import msgspec
import pytest

from bench.load.measurement.slo import Slo
from bench.load.measurement.summary import summarize
from bench.load.target.record import Record
from bench.load.target.request import Dialect, Target
from bench.load.traffic.distribution import Distribution
from bench.load.traffic.workload import Listed, Session, Synthetic, Turn
from tests.bench.mock_server import Behavior, Fault, MockServer
from tests.bench.support import client_config, one_turn, open_loop, run_client

SAME = Listed((one_turn(),))


async def test_records_match_what_the_server_sent() -> None:
    behavior = Behavior(ttft=0.05, gaps=(0.02, 0.04))
    async with MockServer(behavior) as server:
        (record,) = await run_client(client_config(server.url, Listed((one_turn(5),)), sessions=1))
        (served,) = server.served
    assert record.ok
    assert (record.output_tokens, record.generated, len(record.arrivals)) == (5, 5, 5)
    assert record.tokens == [1] * 5
    # Between write and arrival lies only the loopback; the bound is loose because the machine may be busy.
    written = [b - a for a, b in itertools.pairwise(served.writes)]
    assert record.gaps == pytest.approx(written, abs=0.05)
    assert record.ttft >= 0.05


async def test_prompts_have_the_lengths_that_the_options_ask_for() -> None:
    workload = Synthetic(1, Distribution("uniform", (20, 400)), Distribution("uniform", (1, 6)))
    async with MockServer(Behavior(ttft=0)) as server:
        records = await run_client(client_config(server.url, workload, sessions=30, concurrency=8))
    assert len(records) == 30
    assert all(r.prompt_tokens == r.asked_input and r.generated == r.asked_output for r in records)
    assert len({r.asked_input for r in records}) > 15


async def test_a_closed_loop_keeps_its_users_busy() -> None:
    async with MockServer(Behavior(ttft=0.02)) as server:
        records = await run_client(client_config(server.url, SAME, sessions=20, concurrency=5))
    events = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])
    in_flight = list(itertools.accumulate(change for _, change in events))
    assert len(records) == 20
    assert max(in_flight) == 5


async def test_clients_share_the_sessions_and_the_users() -> None:
    async with MockServer(Behavior(ttft=0)) as server:
        configs = [
            client_config(server.url, SAME, sessions=11, concurrency=5, index=i, clients=3) for i in range(3)
        ]
        found = await asyncio.gather(*map(run_client, configs))
    assert [c.users for c in configs] == [2, 2, 1]
    assert sorted(r.index for records in found for r in records) == list(range(11))


async def test_several_servers_take_sessions_in_turn() -> None:
    async with MockServer(Behavior(ttft=0)) as one, MockServer(Behavior(ttft=0)) as other:
        target = Target((one.url, other.url), "completions", "mock", Dialect())
        config = client_config("", SAME, sessions=5, concurrency=1)
        await run_client(msgspec.structs.replace(config, target=target))
        assert [len(server.served) for server in (one, other)] == [3, 2]


async def test_an_open_loop_keeps_its_times_beside_a_slow_server() -> None:
    async with MockServer(Behavior(ttft=0.5)) as server:
        records = await run_client(client_config(server.url, SAME, duration=0.4, **open_loop(50.0)))
    assert sorted(r.intended for r in records) == pytest.approx([i / 50 for i in range(20)])
    assert all(r.ok for r in records)


async def test_a_trace_is_replayed_at_its_times_scaled_by_its_speed() -> None:
    sessions = tuple(Session(one_turn().turns, at=at) for at in (0.0, 1.0, 1.5, 4.0))
    async with MockServer(Behavior(ttft=0)) as server:
        config = client_config(server.url, Listed(sessions, timed=True), concurrency=0, time_scale=10.0)
        records = await run_client(config)
        arrived = [s.arrived for s in server.served]
    assert [r.intended for r in records] == pytest.approx([0.0, 0.1, 0.15, 0.4])
    assert arrived[-1] - arrived[0] == pytest.approx(0.4, abs=0.1)


async def test_waiting_for_a_free_place_counts_as_latency() -> None:
    async with MockServer(Behavior(ttft=0.1, gaps=(0,))) as server:
        config = client_config(server.url, SAME, duration=0.19, **open_loop(20.0) | {"concurrency": 1})
        records = await run_client(config)
    held = records[-1]
    assert held.intended == pytest.approx(0.15)
    assert held.sent >= 0.29, "three before it took 0.1 s each"
    assert held.ttft >= 0.24
    assert held.lag < held.sent - held.intended, "the client itself was in time"


async def test_an_open_loop_shows_a_stall_that_a_closed_loop_hides() -> None:
    """Coordinated omission: while the server stalls, a closed loop sends nothing that could be late."""
    behavior = Behavior(ttft=0.005, gaps=(0.001,), stall=(0.4, 1.2))
    async with MockServer(behavior) as one, MockServer(behavior) as other:
        opened, closed = await asyncio.gather(
            run_client(client_config(one.url, SAME, duration=1.6, **open_loop(40.0))),
            run_client(client_config(other.url, SAME, duration=1.6, concurrency=1)),
        )
    late = {name: sum(r.ttft > 0.2 for r in rs) / len(rs) for name, rs in (("o", opened), ("c", closed))}
    assert 0.25 < late["o"] < 0.60, "of 1.6 s of users, those of 0.6 s waited more than 0.2 s"
    assert late["c"] < 0.1
    p90 = {
        name: summarize(records, Slo(), warm_up=0.0).latencies["ttft"]["p90"].value
        for name, records in (("open", opened), ("closed", closed))
    }
    assert p90["open"] > 400
    assert p90["closed"] < 200


async def test_sessions_keep_their_id_history_and_think_time() -> None:
    turns = tuple(Turn(2, text=f"question {i}", think_seconds=0.1 if i else 0.0) for i in range(3))
    target = Target(("",), "chat", "mock", Dialect())
    async with MockServer(Behavior(ttft=0.01)) as server:
        config = client_config(
            server.url,
            Listed((Session(turns),)),
            sessions=2,
            concurrency=2,
            target=Target((server.url,), target.api, target.model, target.dialect),
        )
        records = await run_client(config)
        served = server.served
    assert len(records) == 6
    assert {s.session for s in served} == {"run-0", "run-1"}
    mine = [s for s in served if s.session == "run-0"]
    assert [len(s.prompt) for s in mine] == [1, 3, 5]
    assert [m["role"] for m in mine[2].prompt] == ["user", "assistant"] * 2 + ["user"]
    assert mine[2].prompt[1]["content"] == " t0 t1", "what the server had said"
    assert mine[2].prompt[4]["content"] == "question 2"
    first, second, _ = [r for r in records if r.index == 0]
    assert second.intended - first.ended == pytest.approx(0.1, abs=0.05)


async def test_the_history_of_completions_is_one_text() -> None:
    turns = (Turn(2, text="one"), Turn(2, text="two"))
    async with MockServer(Behavior(ttft=0)) as server:
        await run_client(client_config(server.url, Listed((Session(turns),)), sessions=1))
        assert [s.prompt for s in server.served] == ["one", "one t0 t1\ntwo"]


async def test_a_failed_turn_ends_its_session() -> None:
    turns = tuple(Turn(4, text="x") for _ in range(4))
    async with MockServer(Behavior(ttft=0, faults=("none", "half"))) as server:
        records = await run_client(client_config(server.url, Listed((Session(turns),)), sessions=1))
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
    "hang": "timeout",
}


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_every_failure_is_named_and_counted(api: str) -> None:
    async with MockServer(Behavior(ttft=0, faults=tuple(FAULTS))) as server:
        config = client_config(
            server.url,
            SAME,
            sessions=2 * len(FAULTS),
            concurrency=4,
            timeout=1.0,
            target=Target((server.url,), api, "mock", Dialect()),  # type: ignore[arg-type]
        )
        records = await run_client(config)
    assert len(records) == 2 * len(FAULTS), "one record for each request, whatever came"
    assert Counter(r.error_class for r in records) == Counter([*FAULTS.values()] * 2)
    assert all(r.ok or r.detail for r in records)
    busy = next(r for r in records if r.error_class == "http_429")
    assert "too many requests" in busy.detail


async def test_users_back_off_from_a_server_that_does_not_answer() -> None:
    """The open loop keeps its schedule: its load does not depend on the server."""
    config = client_config("http://127.0.0.1:1", SAME, concurrency=2, duration=1.0)
    records = await run_client(config)
    assert {r.error_class for r in records} == {"refused"}
    assert len(records) <= 2 * 4, "after 0, 0.1, 0.3 and 0.7 seconds"
    async with MockServer(Behavior(ttft=0, faults=["500", "none"])) as server:
        records = await run_client(client_config(server.url, SAME, sessions=8))
    assert len(records) == 8
    assert records[-1].ended < 1.0, "an answer ends the pause"


async def test_a_port_without_a_listener_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    records = await run_client(client_config(f"http://127.0.0.1:{port}", SAME, sessions=3, concurrency=1))
    assert [r.error_class for r in records] == ["refused"] * 3


async def test_an_unknown_host_is_unreachable() -> None:
    records = await run_client(client_config("http://host.invalid:80", SAME, sessions=1))
    assert [r.error_class for r in records] == ["unreachable"]


async def test_a_server_that_ends_in_the_middle_of_a_stream() -> None:
    async with MockServer(Behavior(ttft=0.01, gaps=(0.02,))) as server:
        config = client_config(server.url, Listed((one_turn(20),)), duration=1.5, **open_loop(20.0))
        running = asyncio.create_task(run_client(config))
        await asyncio.sleep(0.7)
    records = await running
    classes = Counter(r.error_class for r in records)
    assert len(records) == 30
    assert classes[""] >= 1
    assert classes["refused"] >= 5
    assert set(classes) <= {"", "refused", "half_streamed", "disconnected"}


async def test_an_answer_after_the_drain_time_has_failed() -> None:
    async with MockServer(Behavior(ttft=30.0)) as server:
        config = client_config(server.url, SAME, duration=0.2, drain=0.2, **open_loop(20.0))
        records = await run_client(config)
    assert [r.error_class for r in records] == ["unfinished"] * 4


async def test_hanging_users_of_a_closed_loop_end_with_the_drain_time() -> None:
    async with MockServer(Behavior(ttft=30.0)) as server:
        records = await run_client(client_config(server.url, SAME, duration=0.2, drain=0.2, concurrency=3))
    assert [r.error_class for r in records] == ["unfinished"] * 3


@pytest.mark.parametrize("shape", [{"concurrency": 3}, open_loop(20.0)])
async def test_a_stop_keeps_what_was_measured(shape: dict) -> None:
    async with MockServer(Behavior(ttft=0.01, faults=("none", "hang"))) as server:
        # Every second request hangs. So when two have ended, the one between them is under way.
        records = await run_client(client_config(server.url, SAME, duration=30.0, **shape), stop_after=2)
    classes = Counter(r.error_class for r in records)
    assert classes[""] >= 2
    assert classes["interrupted"] >= 1
    assert set(classes) == {"", "interrupted"}
    indices = [r.index for r in records]
    assert len(set(indices)) == len(indices)


async def test_a_stop_records_requests_that_wait_for_a_place() -> None:
    """Those that still waited for a free place are recorded too."""
    async with MockServer(Behavior(ttft=30.0)) as server:
        config = client_config(
            server.url, SAME, duration=0.2, drain=0.1, **open_loop(50.0) | {"concurrency": 1}
        )
        records: list[Record] = await run_client(config)
    assert len(records) == 10
    assert {r.error_class for r in records} == {"unfinished"}
