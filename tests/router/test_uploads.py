"""Uploads of files: their forms, and clients that leave."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton.router.admission.keys import api_keys
from baton.router.batches.storage import Storage
from baton.router.text.tokenizer import ModelTokenizer
from tests.within import WITHIN, within

from .conftest import Cluster, make_cluster


@pytest.fixture
async def cluster(tokenizer: ModelTokenizer, tmp_path: Path) -> AsyncIterator[Cluster]:
    keys = api_keys(["first", "second"], None)
    async with make_cluster(tokenizer, tmp_path, batch_dir=str(tmp_path / "kept"), api_keys=keys) as cluster:
        yield cluster


async def test_an_upload_that_its_client_leaves_is_not_kept(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The client leaves while the description is written."""
    entered, go, forgotten = asyncio.Event(), threading.Event(), asyncio.Event()
    loop, put, call = asyncio.get_running_loop(), Storage.put, Storage.call

    def slow_put(*arguments: Any) -> None:
        loop.call_soon_threadsafe(entered.set)
        assert go.wait(WITHIN)
        put(*arguments)

    async def noted_call(self: Storage, owner: str, function: Callable[..., Any], *arguments: Any) -> Any:
        calling = call(self, owner, function, *arguments)
        if function == self.forget:
            loop.call_soon(forgotten.set)
        return await calling

    monkeypatch.setattr(Storage, "put", slow_put)
    monkeypatch.setattr(Storage, "call", noted_call)
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"{}", filename="f")
    key = {"Authorization": "Bearer first"}
    uploading = asyncio.ensure_future(cluster.http.post(f"{cluster.url}/v1/files", data=form, headers=key))
    await within(entered.wait())
    uploading.cancel()
    await within(forgotten.wait())
    go.set()
    async with cluster.http.get(f"{cluster.url}/v1/files", headers=key) as response:
        assert (await response.json())["data"] == []
    assert not list((tmp_path / "kept").rglob("file-*"))


async def test_uploads_are_checked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url, key = f"{cluster.url}/v1/files", {"Authorization": "Bearer first"}
    monkeypatch.setattr("baton.router.endpoints.http_batches.MAX_FILE_BYTES", 8)

    async def upload(headers: dict[str, str] = key, **fields: Any) -> tuple[int, str]:
        form = aiohttp.FormData()
        for name, value in fields.items():
            form.add_field(name, value, filename="f" if name == "file" else None)
        async with cluster.http.post(url, data=form, headers=headers) as response:
            return response.status, json.dumps(await response.json())

    status, told = await upload(purpose="batch", file=b"123456789")
    assert (status, "at most 8 bytes" in told) == (413, True)
    status, told = await upload(purpose="vision", file=b"1")
    assert (status, "purpose: input should be 'batch'" in told) == (400, True)
    assert (await upload(purpose="batch"))[0] == 415, "without a file it is another form"
    assert (await upload(key | {"Origin": "http://elsewhere"}, purpose="batch", file=b"1"))[0] == 400
    async with cluster.http.post(
        url, data=b"x", headers=key | {"Content-Type": "multipart/form-data"}
    ) as cut:
        assert cut.status == 400
    async with cluster.http.post(url, json={}, headers=key) as other:
        assert other.status == 415
    packed = {"Content-Type": "multipart/form-data; boundary=x", "Content-Encoding": "gzip"}
    async with cluster.http.post(url, data=b"x", headers=key | packed) as other:
        assert (other.status, "Content-Encoding" in await other.text()) == (415, True)
    assert [path.name for path in (tmp_path / "kept").rglob("*.*")] == [], "nothing of them is kept"


async def test_a_form_that_cannot_be_read_is_the_clients_error(cluster: Cluster) -> None:
    headers = {"Authorization": "Bearer first", "Content-Type": "multipart/form-data; boundary=x"}
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n'
    purpose = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    for form in (
        b"--x\r\nno header\r\n\r\n1\r\n--x--\r\n",
        b"--x\r\n" + b"a: b\r\n" * 200 + b"\r\n1\r\n--x--\r\n",
        b"--x\r\na: " + b"b" * 9000 + b"\r\n\r\n1\r\n--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\n' + b"u" * 40 + b"\r\n--x--\r\n",
        b'--x\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\n\xff\r\n--x--\r\n',
        b"--x\r\nContent-Type: multipart/mixed\r\n\r\n1\r\n--x--\r\n",
        part + b"Content-Encoding: br\r\n\r\n1\r\n--x--\r\n",
        part + b"Content-Transfer-Encoding: secret\r\n\r\n1\r\n--x--\r\n",
        part + b"Content-Transfer-Encoding: base64\r\n\r\n1\r\n--x--\r\n",
        part + b"Content-Length: 100\r\n\r\n1\r\n--x--\r\n",
        part
        + b"\r\n1\r\n"
        + purpose
        + b'--x\r\nContent-Disposition: form-data; name="b"\r\n\r\n'
        + b"b" * 1025
        + b"\r\n--x--\r\n",
        part + b"\r\n1\r\n--y--\r\n",
        part + b"\r\n1\r\n--x",
        part,
    ):
        async with cluster.http.post(f"{cluster.url}/v1/files", data=form, headers=headers) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"]) == (400, "invalid_request_error"), form


async def test_the_fields_of_a_form_may_come_in_pieces(cluster: Cluster) -> None:
    fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "86400"}
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{}\r\n'
    for name, value in fields.items():
        form += b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\n' % name.encode()
        form += value.encode() + b"\r\n"

    async def bytewise() -> AsyncIterator[bytes]:
        for byte in form + b"--x--\r\n":
            yield bytes([byte])
            for _ in range(30):  # in which the router reads it, or else it comes with the next one
                await asyncio.sleep(0)

    headers = {"Authorization": "Bearer first", "Content-Type": "multipart/form-data; boundary=x"}
    async with cluster.http.post(f"{cluster.url}/v1/files", data=bytewise(), headers=headers) as response:
        file = await response.json()
        assert (response.status, file.get("expires_at", 0) - file.get("created_at", 0)) == (200, 86400), file
