"""Hostile files against a real router with its children: each is answered, or refused by a clear message. No
child dies, and memory is bounded."""

import base64
import io
import json
import os
import re
import struct
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import PIL.Image
import psutil
import pytest

from baton.router.text.tokenizer import load_tokenizer
from tests.engine.checkpoints import edit_json
from tests.engine.conftest import save_seeing_tokenizer, save_tiny

from .conftest import Cluster, make_cluster
from .test_images import bomb, chat, file_of, mutated, picture, url_of

BODY = 96 << 20
MEMORY = 1500 << 20
"""Of a child: a body of 67 MB, its file, and an image of 67 million pixels twice."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    path = tmp_path / "vl"
    save_tiny(path, "Qwen3VL")
    save_seeing_tokenizer(path)
    edit_json(path / "preprocessor_config.json", size={"shortest_edge": 64, "longest_edge": 1 << 13})
    tokenizer = load_tokenizer(str(path))
    async with make_cluster(tokenizer, tmp_path, text="ab", max_body_bytes=BODY, max_wait=600.0) as made:
        yield made


def pids(cluster: Cluster) -> set[int]:
    """Of the children that prepare bodies."""
    children = cluster.router.frontend._preparer._children._children
    return {child._process.pid for child in children if child._process is not None}


def most_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


async def answer(cluster: Cluster, file: bytes | str) -> tuple[int, str]:
    body = chat(file if isinstance(file, str) else url_of(file))
    status, found = await cluster.post("/v1/chat/completions", max_tokens=1, **body)
    return status, found["error"]["message"] if status != 200 else ""


@pytest.mark.long
async def test_mutated_files(cluster: Cluster) -> None:
    assert (await answer(cluster, file_of(picture())))[0] == 200
    before, statuses = pids(cluster), []
    for file in mutated(200):
        status, message = await answer(cluster, file)
        assert status == 200 or (status == 400 and message.startswith("messages: image 0 ")), message
        statuses.append(status)
    assert {200, 400} == set(statuses)
    assert pids(cluster) == before, "no child has died"
    assert max(map(most_bytes, before)) < MEMORY


def chunked(width: int, height: int, *chunks: tuple[bytes, bytes], kind: int = 2) -> bytes:
    """A PNG of these chunks."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*each) for each in chunks) + chunk(b"IEND", b"")


def zeros(size: int) -> bytes:
    packed = zlib.compressobj(9)
    return b"".join([*(packed.compress(bytes(1 << 20)) for _ in range(size >> 20)), packed.flush()])


def frames(kind: str, count: int, size: tuple[int, int]) -> bytes:
    first, *rest = (PIL.Image.new("RGB", size, (i, i * 7 % 256, 0)) for i in range(count))
    return file_of(first, kind, save_all=True, append_images=rest)


def turning(file: bytes, value: int) -> bytes:
    """A JPEG with this orientation, which EXIF does not know."""
    exif = PIL.Image.Exif()
    exif[0x0112] = value
    return file_of(PIL.Image.open(io.BytesIO(file)), "JPEG", exif=exif)


def scanned(size: tuple[int, int], scans: int) -> bytes:
    """A progressive JPEG that refines its last values so many times more than it needs to."""
    file = file_of(PIL.Image.new("RGB", size, (9, 99, 200)), "JPEG", progressive=True)
    last = file[file.rfind(b"\xff\xda") : -2]
    return file[:-2] + last * scans + b"\xff\xd9"


def with_sides(file: bytes, marker: bytes, skip: int, sides: bytes) -> bytes:
    """The file with the sides that it claims, `skip` bytes behind a marker."""
    at = file.index(marker) + skip
    return file[:at] + sides + file[at + len(sides) :]


def palette(width: int, height: int) -> bytes:
    """A PNG of one bit a pixel."""
    file = io.BytesIO()
    PIL.Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


HUGE = 1 << 13
BOMBS: dict[str, tuple[Callable[[], bytes | str], int, str]] = {
    "claims 2^62 pixels": (lambda: bomb((1 << 31) - 1, (1 << 31) - 1), 400, "more than 67108864"),
    "as many pixels as may be, of which none are there": (lambda: bomb(HUGE, HUGE), 400, "cannot be decoded"),
    "as many pixels as may be": (
        lambda: chunked(HUGE, HUGE, (b"IDAT", zeros(HUGE * (3 * HUGE + 1) + (1 << 20)))), 200, "",
    ),
    "one pixel too many": (lambda: chunked(HUGE, HUGE + 1, (b"IDAT", zeros(1 << 20))), 400, "more than"),
    "a text of 1 GiB": (
        lambda: chunked(8, 8, (b"zTXt", b"a\0\0" + zeros(1 << 30)), (b"IDAT", zeros(1 << 20))),
        400, "cannot be decoded",
    ),
    "a profile of 1 GiB": (
        lambda: chunked(8, 8, (b"iCCP", b"a\0\0" + zeros(1 << 30)), (b"IDAT", zlib.compress(bytes(200)))),
        400, "cannot be decoded",
    ),
    "a chunk that is longer than the file": (
        lambda: b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 0x7FFFFFFF) + b"IHDR", 400, "cannot be decoded",
    ),
    "2,000 frames": (lambda: frames("GIF", 2000, (64, 64)), 200, ""),
    "300 frames": (lambda: frames("WEBP", 300, (256, 256)), 200, ""),
    "a GIF of 65535 × 65535": (
        lambda: b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + bytes(10) + b";",
        400, "more than",
    ),
    "a JPEG of 65500 × 65500": (
        lambda: with_sides(file_of(picture(), "JPEG"), b"\xff\xc0", 5, struct.pack(">HH", 65500, 65500)),
        400, "more than",
    ),
    "a WebP of 16383 × 16383": (
        lambda: with_sides(frames("WEBP", 2, (8, 8)), b"VP8X", 12, struct.pack("<I", 16382)[:3] * 2),
        400, "more than",
    ),
    "a row of 67 million pixels": (
        lambda: chunked(HUGE * HUGE, 1, (b"IDAT", zeros(3 * HUGE * HUGE + (1 << 20)))), 400, "too narrow",
    ),
    "one bit a pixel": (lambda: palette(HUGE, HUGE), 200, ""),
    "100 scans": (lambda: scanned((2048, 2048), 100), 200, ""),
    "progressive": (lambda: file_of(picture(size=(6000, 6000)), "JPEG", progressive=True), 200, ""),
    "an orientation that is none": (lambda: turning(file_of(picture()), 99), 200, ""),
    "nothing": (lambda: b"", 400, "none of PNG"),
    "SVG": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", 400, "none of PNG"),
    "PostScript": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 400, "none of PNG"),
    "TIFF": (lambda: file_of(picture(), "TIFF"), 400, "none of PNG"),
    "50 MB of random bytes": (lambda: os.urandom(50 << 20), 400, "none of PNG"),
    "a PNG of 50 MB": (lambda: file_of(picture(size=(4096, 4096)), compress_level=0), 200, ""),
    "50 MB that are no base64": (lambda: "data:image/png;base64," + "!" * (50 << 20), 400, "valid base64"),
    "a URL of 50 MB": (lambda: "https://a/" + "a" * (50 << 20), 400, "allowed-media-domains"),
    "parameters of 50 MB": (lambda: "data:image/png" + ";a=b" * (12 << 20), 400, "must be a URL"),
}  # fmt: skip


@pytest.mark.long
async def test_bombs(cluster: Cluster) -> None:
    assert (await answer(cluster, file_of(picture())))[0] == 200
    before, router, wrong = pids(cluster), psutil.Process(), dict[str, tuple[int, str]]()
    for name, (make, expected, text) in BOMBS.items():
        status, message = await answer(cluster, make())
        if status != expected or text not in message or len(message) > 3000:
            wrong[name] = status, message[:300]
        assert pids(cluster) >= before, f"{name}: a child has died"
    assert wrong == {}
    assert {pid: size for pid in pids(cluster) if (size := most_bytes(pid)) > MEMORY} == {}
    assert router.memory_info().rss < 4 * BODY + (1 << 30)
    assert (await answer(cluster, file_of(picture())))[0] == 200


def huge_images(count: int) -> list[str]:
    """No two files are equal."""
    pixels = b"IDAT", zeros(HUGE * (3 * HUGE + 1) + (1 << 20))
    return [url_of(chunked(HUGE, HUGE, (b"tEXt", b"a\0%d" % i), pixels)) for i in range(count)]


@pytest.mark.long
@pytest.mark.parametrize(
    "urls",
    [
        pytest.param(lambda: [url_of(scanned((HUGE, HUGE), 4000))], id="4,000 scans"),
        pytest.param(lambda: huge_images(200), id="200 images of as many pixels as may be"),
    ],
)
async def test_what_takes_too_long_is_refused_and_others_are_served(
    urls: Callable[[], list[str]], cluster: Cluster
) -> None:
    """A body has so many seconds of CPU time. Its child ends then, and another one is forked."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls()]
    body = {"messages": [{"role": "user", "content": parts}]}
    status, found = await cluster.post("/v1/chat/completions", max_tokens=1, **body)
    assert (status, found["error"]["message"][:47]) == (
        400,
        "the preparation of this request takes more than",
    )
    assert (await answer(cluster, file_of(picture())))[0] == 200


@pytest.mark.all
async def test_a_child_outlives_hostile_files(cluster: Cluster) -> None:
    """The quick ones of the above."""
    await answer(cluster, file_of(picture()))
    before = pids(cluster)
    for name in (
        "claims 2^62 pixels",
        "a chunk that is longer than the file",
        "a GIF of 65535 × 65535",
        "TIFF",
    ):
        make, expected, text = BOMBS[name]
        status, message = await answer(cluster, make())
        assert (status, text in message) == (expected, True), message
    body = json.dumps(chat(url_of(base64.b64decode("R0lGODlhAQABAAAAACw="))))
    async with cluster.http.post(cluster.url + "/v1/chat/completions", data=body) as response:
        assert response.status in (400, 415)
    assert pids(cluster) == before
