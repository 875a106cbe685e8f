"""Images that requests name by URL: fetched from allowed hosts at public addresses, within limits."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton.router.config import host_of
from baton.router.errors import InvalidRequest, Overloaded, Unsupported
from baton.router.preparation import images, media
from baton.router.preparation.media import MediaFetcher, is_public
from baton.router.text.tokenizer import load_tokenizer
from tests.engine.conftest import save_seeing_tokenizer, save_tiny
from tests.within import WITHIN, eventually, within

from .conftest import make_cluster
from .test_images import chat, file_of, picture, url_of

FILE = bytes(range(256)) * 1000


@dataclass
class Host:
    """A server of files on 127.0.0.1."""

    port: int = 0
    asked: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    file: bytes = FILE
    location: str = ""
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def url(self, path: str, name: str = "127.0.0.1") -> str:
        return f"http://{name}:{self.port}/{path}"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(path := request.path[1:])
        self.headers.append(dict(request.headers))
        match path:
            case "away":
                raise web.HTTPFound(self.location)
            case "loop":
                raise web.HTTPTemporaryRedirect("/loop")
            case "near":
                raise web.HTTPMovedPermanently("file")
            case "missing":
                raise web.HTTPNotFound
            case "packed":
                return web.Response(body=b"", headers={"Content-Encoding": "gzip"})
            case "never":
                await asyncio.sleep(WITHIN)
            case "chunked":
                response = web.StreamResponse()
                await response.prepare(request)
                with contextlib.suppress(ConnectionError):
                    while True:
                        await response.write(self.file)
                return response
        if path.startswith("gate/"):
            await self.gate.wait()
        return web.Response(body=self.file)


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    made = Host()
    app = web.Application()
    app.router.add_get("/{path:.*}", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.port = runner.addresses[0][1]
    yield made
    await runner.cleanup()


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1, and no other address, counts as public."""
    monkeypatch.setattr(media, "is_public", lambda address: address == "127.0.0.1")


async def fetch(*urls: str, domains: tuple[str, ...] = ("127.0.0.1",), **limits: Any) -> dict[str, bytes]:
    limits = {"most_bytes": 1 << 20, "seconds": WITHIN, "receive": lambda size: None, **limits}
    receive = limits.pop("receive")
    fetcher = MediaFetcher(domains, **limits)
    try:
        return await within(fetcher.fetch("key", urls, receive))
    finally:
        await fetcher.close()


@pytest.mark.usefixtures("loopback")
async def test_files_come_from_allowed_hosts(host: Host) -> None:
    received: list[int] = []
    urls = host.url("file"), host.url("near"), host.url("other")
    files = await fetch(*urls, receive=received.append)
    assert files == dict.fromkeys(urls, FILE)
    assert sum(received) == 3 * len(FILE)
    assert all(each["Accept-Encoding"] == "identity" for each in host.headers)
    assert not any({"Cookie", "Authorization"} & each.keys() for each in host.headers)


@pytest.mark.parametrize(
    ("path", "limits", "error"),
    [
        ("missing", {}, "was answered with the status 404"),
        ("packed", {}, "with a Content-Encoding"),
        ("loop", {}, "leads to more than 3 redirects"),
        ("file", {"most_bytes": len(FILE) - 1}, "have more than 255999 bytes (--advanced.max-body-size)"),
        ("chunked", {}, "have more than 1048576 bytes"),
        ("never", {"seconds": 0.05}, "did not come within 0.05 s"),
    ],
)
@pytest.mark.usefixtures("loopback")
async def test_limits(path: str, limits: dict[str, Any], error: str, host: Host) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(error)) as refused:
        await fetch(host.url(path), **limits)
    assert refused.value.status == 400
    assert repr(host.url(path)) in refused.value.message


@pytest.mark.usefixtures("loopback")
async def test_all_files_of_a_request_share_a_limit(host: Host) -> None:
    most = 2 * len(FILE)
    assert len(await fetch(host.url("a"), host.url("b"), most_bytes=most)) == 2
    with pytest.raises(InvalidRequest, match="more than"):
        await fetch(host.url("a"), host.url("b"), host.url("c"), most_bytes=most)

    def full(size: int) -> None:
        raise Overloaded("no room")

    with pytest.raises(Overloaded):
        await fetch(host.url("a"), receive=full)


@pytest.mark.usefixtures("loopback")
async def test_a_slow_host_holds_up_the_files_of_one_key_only(host: Host) -> None:
    """Requests of one key wait at a host for more files than it may have connections."""
    fetcher = MediaFetcher(("127.0.0.1",), 1 << 24, WITHIN)
    slow = [host.url(f"gate/{number}") for number in range(2 * media.MOST_OF_HOST)]
    held_up = asyncio.create_task(fetcher.fetch("a", slow, lambda size: None))
    await eventually(lambda: len(host.asked) >= media.MOST_OF_HOST // 2)
    quick = host.url("file")
    assert await within(fetcher.fetch("b", [quick], lambda size: None)) == {quick: FILE}
    assert len(host.asked) <= media.MOST_OF_HOST + 1
    assert not held_up.done()
    host.gate.set()
    assert len(await within(held_up)) == len(slow)
    await fetcher.close()


@pytest.mark.parametrize("location", ["http://other.example/", "//other.example/", "http://[::1]:9/"])
@pytest.mark.usefixtures("loopback")
async def test_a_redirect_leads_to_no_other_host(location: str, host: Host) -> None:
    host.location = location
    with pytest.raises(Unsupported, match="is not one of --allowed-media-domains"):
        await fetch(host.url("away"))


@pytest.mark.parametrize("location", ["ftp://127.0.0.1/", "file:///etc/passwd", "data:,a", "http://[", ""])
@pytest.mark.usefixtures("loopback")
async def test_a_redirect_leads_to_a_url(location: str, host: Host) -> None:
    host.location = location
    with pytest.raises(InvalidRequest):
        await fetch(host.url("away"))
    assert set(host.asked) == {"away"}


@pytest.mark.usefixtures("loopback")
async def test_a_redirect_leads_to_no_private_address(host: Host) -> None:
    host.location = f"http://localhost:{host.port}/file"
    assert await fetch(host.url("away"), domains=("127.0.0.1", "LOCALHOST"))
    host.location = "http://[::1]:9/file"
    with pytest.raises(InvalidRequest, match="its host has no public address"):
        await fetch(host.url("away"), domains=("127.0.0.1", "::1"))


@pytest.mark.parametrize(
    "name", ["127.0.0.1", "localhost", "images.example", "127.1", "0x7f000001", "2130706433"]
)
async def test_a_private_address_is_never_asked(
    name: str, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the name was, and whatever DNS says of it."""
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest, **how: look_up("127.0.0.1", *rest, **how))
    with pytest.raises(InvalidRequest, match=r"no public address|not a canonical IPv4 address"):
        await fetch(host.url("file", name), domains=(name,))
    assert not host.asked


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1@evil.example/",
        "http://evil.example/127.0.0.1",
        "http://127.0.0.1.evil.example/",
        "https:a",
    ],
)
async def test_other_hosts_are_not_asked(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"allowed-media-domains|a user or a password|not lead to a URL"):
        await fetch(url)
    with pytest.raises(InvalidRequest):
        await fetch(url, domains=())


@pytest.mark.parametrize("name", ["user@127.0.0.1", ":password@127.0.0.1"])
@pytest.mark.usefixtures("loopback")
async def test_no_host_is_sent_a_user_or_a_password(name: str, host: Host) -> None:
    host.location = host.url("file", name)
    for path, of in (("file", name), ("away", "127.0.0.1")):
        with pytest.raises(InvalidRequest, match="has a user or a password"):
            await fetch(host.url(path, of))
    assert host.asked == ["away"]


PRIVATE = """127.0.0.1 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1
255.255.255.255
:: ::1 fe80::1%eth0 fd00::1 ff0e::1 ::ffff:10.0.0.1 64:ff9b::a00:1 2002:7f00:1::1"""


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808", *PRIVATE.split()])
def test_which_addresses_are_public(address: str) -> None:
    assert is_public(address) is (address not in PRIVATE)


def test_hosts_are_names_or_addresses() -> None:
    assert [host_of(each) for each in ("A.Example", "10.0.0.1", "bücher.example")] == [
        "a.example", "10.0.0.1", "xn--bcher-kva.example",
    ]  # fmt: skip
    for wrong in ("", "*.a.example", "http://a.example", "a.example:80", "a/b", "a@b"):
        with pytest.raises(ValueError, match="--allowed-media-domains must be hosts"):
            host_of(wrong)


@pytest.fixture
def seeing(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "vl"
    save_tiny(path, "Qwen3VL")
    save_seeing_tokenizer(path)
    yield path
    images._kept.clear()


@pytest.mark.all
@pytest.mark.usefixtures("loopback")
async def test_a_worker_gets_the_pixels_of_a_url(host: Host, seeing: Path, tmp_path: Path) -> None:
    host.file = file_of(picture())
    tokenizer = load_tokenizer(str(seeing))
    async with make_cluster(tokenizer, tmp_path, text="ab", allowed_media_domains=("127.0.0.1",)) as cluster:
        asked = {"max_tokens": 3}
        for url in (host.url("file"), url_of(host.file)):
            status, answer = await cluster.post("/v1/chat/completions", **asked, **chat(url))
            assert status == 200, answer
            assert answer["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"image": 12}
        first, second = (each.prefill.request for each in cluster.prefills[0].submitted)
        assert first.images == second.images
        one, other = cluster.prefills[0].pixels
        assert one == other
        assert len(one) == 24 * 32 * 3
        block = {"type": "image", "source": {"type": "url", "url": host.url("file")}}
        message = {"role": "user", "content": [block]}
        status, counted = await cluster.post("/v1/messages/count_tokens", model="fake", messages=[message])
        assert (status, counted["input_tokens"]) == (200, 12)
        missing = host.url("missing")
        item = {"role": "user", "content": [{"type": "input_image", "image_url": missing}]}
        for path, body, field in (
            ("/v1/chat/completions", chat(missing), "messages"),
            ("/v1/responses", {"model": "fake", "input": [item]}, "input"),
        ):
            status, answer = await cluster.post(path, **body)
            assert (status, answer["error"]["param"]) == (400, field)
            assert answer["error"]["message"].startswith(
                f"{field}: '{missing}' was answered with the status 404"
            )
        assert cluster.router.services.admission.body_bytes == 0
