"""Images of a client: the same pixels as in transformers' processor, or refused before they cost much."""

import base64
import io
import json
import os
import random
import struct
import threading
import warnings
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from baton.processes.sandbox import helper
from baton.router import child_pool
from baton.router.api.jobs import SamplingDefaults, Sender
from baton.router.errors import ApiError, ContextLengthExceeded, InvalidRequest, Unsupported
from baton.router.preparation import images, jobs
from baton.router.preparation.child import (
    answer_to,
    decode,
    encode,
    read_prepared,
    request_head,
    share_pixels,
)
from baton.router.preparation.prepare import NeedsChild, NeedsFiles, Preparation, Prepared, Served
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from baton.vision.images import ImageSettings
from tests.engine.conftest import IMAGE_TOKEN, save_seeing_tokenizer, save_tiny

SERVED = Served(("vl",), 256)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vl")
    save_tiny(path, "Qwen3VL")
    save_seeing_tokenizer(path)
    return path


@pytest.fixture
def tokenizer(seeing: Path) -> Iterator[ModelTokenizer]:
    yield load_tokenizer(str(seeing))
    images._kept.clear()


def picture(mode: str = "RGB", size: tuple[int, int] = (30, 21), seed: int = 1) -> PIL.Image.Image:
    data = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return PIL.Image.fromarray(data).convert(mode)


def file_of(image: PIL.Image.Image, kind: str = "PNG", **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def url_of(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def chat(*urls: str, **more: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url, **more}} for url in urls]
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}, *parts]}]}


def prepared(tokenizer: ModelTokenizer, body: Any, kind: Any = "chat", **how: Any) -> Prepared:
    found = Preparation(tokenizer, SERVED, **how).prepare(kind, json.dumps(body).encode())
    assert isinstance(found, Prepared)
    return found


def transparent() -> PIL.Image.Image:
    image = picture("RGBA")
    image.putalpha(picture("L", seed=5))
    return image


def turned() -> PIL.Image.Exif:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    return exif


FILES = {
    "png": lambda: file_of(picture()),
    "jpeg": lambda: file_of(picture(), "JPEG"),
    "cmyk": lambda: file_of(picture("CMYK"), "JPEG"),
    "palette": lambda: file_of(picture("P")),
    "grey": lambda: file_of(picture("L")),
    "alpha": lambda: file_of(transparent()),
    "grey with alpha": lambda: file_of(transparent().convert("LA")),
    "palette with alpha": lambda: file_of(picture("P"), transparency=bytes(range(256))),
    "transparent webp": lambda: file_of(transparent(), "WEBP", lossless=True),
    "transparent gif": lambda: file_of(picture("P"), "GIF", transparency=3),
    "16 bits": lambda: file_of(PIL.Image.fromarray(np.arange(630, dtype=np.uint16).reshape(21, 30) * 99)),
    "black and white": lambda: file_of(picture("1")),
    "turned": lambda: file_of(picture(), "JPEG", exif=turned()),
    "webp": lambda: file_of(picture(), "WEBP"),
    "animated": lambda: file_of(picture(), "GIF", save_all=True, append_images=[picture(seed=2)]),
    "large": lambda: file_of(picture(size=(400, 300))),
    "of another height alone, by several threads": lambda: file_of(picture(size=(32, 45))),
}


@pytest.mark.parametrize("kind", FILES)
def test_pixels_are_those_of_transformers(kind: str, seeing: Path, tokenizer: ModelTokenizer) -> None:
    file, settings = FILES[kind](), tokenizer.images
    assert settings is not None
    [[image]] = prepared(tokenizer, chat(url_of(file))).images
    processor = Qwen2VLImageProcessorPil.from_pretrained(seeing)
    shown = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(file)))
    inputs = processor(images=[shown], return_tensors="np", do_normalize=False, do_rescale=False)
    _, rows, columns = inputs["image_grid_thw"][0] // [1, 2, 2]
    assert (image.rows, image.columns) == (rows, columns)
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(rows * 8, columns * 8, 3)
    again = processor(
        images=[pixels], return_tensors="np", do_normalize=False, do_rescale=False, do_resize=False,
        input_data_format="channels_last",
    )  # fmt: skip
    assert np.array_equal(again["pixel_values"], inputs["pixel_values"])
    assert image.name == settings.name(file)


def test_exif_turns_an_image(tokenizer: ModelTokenizer) -> None:
    [[image]] = prepared(tokenizer, chat(url_of(file_of(picture(size=(80, 16)), exif=turned())))).images
    assert (image.rows, image.columns) == (10, 2)


def test_tokens_of_images_stand_where_the_template_puts_them(tokenizer: ModelTokenizer) -> None:
    urls = [url_of(file_of(picture(size=size))) for size in ((24, 16), (16, 8))]
    found = prepared(tokenizer, chat(*urls))
    before = tokenizer.encode("ab", add_special_tokens=False)
    assert found.prompts == [array("I", [*before, *[IMAGE_TOKEN] * 6, *[IMAGE_TOKEN] * 2])]
    [[first, second]] = found.images
    assert (first.start, second.start) == (len(before), len(before) + 6)
    # The other forms of a chat give the same prompt, and so does a child process.
    sources = [{"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]} for url in urls]
    blocks = [{"type": "text", "text": "ab"}, *({"type": "image", "source": source} for source in sources)]
    body = {"model": "vl", "max_tokens": 3, "messages": [{"role": "user", "content": blocks}]}
    assert prepared(tokenizer, body, "messages").images == found.images
    parts = [{"type": "input_text", "text": "ab"}, *({"type": "input_image", "image_url": u} for u in urls)]
    body = {"model": "vl", "input": [{"role": "user", "content": parts}]}
    assert prepared(tokenizer, body, "responses").prompts == found.prompts
    raw = request_head("chat", SERVED) + json.dumps(chat(*urls)).encode()
    sent = read_prepared(answer_to(ModelTokenizer.restored(tokenizer.state), raw))
    assert isinstance(sent, Prepared)
    assert (sent.prompts, sent.images) == (found.prompts, found.images)
    counted = Preparation(tokenizer, SERVED).prepare("tokenize", json.dumps(chat(*urls)).encode())
    assert json.loads(bytes(counted))["count"] == len(found.prompts[0])  # type: ignore[arg-type]
    with pytest.raises(NeedsChild):
        prepared(tokenizer, chat(*urls), in_child=False)


def test_pixels_are_beside_the_answer_of_a_child(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A later answer that is shorter has only its own."""
    with (tmp_path / "shared").open("wb+") as file:
        monkeypatch.setattr(helper, "SHARED", file.fileno())
        for sizes in ([(40, 24), (16, 80)], [(32, 32)]):
            body = chat(*(url_of(file_of(picture(size=size))) for size in sizes))
            frame = request_head("chat", SERVED) + json.dumps(body).encode()
            expected = read_prepared(decode(encode(answer_to(tokenizer, frame))))
            answer = encode(share_pixels(answer_to(tokenizer, frame)))
            assert len(answer) < 5000
            size = os.fstat(file.fileno()).st_size
            assert read_prepared(decode(answer), pixels=os.pread(file.fileno(), size, 0)) == expected
            os.ftruncate(file.fileno(), 0)


def test_files_that_are_fetched_are_images_as_those_in_a_body(tokenizer: ModelTokenizer) -> None:
    url, other = "https://a.example/1", "HTTP://b.example/2"
    files = {url: file_of(picture()), other: file_of(picture(size=(16, 8)))}
    body = chat(url, other, url)
    with pytest.raises(NeedsFiles) as needed:
        prepared(tokenizer, body)
    assert needed.value.urls == [url, other]
    expected = prepared(tokenizer, chat(*(url_of(files[each]) for each in (url, other, url))))
    assert prepared(tokenizer, body, files=files).images == expected.images
    raw = json.dumps(body).encode()
    with pytest.raises(NeedsFiles) as needed:
        read_prepared(answer_to(tokenizer, request_head("chat", SERVED, files={url: b""}) + raw))
    assert needed.value.urls == [other]
    frame = request_head("chat", SERVED, b"[]", files=files) + b"".join(files.values()) + raw
    sent = read_prepared(answer_to(tokenizer, frame))
    assert isinstance(sent, Prepared)
    assert (sent.prompts, sent.images) == (expected.prompts, expected.images)


def test_an_image_of_low_detail_is_small(tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = url_of(file_of(picture(size=(80, 80))))
    [[whole]] = prepared(tokenizer, chat(url, detail="high")).images
    assert (whole.rows, whole.columns) == (10, 10)
    monkeypatch.setattr("baton.vision.images.LOW_PIXELS", 40 * 40)
    [[small]] = prepared(tokenizer, chat(url, detail="low")).images
    assert (small.rows, small.columns) == (5, 5)
    assert small.name != whole.name
    part = {"type": "input_image", "image_url": url, "detail": "low"}
    body = {"input": [{"role": "user", "content": [part]}]}
    assert prepared(tokenizer, body, "responses").images[0][0].name == small.name
    with pytest.raises(InvalidRequest, match="detail must be one of auto, low, high, original"):
        prepared(tokenizer, chat(url, detail="medium"))


def test_a_router_may_take_no_images(seeing: Path) -> None:
    tokenizer = load_tokenizer(str(seeing), images=False)
    assert tokenizer.images is None
    with pytest.raises(Unsupported, match="this model takes no images"):
        prepared(tokenizer, chat(url_of(file_of(picture()))))


def test_a_request_has_a_limit_of_images(tokenizer: ModelTokenizer) -> None:
    body = json.dumps(chat(*["https://a.example/1"] * 3)).encode()
    for most, error, text in ((3, NeedsFiles, "a.example"), (2, InvalidRequest, "has 3 images, more than 2")):
        with pytest.raises(error, match=text):
            Preparation(tokenizer, Served(("vl",), 256, most)).prepare("chat", body)


def test_a_repeated_image_is_decoded_once(tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    body = chat(url_of(file_of(picture())))
    first = prepared(tokenizer, body).images
    monkeypatch.setattr(images, "pillow", None)  # nothing is decoded again
    assert prepared(tokenizer, body).images == first


def test_images_are_decoded_in_parts_and_answers_keep_their_order(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [(64, 32), (32, 64), (96, 32), (64, 32), (32, 32)]
    files = [url_of(file_of(picture("RGB", size, seed))) for seed, size in enumerate(sizes)]
    whole = prepared(tokenizer, chat(*files, files[1])).images
    images._kept.clear()
    monkeypatch.setattr(images, "MOST_SOURCE_PIXELS", 5000)  # two of them, or one
    assert prepared(tokenizer, chat(*files, files[1])).images == whole
    with pytest.raises(InvalidRequest, match="image 3 cannot be decoded"):
        prepared(tokenizer, chat(*files[:3], url_of(file_of(picture())[:-60]), files[4]))


def test_a_child_without_memory_for_a_thread_ends_as_one_without_memory(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # as CPython does when the system refuses its stack

    images._threads.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", start)
    body = chat(url_of(file_of(picture())))
    with pytest.raises(SystemExit):
        child_pool.answered(lambda _: encode(prepared(tokenizer, body)), b"")
    images._threads.cache_clear()


def bomb(width: int, height: int) -> bytes:
    """A PNG of these many pixels in some hundred bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (url_of(bomb(1 << 16, 1 << 16)), "image 0 has 65536 × 65536 pixels, more than 67108864"),
        (url_of(bomb(20, 1)), "image 0 cannot be decoded: image file is truncated"),
        (url_of(bomb(1 << 26, 1)), "67108864 × 1 pixels is too narrow"),
        (url_of(file_of(picture(size=(1000, 4)))), "1000 × 4 pixels is too narrow: at most 200:1"),
        (url_of(file_of(picture())[:-60]), "image 0 cannot be decoded: image file is truncated"),
        (url_of(b"BM" + bytes(90)), "it is none of PNG, JPEG, WEBP, GIF"),
        ("data:image/png;base64,!!", "image 0 is not valid base64"),
        ("file:///etc/passwd", "must be a URL of https or http, or of the form data:image/png;base64"),
    ],
)
def test_what_is_no_image_is_refused(url: str, reason: str, tokenizer: ModelTokenizer) -> None:
    with pytest.raises(InvalidRequest) as refused:
        prepared(tokenizer, chat(url))
    assert reason in refused.value.message
    assert refused.value.param == "messages"


def test_a_file_writes_nothing_into_the_log(tokenizer: ModelTokenizer) -> None:
    """Pillow warns of broken EXIF, with numbers of the file: each another line of the router's log."""
    broken = b"Exif\0\0II*\0\x08\0\0\0\x09\0\x12\x01"
    file = file_of(picture(), "JPEG")
    file = file[:2] + b"\xff\xe1" + struct.pack(">H", len(broken) + 2) + broken + file[2:]
    images.pillow.cache_clear()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert prepared(tokenizer, chat(url_of(file))).images
    assert warned == []


def test_limits_of_a_request(tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = url_of(file_of(picture(size=(80, 80))))
    with pytest.raises(ContextLengthExceeded):
        prepared(tokenizer, chat(url, url, url))
    monkeypatch.setattr(images, "MOST_PIXELS", 6400)
    assert prepared(tokenizer, chat(url)).images
    with pytest.raises(InvalidRequest, match="up to image 1 have 12800 pixels, more than 6400"):
        prepared(tokenizer, chat(url, url))
    spelled = chat(url)
    spelled["messages"][0]["content"][0]["text"] = "<|image_pad|>"
    with pytest.raises(InvalidRequest, match="1 image, but the chat template wrote 2"):
        prepared(tokenizer, spelled)
    for body, error, text in (
        ({**chat(url), "truncate_prompt_tokens": 3}, Unsupported, "the messages have images"),
        ({**chat(url), "continue_final_message": True}, InvalidRequest, "the last message has images"),
        ({"messages": [{**chat(url)["messages"][0], "role": "system"}]}, InvalidRequest, "user or tool have"),
    ):
        with pytest.raises(error, match=text):
            prepared(tokenizer, body)
    tokenizer.images = None
    with pytest.raises(Unsupported, match="this model takes no images"):
        prepared(tokenizer, chat(url))


def mutated(count: int) -> Iterator[bytes]:
    rng = random.Random(3)
    seeds = [file_of(picture(size=(64, 48)), kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    for i in range(count):
        data = bytearray(seeds[i % len(seeds)])
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        yield bytes(data[: rng.randrange(8, len(data) + 1)] if i % 3 == 0 else data)


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.long)])
def test_mutated_files_are_decoded_or_refused(count: int, tokenizer: ModelTokenizer) -> None:
    refused = 0
    for file in mutated(count):
        try:
            found = prepared(tokenizer, chat(url_of(file)))
        except InvalidRequest as error:
            refused += error.param == "messages"
        except ApiError as error:
            raise AssertionError(error.message) from error
        else:
            settings: ImageSettings | None = tokenizer.images
            assert settings is not None
            [[image]] = found.images
            assert len(image.pixels) == settings.pixel_bytes(image.rows, image.columns)
    assert 0 < refused < count


def test_all_choices_count(tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes to a worker with its own copy of the pixels."""
    found = prepared(tokenizer, {**chat(url_of(file_of(picture(size=(80, 80))))), "n": 2})
    given: dict[str, Any] = {
        "context": 256, "vocab_size": 199, "content_root": b"", "defaults": SamplingDefaults()
    }  # fmt: skip
    made = jobs.make_jobs(found, Sender(), None, None, **given)
    [[one, other]] = made
    assert one.images == other.images
    assert [image.pixels for image in one.images] == [found.images[0][0].pixels]
    monkeypatch.setattr(jobs, "MOST_PIXELS", 2 * 6400 - 1)
    with pytest.raises(InvalidRequest, match="n: 2 choices with images of 12800 pixels in all are more"):
        next(jobs.make_jobs(found, Sender(), None, None, **given))


@pytest.mark.parametrize(("kind", "text"), [("Gemma3", "\n\n"), ("Gemma4", "")])
def test_the_processor_of_gemma_writes_around_an_image(kind: str, text: str, tmp_path: Path) -> None:
    """In the text, since a tokenizer may join what is around an image with its neighbours."""
    save_tiny(tmp_path, kind)
    save_seeing_tokenizer(tmp_path, "<start_of_image>" if kind == "Gemma3" else "<|image_pad|>")
    if kind == "Gemma4":
        settings = {"image_processor": {"max_soft_tokens": 20}}
        (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    tokenizer = ModelTokenizer.restored(load_tokenizer(str(tmp_path)).state)
    picture_url = url_of(file_of(picture(size=(24, 16))))
    found = prepared(tokenizer, chat(picture_url, picture_url))
    [[first, second]] = found.images
    assert (first.rows, first.columns) == ((4, 4) if kind == "Gemma3" else (3, 5))
    spelled = tokenizer.encode(text, add_special_tokens=False)
    image = [
        *spelled,
        IMAGE_TOKEN + 1,
        *[IMAGE_TOKEN] * first.rows * first.columns,
        IMAGE_TOKEN + 2,
        *spelled,
    ]
    assert found.prompts == [array("I", [*tokenizer.encode("ab", add_special_tokens=False), *image, *image])]
    assert second.start == first.start + len(image)
    images._kept.clear()
    body = chat(picture_url)
    body["messages"][0]["content"][0]["text"] = "<start_of_image>" if kind == "Gemma3" else "<|image_pad|>"
    with pytest.raises(InvalidRequest, match="1 image, but the chat template wrote 2"):
        prepared(tokenizer, body)
    images._kept.clear()
