"""Decodes and resizes the images of a request. Runs in a child process, whose time and memory are limited.

The result is that of transformers' processor: the first frame, turned as EXIF says, in red, green and blue on
white, resized by Pillow. So workers get pixels, and no file of a client.
"""

import base64
import binascii
import io
import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeVar

from baton.router.api.fields import ShownImage
from baton.router.errors import InvalidRequest, Unsupported
from baton.system import usable_cpus
from baton.system.words import counted
from baton.vision.images import MOST_PIXELS, Image, ImageSettings

T = TypeVar("T")

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_SOURCE_PIXELS = 1 << 26
"""Of a file. They are known before it is decoded: a small file may hold a huge image."""
KEPT_BYTES = 128 << 20
"""Of pixels that a child keeps for requests that repeat an image, as each turn of a chat does."""
MOST_THREADS = 4
"""That decode images of a request: each takes address space, of which a child has a bounded amount."""
_REMOTE = re.compile(r"https?:", re.IGNORECASE)
_DATA = re.compile(r"data:[\w.+-]*/?[\w.+-]*(?:;[\w.+-]+=[^;,]*)*;base64,", re.ASCII)


class _Source(NamedTuple):
    """A file that can be decoded."""

    number: int
    """Of the image in the request."""
    name: bytes
    file: bytes
    settings: ImageSettings
    pixels: int
    """Of the file."""
    resized: int
    """Pixels that it has then."""


_kept: OrderedDict[bytes, Image[memoryview]] = OrderedDict()  # of this process, the least recently used first


def is_remote(url: str) -> bool:
    """Whether the router must fetch the file."""
    return _REMOTE.match(url) is not None


def decode_images(
    images: Sequence[ShownImage], settings: ImageSettings, files: Mapping[str, bytes]
) -> list[Image[memoryview]]:
    """Images without their place. `files`: those that were fetched, by URL. Raises InvalidRequest, which
    names the image by its number in the request."""
    names: list[bytes] = []
    decoded_images: dict[bytes, Image[memoryview]] = {}
    missing: dict[bytes, _Source] = {}
    total = 0
    for i, image in enumerate(images):
        file = files[image.url] if image.url in files else _file(image.url, i)
        of_image = settings.of_low_detail if image.low else settings
        names.append(name := of_image.name(file))
        if (cached := _kept.get(name)) is not None:
            decoded_images[name] = cached
            total += cached.tokens * settings.side**2
        else:
            missing[name] = _source(name, file, of_image, i)
            total += missing[name].resized
        if total > MOST_PIXELS:
            text = f"the images up to image {i} have {total} pixels, more than {MOST_PIXELS}"
            raise InvalidRequest(text)
    for part in _parts(missing.values()):
        decoded_images |= {decoded.name: decoded for decoded in _decoded(part)}
    for name in names:
        _kept[name] = decoded_images[name]
        _kept.move_to_end(name)
    while sum(len(each.pixels) for each in _kept.values()) > KEPT_BYTES:
        _kept.popitem(last=False)
    return [decoded_images[name] for name in names]


@cache
def _threads() -> ThreadPoolExecutor:
    """Of this process. Pillow decodes and resizes without the GIL."""
    return ThreadPoolExecutor(min(usable_cpus(), MOST_THREADS), "images")


def _by_threads(call: Callable[..., T], *arguments: Iterable[Any]) -> Iterator[T]:
    """As `map`."""
    try:
        return _threads().map(call, *arguments)
    except RuntimeError as error:  # no memory is left for the stack of a thread
        raise MemoryError(str(error)) from error


def _parts(sources: Iterable[_Source]) -> Iterator[list[_Source]]:
    """Parts of these. The files of a part together have no more pixels than one file may have."""
    part: list[_Source] = []
    pixels = 0
    for source in sources:
        if part and pixels + source.pixels > MOST_SOURCE_PIXELS:
            yield part
            part, pixels = [], 0
        part.append(source)
        pixels += source.pixels
    if part:
        yield part


def place(
    token_ids: Sequence[int], images: Sequence[Image[memoryview]], token: int
) -> tuple[list[int], list[Image[memoryview]]]:
    """Puts the tokens of each image in place of the one that the chat template has written. Raises
    InvalidRequest if there are not as many."""
    written = [i for i, each in enumerate(token_ids) if each == token] if images else []
    if len(written) != len(images):
        text = f"{counted(len(images), 'image')}, but the chat template wrote {len(written)} of their tokens"
        raise InvalidRequest(text)
    placed: list[Image[memoryview]] = []
    ids: list[int] = []
    begin = 0
    for at, image in zip(written, images, strict=True):
        ids += token_ids[begin:at]
        placed.append(image._replace(start=len(ids)))
        ids += [token] * image.tokens
        begin = at + 1
    return [*ids, *token_ids[begin:]], placed


def _file(url: str, i: int) -> bytes:
    match = _DATA.match(url[:256])
    if match is None:
        text = f"image {i}: must be a URL of https or http, or of the form data:image/png;base64,…"
        raise Unsupported(text)
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(i, f"is not valid base64: {error}") from None


def _source(name: bytes, file: bytes, settings: ImageSettings, i: int) -> _Source:
    """Decodes nothing."""
    pil = pillow()
    with _told(i, pil), pil.Image.open(io.BytesIO(file), formats=FORMATS) as image:
        if (pixels := image.width * image.height) > MOST_SOURCE_PIXELS:
            size = f"{image.width} × {image.height} pixels"
            raise _wrong(i, f"has {size}, more than {MOST_SOURCE_PIXELS}")
        # EXIF may turn the image. Its sides are rounded alike.
        height, width = settings.size(image.height, image.width)
    return _Source(i, name, file, settings, pixels, height * width)


def _decoded(part: Sequence[_Source]) -> Iterator[Image[memoryview]]:
    """A thread decodes a file. To resize an image takes twice as long, so threads share it if they can."""
    images = list(_by_threads(_turned, part))
    sizes = [
        source.settings.size(image.height, image.width) for source, image in zip(part, images, strict=True)
    ]
    bands = [_bands(image, *size) for image, size in zip(images, sizes, strict=True)]
    tasks = [(part[i], images[i], sizes[i][1], band) for i, of_image in enumerate(bands) for band in of_image]
    pixels = _by_threads(_resized, *zip(*tasks, strict=True))
    for source, size, of_image in zip(part, sizes, bands, strict=True):
        made = memoryview(b"".join(islice(pixels, len(of_image))))
        yield Image(source.name, 0, *source.settings.grid(*size), made)


def _turned(source: _Source) -> Any:
    """The image in red, green and blue, before it is resized."""
    pil = pillow()
    with _told(source.number, pil), pil.Image.open(io.BytesIO(source.file), formats=FORMATS) as image:
        pil.ImageOps.exif_transpose(image, in_place=True)
        return _opaque(image, pil)


class _Band(NamedTuple):
    """Rows of an image."""

    top: int
    bottom: int
    rows: int
    """When it is resized."""


def _bands(image: Any, height: int, width: int) -> list[_Band]:
    """Of an image with this size when it is resized, one below the other. They end where a row ends before
    and after, so a band has the pixels that it has in the whole image. One that changes both sides is one
    band: Pillow resizes one side after the other, and the order depends on the sizes."""
    units = math.gcd(image.height, height) if image.width == width else 1
    count = min(units, MOST_THREADS)
    ends = [units * i // count for i in range(count + 1)]
    return [
        _Band(image.height // units * begin, image.height // units * end, height // units * (end - begin))
        for begin, end in pairwise(ends)
    ]


def _resized(source: _Source, image: Any, width: int, band: _Band) -> bytes:
    pil, box = pillow(), (0, band.top, image.width, band.bottom)
    with _told(source.number, pil):
        if (image.width, band.bottom - band.top) == (width, band.rows):
            return image.crop(box).tobytes()
        how = pil.Image.Resampling(source.settings.resample)
        return image.resize((width, band.rows), how, box).tobytes()


@contextmanager
def _told(i: int, pil: Any) -> Iterator[None]:
    """A client is told why an image cannot be decoded. A decoder raises what a broken file leads it to."""
    try:
        yield
    except (InvalidRequest, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001
        reason = str(error) or type(error).__name__
        if isinstance(error, pil.UnidentifiedImageError):
            reason = f"it is none of {', '.join(FORMATS)}"
        raise _wrong(i, f"cannot be decoded: {reason[:200]}") from None


def _opaque(image: Any, pil: Any) -> Any:
    """The image in red, green and blue. What is transparent shows white."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image.convert("RGBA")
    background = pil.Image.new("RGBA", image.size, (255, 255, 255, 255))
    return pil.Image.alpha_composite(background, image).convert("RGB")


def _wrong(i: int, fault: str) -> InvalidRequest:
    return InvalidRequest(f"image {i} {fault}")


@cache
def pillow() -> Any:
    """The package. Raises Unsupported if it is not installed."""
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        text = "images are not supported: install Baton with the extra `images`, which has Pillow"
        raise Unsupported(text) from None
    PIL.Image.MAX_IMAGE_PIXELS = None  # it only warns: `MOST_SOURCE_PIXELS` refuses
    warnings.filterwarnings("ignore", module=r"PIL\.")  # each would put text of a client's file into the log
    return PIL
