"""Files and batches with OpenAI's client, a real router and fake workers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.router.admission.keys import api_keys
from baton.router.batches import disk, runner, storage
from baton.router.batches.objects import MAX_SECONDS, BatchObject, new_id, result_id
from baton.router.batches.storage import Storage
from baton.router.errors import BodyTooLarge
from baton.router.text.tokenizer import ModelTokenizer
from tests.within import WITHIN, within

from .conftest import TEXT, Cluster, make_cluster
from .fragile_disk import Disk

BODY = {"model": "fake", "prompt": "Hello", "max_tokens": 200}
LINE = {"method": "POST", "url": "/v1/completions", "body": BODY}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return "\n".join(map(json.dumps, lines)).encode()


ClientOf = Callable[..., openai.AsyncOpenAI]


@pytest.fixture
async def client_of() -> AsyncIterator[ClientOf]:
    """Clients that nothing closes would end in the loop of some later test, with errors in its log."""
    async with AsyncExitStack() as stack:

        def made(cluster: Cluster, key: str = "none") -> openai.AsyncOpenAI:
            url = cluster.url + "/v1"
            client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=WITHIN)
            stack.push_async_callback(client.close)
            return client

        yield made


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    async def wait() -> Any:
        over = "completed", "failed", "cancelled"
        while (batch := await client.batches.retrieve(id)).status not in over:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # clients of this API ask again
        return batch

    return await within(wait())


async def batch_of(client: openai.AsyncOpenAI, *lines: dict[str, Any]) -> Any:
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}
    )


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    keys = api_keys(["first", "second"], None)
    async with make_cluster(tokenizer, tmp_path, batch_dir=str(tmp_path / "kept"), api_keys=keys) as cluster:
        yield cluster


async def test_a_batch_and_its_files(cluster: Cluster, client_of: ClientOf) -> None:
    client = client_of(cluster, "first")
    lines = [LINE | {"custom_id": f"r{n}"} for n in range(5)]
    lines.append(LINE | {"custom_id": "bad", "body": BODY | {"max_tokens": -1}})
    lines.append(LINE | {"custom_id": "mine", "body": BODY | {"priority": 3, "stream": True}})
    made = await batch_of(client, *lines)
    batch = await ended(client, made.id)
    assert (batch.status, batch.metadata) == ("completed", {"a": "b"}), batch
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (7, 6, 1)
    output = (await client.files.content(batch.output_file_id)).text
    found = {line["custom_id"]: line for line in map(json.loads, output.splitlines())}
    assert found.keys() == {"mine", *(f"r{n}" for n in range(5))}
    assert found["r3"]["response"]["body"]["choices"][0]["text"] == TEXT
    (error,) = map(json.loads, (await client.files.content(batch.error_file_id)).text.splitlines())
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    asked = [each.prefill.request.priority for each in cluster.prefills[0].submitted]
    assert sorted(asked) == [3, *[runner.PRIORITY] * 5], "behind clients, unless the request says so"
    files = [each.id async for each in client.files.list()]
    assert files[2:] == [batch.input_file_id]
    assert [each.id async for each in client.batches.list()] == [batch.id]
    for id in files:
        await client.files.delete(id)
    assert not [each async for each in client.files.list()]
    with pytest.raises(openai.NotFoundError):
        await client.files.content(batch.output_file_id)


async def test_files_belong_to_the_key_that_made_them(cluster: Cluster, client_of: ClientOf) -> None:
    mine, other = client_of(cluster, "first"), client_of(cluster, "second")
    batch = await ended(mine, (await batch_of(mine, LINE | {"custom_id": "a"})).id)
    assert not [each async for each in other.files.list()]
    for ask in (
        other.files.retrieve(batch.input_file_id), other.files.content(batch.output_file_id),
        other.files.delete(batch.input_file_id), other.batches.retrieve(batch.id),
        other.batches.cancel(batch.id),
        other.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            await ask
    with pytest.raises(openai.AuthenticationError):
        await client_of(cluster).files.retrieve(batch.input_file_id)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (b"x", "line 1: give custom_id"),
        (jsonl(LINE), "line 1: custom_id: must be there"),
        (jsonl(*[LINE | {"custom_id": "a"}] * 2), "line 2: custom_id: 'a' has come before"),
        (
            b"\n" + jsonl(LINE | {"custom_id": "a", "url": "/v1/chat/completions"}),
            "line 2: url: must be /v1/com",
        ),
        (jsonl(LINE | {"custom_id": "a", "body": []}), "line 1: body: must be an object"),
        (jsonl(LINE | {"custom_id": "a", "body": {"prompt": "x" * 9000}}), "line 1: a line has at most"),
        (b"\n\n", "line 1: the file has no request"),
        (b"\n" * 100_000, "line 50001: the file of a batch has at most 50000 lines, blank ones included"),
        (jsonl(LINE | {"custom_id": "a"}) + b"\n" * 50_001, "line 50001: the file of a batch has at most"),
        (b'{"url": "/v1", "body": ' + b"[" * 5000, "line 1: give custom_id"),
    ],
)
def test_lines_are_checked(tmp_path: Path, lines: bytes, told: str) -> None:
    path = tmp_path / "lines"
    path.write_bytes(lines)
    with pytest.raises(runner.InvalidFile) as caught:
        list(runner.check(path, "/v1/completions", 8000))
    (error, *_) = caught.value.errors
    assert f"line {error['line']}: {error['message']}".startswith(told)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint: input should be '/v1/chat/completions'"),
        ({"completion_window": "1h"}, "completion_window: input should be '24h'"),
        ({"input_file_id": 5}, "input_file_id: input should be a valid string"),
        ({"metadata": {"a": "b" * 17000}}, "the body of a batch has at most 16384 bytes"),
    ],
)
async def test_what_asks_for_a_batch_is_checked(cluster: Cluster, changed: dict[str, Any], told: str) -> None:
    body = {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"} | changed
    status, answer = await cluster.post("/v1/batches", {"Authorization": "Bearer first"}, **body)
    assert status in (400, 413)
    assert told in answer["error"]["message"]


async def test_a_batch_of_wrong_lines_fails_and_says_why(cluster: Cluster, client_of: ClientOf) -> None:
    client = client_of(cluster, "first")
    batch = await ended(client, (await batch_of(client, LINE)).id)
    assert batch.status == "failed"
    assert "custom_id: must be there" in batch.errors.data[0].message


async def test_a_router_that_starts_again_goes_on(
    tokenizer: ModelTokenizer, tmp_path: Path, client_of: ClientOf
) -> None:
    """Without workers nothing is answered. The next router sends what has no result, and nothing else."""
    kept = {"batch_dir": str(tmp_path / "kept"), "overflow": False}  # else a decode worker may take a prompt
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode=0, ends_idle=False, **kept) as cluster:
        batch = await batch_of(client_of(cluster), *(LINE | {"custom_id": f"r{n}"} for n in range(3)))
        await cluster.until(lambda: len(cluster.router.services.active) > 0)
    folder = tmp_path / "kept" / "any"
    done = {"custom_id": "r1", "response": {}}
    (folder / f"{result_id(batch.id, 'output')}.jsonl").write_text(
        json.dumps(done) + '\n{"custom_id": "r2", "resp'
    )
    async with make_cluster(tokenizer, tmp_path, **kept) as cluster:
        client = client_of(cluster)
        found = await ended(client, batch.id)
        assert len(cluster.prefills[0].submitted) == 2
        output = (await client.files.content(found.output_file_id)).text.splitlines()
    assert json.loads(output[0]) == done
    assert {json.loads(line)["custom_id"] for line in output} == {"r0", "r1", "r2"}


async def test_a_batch_is_cancelled_and_its_results_stay(
    tokenizer: ModelTokenizer, tmp_path: Path, client_of: ClientOf
) -> None:
    kept = {"batch_dir": str(tmp_path / "kept")}
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode=0, **kept) as cluster:
        client = client_of(cluster)
        batch = await batch_of(client, LINE | {"custom_id": "a"})
        with pytest.raises(openai.BadRequestError, match="reads this file; cancel it first"):
            await client.files.delete(batch.input_file_id)
        await client.batches.cancel(batch.id)
        assert (await ended(client, batch.id)).status == "cancelled"


async def test_a_full_disk_leaves_no_batch_that_nothing_can_end(
    tokenizer: ModelTokenizer, tmp_path: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"batch_dir": str(tmp_path / "kept"), "ends_idle": False}
    async with make_cluster(tokenizer, tmp_path, prefill=0, decode=0, **kept) as cluster:
        client = client_of(cluster)
        first = await batch_of(client, LINE | {"custom_id": "a"})
        second = await batch_of(client, LINE | {"custom_id": "b", "body": BODY | {"max_tokens": -1}})
        await cluster.until(lambda: len(cluster.router.services.active) > 0)
        monkeypatch.setattr(disk, "os", full := Disk(float("inf")))
        full.full = True
        for refused in (
            client.files.create(file=("in.jsonl", b"{}"), purpose="batch"),
            client.batches.create(
                input_file_id=first.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.APIStatusError, match="No space left") as error:
                await refused
            assert error.value.status_code == 413
        await client.batches.cancel(first.id)
        assert (await ended(client, first.id)).status == "cancelled"
        found = await ended(client, second.id)
        assert (found.status, found.output_file_id, found.error_file_id) == ("failed", None, None)
        assert "No space left" in found.errors.data[0].message
        await client.files.delete(first.input_file_id)
        await client.files.delete(second.input_file_id)
        assert not [each async for each in client.files.list()]
        full.full = False
    async with make_cluster(tokenizer, tmp_path, **kept) as cluster:
        client = client_of(cluster)
        assert {each.id: each.status async for each in client.batches.list()} == {
            first.id: "cancelled",
            second.id: "failed",
        }


async def test_files_expire_when_their_client_says(cluster: Cluster, client_of: ClientOf) -> None:
    client, lines = client_of(cluster, "first"), jsonl(LINE | {"custom_id": "a"}, LINE | {"custom_id": "b"})
    hour: Any = {"anchor": "created_at", "seconds": 3600}
    day: Any = {"anchor": "created_at", "seconds": 86400}
    file = await client.files.create(file=("in.jsonl", lines), purpose="batch", expires_after=hour)
    assert file.expires_at == file.created_at + 3600
    batch = await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        output_expires_after=day,
    )
    batch = await ended(client, batch.id)
    output = await client.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 86400
    kept = await client.files.create(file=("in.jsonl", lines), purpose="batch")
    assert kept.expires_at == kept.created_at + 30 * 86400
    cases: tuple[tuple[Any, str], ...] = (
        (hour | {"seconds": 3599}, "expires_after.seconds: input should be greater than or equal to 3600"),
        (hour | {"seconds": 2592001}, "expires_after.seconds: input should be less than or equal to 2592000"),
        (hour | {"seconds": "soon"}, "expires_after.seconds: input should be a valid integer"),
        (hour | {"anchor": "last_active_at"}, "expires_after.anchor: input should be 'created_at'"),
        ({"seconds": 3600}, "expires_after.anchor: field required"),
        ("1h", "expires_after: input should be"),
    )
    for wrong, told in cases:
        with pytest.raises(openai.BadRequestError, match=told):
            await client.files.create(file=("in.jsonl", lines), purpose="batch", expires_after=wrong)
        with pytest.raises(openai.BadRequestError, match=f"output_{told}"):
            await client.batches.create(
                input_file_id=file.id,
                endpoint="/v1/completions",
                completion_window="24h",
                output_expires_after=wrong,
            )


async def test_expired_files_are_removed_although_no_client_asks(
    tokenizer: ModelTokenizer, tmp_path: Path, client_of: ClientOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TIDY_SECONDS", 0.01)
    async with make_cluster(tokenizer, tmp_path, batch_dir=str(tmp_path / "kept")) as cluster:
        file = await client_of(cluster).files.create(file=("in.jsonl", b"{}"), purpose="batch")
        (path,) = (tmp_path / "kept").rglob("*.jsonl")
        expired = file.created_at + MAX_SECONDS + 1
        monkeypatch.setattr(storage, "timestamp", lambda: expired)
        await cluster.until(lambda: not path.exists())


async def test_the_order_of_a_list_is_checked(cluster: Cluster) -> None:
    key = {"Authorization": "Bearer first"}
    for path in ("files", "batches"):
        async with cluster.http.get(f"{cluster.url}/v1/{path}?order=up", headers=key) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "order")


async def test_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Storage(tmp_path / "kept", 10, lambda: 2)
    try:
        await kept.call("", kept.open)
        first = new_id("file")
        kept.append("a", first, b"12345")
        with pytest.raises(BodyTooLarge, match="of this API key have 5 bytes, of 5"):
            kept.append("a", first, b"6")
        kept.append("b", new_id("file"), b"12345")
        kept.forget("a", first)
        kept.append("a", first, b"12345")
        monkeypatch.setattr(storage, "MAX_FILES", 1)
        batch = BatchObject(
            id=new_id("batch"), endpoint="/", input_file_id=first, created_at=0, expires_at=0, status="failed"
        )
        kept.put("a", batch)
        assert kept.all_of("a", BatchObject) == [], "it is older than thirty days"
        with pytest.raises(ValueError, match="another router uses it"):
            Storage(tmp_path / "kept", 10, lambda: 1).open()
    finally:
        kept.close()


async def test_a_router_that_keeps_none_says_so(
    tokenizer: ModelTokenizer, tmp_path: Path, client_of: ClientOf
) -> None:
    async with make_cluster(tokenizer, tmp_path) as cluster:
        with pytest.raises(openai.NotFoundError, match="start it with --batch-dir DIR"):
            await batch_of(client_of(cluster), LINE)


LARGE = {
    "100 MiB of newlines": lambda: b"\n" * (100 << 20),
    "one line of 200 MiB": lambda: b"x" * (200 << 20),
    "50,000 requests of 4 kB": lambda: jsonl(
        *(
            LINE | {"custom_id": f"r{n}", "url": "/v1/other", "body": {"prompt": "x" * 3900}}
            for n in range(18)
        ),
        *(LINE | {"custom_id": f"r{n}", "body": {"prompt": "x" * 3900}} for n in range(18, 50_000)),
    ),
    "12 requests of 16 MB": lambda: jsonl(
        *(
            LINE | {"custom_id": f"r{n}", "url": "/v1/other", "body": {"prompt": [1] * 5_500_000}}
            for n in range(12)
        ),
    ),
}
"""Files whose check takes long. None has a request that can be sent."""


@pytest.mark.long
@pytest.mark.parametrize("name", LARGE)
async def test_the_check_of_a_large_file_lets_other_keys_in(
    cluster: Cluster, client_of: ClientOf, name: str
) -> None:
    """The figure is a bound of a long test: it is for the slowest of all calls that another key made."""
    client, key = client_of(cluster, "first"), {"Authorization": "Bearer second"}
    file = await client.files.create(file=("in.jsonl", LARGE[name]()), purpose="batch")
    loop, slowest, calls = asyncio.get_running_loop(), 0.0, 0
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    found: Any = {"status": "validating"}
    while found["status"] in ("validating", "finalizing"):
        start = loop.time()
        async with cluster.http.get(f"{cluster.url}/v1/files", headers=key) as response:
            assert (await response.json())["data"] == []
        slowest, calls = max(slowest, loop.time() - start), calls + 1
        async with cluster.http.get(
            f"{cluster.url}/v1/batches/{batch.id}", headers={"Authorization": "Bearer first"}
        ) as response:
            found = await response.json()
    print(f"\n{name}: {calls} calls, slowest {slowest:.3f} s, {found['status']}")
    assert found["status"] == "failed", found["errors"]
    assert slowest < 0.3
