"""Workers fail in every way, and the client reads the same output as without failures."""

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from baton.router.errors import ApiError
from baton.router.generation.failures import MAX_FAILURES
from baton.router.policy.recording import events, replay
from baton.router.text.tokenizer import ModelTokenizer
from baton.router.workers.checks import step_model
from baton.rpc import worker_pb2 as pb
from tests.fake_worker import FakeWorker

from .conftest import TEXT, Cluster, make_cluster

BODY = {"prompt": "Hello", "max_tokens": 200, "stream": True, "return_token_ids": True}


async def answered_whole(cluster: Cluster, **body: Any) -> None:
    """Asserts that every token came once, in order."""
    events = await cluster.events(
        "/v1/completions", prompt="Hello", max_tokens=200, return_token_ids=True, **body
    )
    assert "error" not in events[-1], events[-1]
    tokens = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert tokens == cluster.output_ids
    assert "".join(event["choices"][0]["text"] for event in events) == TEXT
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def prefills(worker: FakeWorker) -> list[pb.SubmitPrefill]:
    return [m.prefill for m in worker.submitted if m.WhichOneof("kind") == "prefill"]


def decodes(worker: FakeWorker) -> list[pb.SubmitDecode]:
    return [m.decode for m in worker.submitted if m.WhichOneof("kind") == "decode"]


def retargets(worker: FakeWorker) -> list[pb.Retarget]:
    return [m.retarget for m in worker.submitted if m.WhichOneof("kind") == "retarget"]


def busy(workers: list[FakeWorker]) -> tuple[FakeWorker, FakeWorker]:
    """Returns the worker that got the request, and the other one."""
    used = next(w for w in workers if w.submitted)
    return used, next(w for w in workers if w is not used)


def tokens_in(line: bytes) -> list[int]:
    """Returns the token ids of one line of a stream."""
    if not line.startswith(b"data: {"):
        return []
    return json.loads(line[6:])["choices"][0]["token_ids"]


@contextlib.asynccontextmanager
async def streaming(cluster: Cluster) -> AsyncIterator[Callable[..., Awaitable[list[int]]]]:
    """Yields a function that returns the tokens so far, once there are so many, or all of them."""
    received: list[int] = []
    async with cluster.http.post(cluster.url + "/v1/completions", json=BODY) as response:

        async def read(count: float = math.inf) -> list[int]:
            while len(received) < count and (line := await response.content.readline()):
                received.extend(tokens_in(line))
            return received

        yield read


@pytest.mark.parametrize("target", [0.01, 1.0])
async def test_a_stream_returns_to_a_decode_worker_that_came_back_where_that_costs_less(
    tokenizer: ModelTokenizer, tmp_path: Path, target: float
) -> None:
    """Steps of 40 ms at the prefill worker cost much with a gap target of 10 ms, and nothing with 1 s."""
    async with make_cluster(tokenizer, tmp_path, record_plans=str(tmp_path / "plans")) as cluster:
        [prefill], [decode] = cluster.prefills, cluster.decodes
        decode.steps = asyncio.Semaphore(3)
        prefill.status.step_seconds, prefill.status.gap_target_seconds = 0.040, target
        prefill.report()
        async with streaming(cluster) as read:
            await read(3)
            prefill.steps = steps = asyncio.Semaphore(2)
            await decode.kill()
            await read(5)
            [stays] = decodes(prefill)
            decode.submitted.clear()
            decode.steps = None
            await decode.start(int(decode.address.rpartition(":")[2]))
            if target < 0.1:
                await prefill.until(lambda w: stays.decode_id in w.cancelled)
            else:
                await cluster.until(lambda: cluster.pool.complete and decode.attached)
            prefill.steps = None
            for _ in cluster.output_ids:
                steps.release()
            tokens = await read()
    assert tokens == cluster.output_ids
    came = [(list(each.request.output_ids), each.HasField("source")) for each in decodes(decode)]
    assert came == ([(tokens[:5], True)] if target < 0.1 else [])
    [file] = tmp_path.glob("plans.*")
    lines = file.read_bytes().splitlines()
    assert "returns" in [name for _, name, _ in events(lines)]
    assert all(recorded == now for recorded, now in replay(lines, step_model))


def waiting_prefills(cluster: Cluster) -> int:
    connections = cluster.pool.ready(pb.POOL_PREFILL)
    return sum(len(connection.attempts) for connection in connections)


async def both_have_it(pair: Cluster) -> asyncio.Task[None]:
    """Sends a request, and waits until both roles have it. No prefill has a step."""
    for worker in pair.prefills:
        worker.steps = asyncio.Semaphore(0)
    request = asyncio.create_task(answered_whole(pair))
    await pair.until(
        lambda: any(w.submitted for w in pair.prefills) and any(w.submitted for w in pair.decodes)
    )
    return request


# ---------------------------------------------------------------- late, repeated and wrong messages


@pytest.mark.parametrize("which", ["duplicate", "late"])
async def test_repeated_and_late_tokens_are_dropped(cluster: Cluster, which: str):
    for worker in cluster.workers:
        setattr(worker, which, True)
    await answered_whole(cluster)


async def test_decode_may_send_the_first_token(cluster: Cluster):
    """If prefill's token comes late, decode's repetition of it is emitted and prefill's is dropped."""
    prefill = cluster.prefills[0]
    prefill.steps = asyncio.Semaphore(0)
    request = asyncio.create_task(answered_whole(cluster))
    await prefill.until(lambda w: w.submitted)
    cluster.lanes.of(prefills(prefill)[0].prefill_id).settle(True)
    await request
    prefill.steps.release()


async def test_decode_may_report_finished_before_prefills_last_token_comes(cluster: Cluster):
    """Decode learns from the KV transfer that prefill's token was the last one. That is no failure."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.steps = asyncio.Semaphore(0)
    decode.fail = (1, pb.FAILURE_CODE_FINISHED)
    stop = [cluster.output_ids[0]]
    request = asyncio.create_task(
        cluster.events("/v1/completions", prompt="Hello", max_tokens=9, stop_token_ids=stop)
    )
    await prefill.until(lambda w: w.submitted)
    heard = cluster.pool.ready(pb.POOL_DECODE)[0]
    await cluster.until(lambda: decodes(decode) != [] and not heard.attempts)
    prefill.steps.release()
    events = await request
    assert [event["choices"][0]["finish_reason"] for event in events] == ["stop"]
    assert (len(prefills(prefill)), len(decodes(decode))) == (1, 1)


async def test_a_decode_that_continues_another_text_is_replaced(cluster: Cluster):
    decode = cluster.decodes[0]
    right, decode.output_ids, decode.steps = decode.output_ids, [7] * 99, asyncio.Semaphore(0)
    async with streaming(cluster) as read:
        await read(1)
        decode.steps.release()  # its repetition of the first token is wrong
        await decode.until(lambda w: w.cancelled)
        decode.output_ids = right
        for _ in right:
            decode.steps.release()
        assert await read() == cluster.output_ids


# ---------------------------------------------------------------- failures of prefill


async def test_prefill_lost_before_its_token(pair: Cluster):
    request = await both_have_it(pair)
    used, other = busy(pair.prefills)
    other.steps = None
    decode, _ = busy(pair.decodes)
    await used.kill()
    await request
    assert len(prefills(other)) == 1
    assert len(decodes(decode)) == 1  # the reservation was kept
    [retarget] = retargets(decode)
    assert retarget.source.prefill_id == prefills(other)[0].prefill_id
    assert not retarget.output_ids


async def test_prefill_lost_between_its_token_and_the_end_of_the_transfer(pair: Cluster):
    for worker in pair.prefills:
        worker.holds_kv = True
    async with streaming(pair) as read:
        await read(1)
        used, other = busy(pair.prefills)
        other.holds_kv = used.holds_kv = False
        pair.lanes.of(prefills(used)[0].prefill_id).settle(False)
        assert await read() == pair.output_ids
    decode, _ = busy(pair.decodes)
    [retarget] = retargets(decode)
    assert list(retarget.output_ids) == pair.output_ids[:1]
    [second] = prefills(other)
    assert list(second.request.output_ids) == pair.output_ids[:1]
    # Decode may have got the KV of the first one after all. Then nothing fetches the second one.
    await other.until(lambda w: second.prefill_id in w.cancelled)


async def test_a_failure_of_the_old_source_does_not_count_against_the_new_one(cluster: Cluster):
    """KV_FAILED names its prefill, because it may cross a Retarget."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.steps = asyncio.Semaphore(0)
    prefill.fail = (1, pb.FAILURE_CODE_DROPPED)  # the fake then fails the transfer as well
    request = asyncio.create_task(answered_whole(cluster))
    await decode.until(lambda w: retargets(w))
    prefill.steps.release()
    await request
    assert len(prefills(prefill)) == 2
    assert len(retargets(decode)) == 1


async def test_each_kv_that_does_not_come_counts_also_without_retargets(cluster: Cluster):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.steps, decode.retargets = asyncio.Semaphore(0), False
    request = asyncio.create_task(cluster.post("/v1/completions", prompt="Hello"))
    for count in range(1, MAX_FAILURES + 1):
        await prefill.until(lambda w: len(prefills(w)) == count)  # noqa: B023
        cluster.lanes.of(prefills(prefill)[-1].prefill_id).settle(False)
    status, _ = await request
    assert status == 500
    assert len(prefills(prefill)) == MAX_FAILURES


# ---------------------------------------------------------------- failures of decode


async def test_decode_lost_before_it_had_the_kv_needs_no_second_prefill(pair: Cluster):
    request = await both_have_it(pair)
    killed, other = busy(pair.decodes)
    await killed.kill()
    await other.until(lambda w: decodes(w))
    prefill, _ = busy(pair.prefills)
    assert prefill.steps is not None
    prefill.steps.release()
    await request
    assert sum(len(prefills(w)) for w in pair.prefills) == 1
    assert decodes(other)[0].source.prefill_id == prefills(prefill)[0].prefill_id


@pytest.mark.parametrize("tokens", [1, 2, 7])
async def test_decode_lost_after_some_tokens(pair: Cluster, tokens: int):
    """Prompt and output are prefilled again, after the new reservation.

    The first prefill is cancelled: its KV is still held if decode died before its acknowledgement left.
    """
    for worker in pair.decodes:
        worker.steps = asyncio.Semaphore(tokens)
    async with streaming(pair) as read:
        await read(tokens)
        # After decode has joined, no prefill is open.
        await pair.until(lambda: waiting_prefills(pair) == 0)
        killed, other = busy(pair.decodes)
        prefill, _ = busy(pair.prefills)
        other.steps = None
        await killed.kill()
        assert await read() == pair.output_ids
    assert prefills(prefill)[0].prefill_id in prefill.cancelled
    again = [p for w in pair.prefills for p in prefills(w)][-1]
    assert list(again.request.output_ids) == pair.output_ids[:tokens]
    [decode] = decodes(other)
    assert list(decode.request.output_ids) == pair.output_ids[:tokens]


async def test_a_defect_of_a_plan_ends_its_request_alone(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found when a worker is lost, by code that tells all requests of the worker."""

    def defect(*_: Any) -> None:
        raise ZeroDivisionError

    for worker in pair.decodes:
        worker.steps = asyncio.Semaphore(3)
    both = [asyncio.create_task(pair.events("/v1/completions", **BODY)) for _ in range(2)]
    await pair.until(lambda: sum(len(decodes(w)) for w in pair.decodes) == 2)
    with monkeypatch.context() as patch:
        patch.setattr("baton.router.policy.desk.plan", defect)
        for worker in pair.decodes:
            await worker.kill()
        for events in await asyncio.gather(*both):
            assert "a defect in the router: ZeroDivisionError" in events[-1]["error"]["message"]
    failures = (await pair.get("/status"))["router"]["failures"]
    remedies = [failure["remedy"] for failure in failures if "defect" in failure["message"]]
    assert remedies == 2 * [ApiError.remedy], "its log has the stack"


async def test_a_defect_as_a_stream_returns_ends_its_request(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes
    decode.steps, prefill.steps = asyncio.Semaphore(3), asyncio.Semaphore(2)
    request = asyncio.create_task(cluster.events("/v1/completions", **BODY))
    await cluster.until(lambda: bool(decodes(decode)))
    await decode.kill()
    await cluster.until(lambda: bool(cluster.router.services.parked.away))
    monkeypatch.setattr("baton.router.policy.desk.plan", lambda *_: 1 // 0)
    await decode.start(int(decode.address.rpartition(":")[2]))
    assert "a defect in the router: ZeroDivisionError" in (await request)[-1]["error"]["message"]


async def test_a_handed_back_request_continues_elsewhere_without_a_failure(pair: Cluster):
    for worker in pair.decodes:
        worker.fail = (2, pb.FAILURE_CODE_HANDED_BACK)
    await answered_whole(pair)


# ---------------------------------------------------------------- capacity


async def test_a_refused_reservation_goes_to_another_worker(pair: Cluster):
    for worker in pair.decodes:
        worker.no_room = 1
    request = asyncio.create_task(answered_whole(pair))
    await pair.until(lambda: all(decodes(w) for w in pair.decodes))
    await pair.until(lambda: pair.router.services.admission.waiting_for_decode == 1)
    # Both workers refused. The request waits for a report, while its prefill is held.
    pair.decodes[0].report()
    await request
    assert sum(len(prefills(w)) for w in pair.prefills) == 1


async def test_a_dropped_prefill_is_repeated_only_with_decode_capacity(cluster: Cluster):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    decode.no_room = 1
    request = asyncio.create_task(answered_whole(cluster))
    await cluster.until(lambda: cluster.router.services.admission.waiting_for_decode == 1)
    [first] = prefills(prefill)
    prefill.drop(first.prefill_id)
    connection = cluster.connection(prefill)
    await cluster.until(lambda: not connection.attempts)
    assert len(prefills(prefill)) == 1
    decode.report()
    await request
    assert [list(p.request.output_ids) for p in prefills(prefill)] == [[], cluster.output_ids[:1]]


async def test_a_request_for_two_tokens_waits_for_a_full_decode_pool(cluster: Cluster):
    """One token is left and the prefill is held: the request still waits for decode."""
    cluster.decodes[0].no_room = 1
    request = asyncio.create_task(cluster.complete(max_tokens=2))
    await cluster.until(lambda: cluster.router.services.admission.waiting_for_decode == 1)
    cluster.decodes[0].report()
    result = await request
    assert result["choices"][0]["text"] == "The capital"


# ---------------------------------------------------------------- giving up


async def test_three_attempts_without_a_token_fail_and_name_the_request(pair: Cluster):
    for worker in pair.prefills:
        worker.fail = (9, pb.FAILURE_CODE_ENGINE)
    status, result = await pair.post("/v1/completions", {"x-request-id": "r-42"}, prompt="x")
    assert status == 500
    assert "r-42" in result["error"]["message"]
    assert sum(len(prefills(w)) for w in pair.prefills) == 3
    assert all(prefills(w) for w in pair.prefills)  # the second attempt went to the other worker


async def test_a_request_that_workers_reject_as_invalid_is_the_clients_error(cluster: Cluster):
    cluster.prefills[0].fail = (9, pb.FAILURE_CODE_INVALID)
    status, result = await cluster.post("/v1/completions", prompt="x")
    assert status == 400
    assert "fails on purpose" in result["error"]["message"]


SCHEMA = {"type": "json_schema", "schema": {}}
TURN = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("completions", {"prompt": "x"}, "the workers rejected request"),
        (
            "completions",
            {"prompt": "x", "structured_outputs": {"regex": "a"}},
            "structured_outputs.regex: too",
        ),
        ("messages", {**TURN, "output_config": {"format": SCHEMA}}, "output_config.format: too"),
    ],
)
async def test_the_error_of_a_grammar_that_only_workers_reject_names_its_field(
    cluster: Cluster, path: str, body: dict[str, Any], said: str
):
    cluster.prefills[0].fail = (9, pb.FAILURE_CODE_INVALID)
    cluster.prefills[0].failure = "structured output: too much to compile"
    status, result = await cluster.post(f"/v1/{path}", **body)
    assert status == 400
    assert result["error"]["message"].startswith(said)


# ---------------------------------------------------------------- no worker


async def test_without_a_worker_requests_wait_for_one(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, overflow=False) as cluster:
        decode = cluster.decodes[0]
        port = int(decode.address.rpartition(":")[2])
        await decode.kill()
        await cluster.until(lambda: not cluster.pool.complete)
        await cluster.get("/ready", 503)
        request = asyncio.create_task(answered_whole(cluster))
        await cluster.until(lambda: len(cluster.router.services.parked.without_worker) == 1)
        await decode.start(port)
        await request


@pytest.mark.parametrize("tokens", [None, 0, 1, 7], ids=["before", "reserved", "joined", "decoding"])
async def test_without_decode_workers_prefill_workers_decode(cluster: Cluster, tokens: int | None):
    [prefill], [decode] = cluster.prefills, cluster.decodes
    request = None
    if tokens is not None:
        decode.steps = steps = asyncio.Semaphore(tokens)
        request = asyncio.create_task(answered_whole(cluster))
        await cluster.until(lambda: bool(decodes(decode)) and steps.locked())
        await cluster.heard(prefills(prefill)[0].prefill_id)
        decoding = [each for worker in cluster.pool.connections for each in worker.attempts.values()]
        await cluster.until(lambda: not tokens or any(getattr(each, "joined", False) for each in decoding))
    await decode.kill()
    await (answered_whole(cluster) if request is None else request)
    [submit] = decodes(prefill)
    assert submit.HasField("source") is (tokens == 0), "it goes on with the KV that it holds"


async def test_without_decode_workers_requests_wait_for_a_seat_of_a_prefill_worker(cluster: Cluster):
    [prefill], [decode] = cluster.prefills, cluster.decodes
    await cluster.full(prefill)
    await decode.kill()
    await cluster.until(lambda: not cluster.pool.desk.decodes)
    request = asyncio.create_task(answered_whole(cluster))
    await cluster.until(lambda: len(cluster.router.services.admission.queue) == 1)
    await cluster.rooms({prefill: 512})
    await request
    assert len(decodes(prefill)) == 1


async def test_without_any_worker_a_request_gets_503(tokenizer: ModelTokenizer, tmp_path: Path):
    async with make_cluster(tokenizer, tmp_path, decode=0, worker_wait=0.3) as cluster:
        async with cluster.http.post(cluster.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert "no decode worker" in (await response.json())["error"]["message"]
        result = await cluster.complete(max_tokens=1)  # needs no decode worker
        assert result["choices"][0]["text"] == "The"


async def test_a_parked_stream_gets_keepalives_and_then_the_error(
    tokenizer: ModelTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("baton.router.endpoints.http_writer.KEEPALIVE_SECONDS", 0.1)
    async with make_cluster(tokenizer, tmp_path, prefill=0, overflow=False) as cluster:
        body = {"prompt": "x", "stream": True}
        async with cluster.http.post(cluster.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            assert (await response.content.readuntil(b"\n\n")).startswith(b": ")
            await cluster.expire("worker")
            events = (await response.read()).split(b"\n\n")
        assert json.loads(events[-3].removeprefix(b"data: "))["error"]["code"] == "no_worker"
        assert events[-2] == b"data: [DONE]"


async def test_a_stream_whose_first_token_comes_needs_no_other_prefill_worker(
    tokenizer: ModelTokenizer, tmp_path: Path
):
    """The only prefill worker is lost after its KV was fetched, and before a token came."""
    async with make_cluster(tokenizer, tmp_path, overflow=False) as cluster:
        [prefill], [decode] = cluster.prefills, cluster.decodes
        prefill.steps, decode.steps = asyncio.Semaphore(0), asyncio.Semaphore(0)
        request = asyncio.create_task(answered_whole(cluster))
        await cluster.until(lambda: bool(prefills(prefill)) and bool(decodes(decode)))
        cluster.lanes.of(prefills(prefill)[0].prefill_id).settle(True)
        await cluster.until(lambda: bool(decode.steps and decode.steps._waiters))
        await prefill.kill()
        parked = cluster.router.services.parked
        await cluster.until(lambda: bool(parked.without_worker))
        decode.steps.release()
        await cluster.until(lambda: not parked.without_worker)
        await cluster.expire("worker")  # no timer runs any more
        for _ in cluster.output_ids:
            decode.steps.release()
        await request


async def test_a_worker_with_draining_status_gets_no_requests(pair: Cluster):
    draining = pair.decodes[0]
    draining.status.health = pb.WorkerStatus.HEALTH_DRAINING
    draining.report()
    await pair.until(lambda: len(pair.pool.ready(pb.POOL_DECODE)) == 1)
    for _ in range(5):
        await answered_whole(pair)
    assert not draining.submitted


async def test_a_worker_that_drained_and_ended_is_no_wrong_address(pair: Cluster):
    leaving = pair.decodes[0]
    connection = pair.connection(leaving)
    leaving.status.health = pb.WorkerStatus.HEALTH_DRAINING
    leaving.report()
    await pair.until(lambda: connection.state == "draining")
    port = int(leaving.address.rpartition(":")[2])
    await leaving.kill()
    await pair.until(lambda: connection.reason == "the worker drained and ended")
    assert "take its address off" in connection.remedy
    leaving.status.health = pb.WorkerStatus.HEALTH_SERVING
    await leaving.start(port)
    await pair.until(lambda: connection.ready)
    await leaving.kill()
    await pair.until(lambda: "nothing listens" in connection.reason)


async def test_a_worker_that_refuses_because_it_drains_gets_no_requests(pair: Cluster):
    for worker in pair.decodes:
        worker.fail = (1, pb.FAILURE_CODE_DRAINING)
    pair.decodes[1].fail = (0, pb.FAILURE_CODE_DRAINING)
    for _ in range(8):
        await answered_whole(pair)
    assert len(decodes(pair.decodes[0])) <= 1


# ---------------------------------------------------------------- workers that compute other bits


@pytest.mark.all
async def test_a_request_goes_on_with_workers_of_the_same_numerics(
    tokenizer: ModelTokenizer, tmp_path: Path
) -> None:
    """As long as there is one. Then it goes on with any, and the usage says so."""
    async with make_cluster(tokenizer, tmp_path, prefill=1, decode=5) as cluster:
        for worker in cluster.workers:
            worker.numerics = "other" if worker.index > 1 else "first"
            await worker.kill()

        async def start(numerics: str) -> None:
            for worker in cluster.workers:
                if worker.numerics == numerics:
                    await worker.start(int(worker.address.rpartition(":")[2]))
                    await cluster.until(lambda w=worker: w.attached)

        await start("first")
        for worker in cluster.decodes:
            worker.steps = asyncio.Semaphore(3) if worker.numerics == "first" else None
        body = {**BODY, "stream_options": {"include_usage": True}}
        async with cluster.http.post(cluster.url + "/v1/completions", json=body) as response:
            used: list[FakeWorker] = []
            for _ in range(3):
                await cluster.until(lambda: any(decodes(w) for w in cluster.decodes if w not in used))
                used.append(next(w for w in cluster.decodes if decodes(w) and w not in used))
                if len(used) == 1:
                    await start("other")
                if used[-1].steps is not None:
                    await used[-1].kill()
            lines = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
        assert [worker.numerics for worker in used] == ["first", "first", "other"]
        assert lines[-1]["usage"]["numerics_changed"] is True
        tokens = [token for line in lines for choice in line["choices"] for token in choice["token_ids"]]
        assert tokens == cluster.output_ids
