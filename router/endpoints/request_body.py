"""The body of an HTTP request: its type, its size, and what it is compressed with."""

import asyncio
import zlib
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from aiohttp import web

from baton.router import errors
from baton.router.admission.entry import Entry
from baton.router.config import RouterConfig

PIECE_BYTES = 256 << 10
"""Of a compressed body, that are decompressed at once."""


async def read_body(request: web.Request, config: RouterConfig, entry: Entry) -> bytearray:
    """Returns the body. Its type must be JSON, and it must arrive within the client's timeout.

    `entry` counts its bytes as they arrive, and may refuse them.
    """
    _check_type(request.headers.get("content-type"))
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "deflate"):
        text = "the Content-Encoding of a body must be gzip or deflate, if there is one"
        raise errors.UnsupportedMediaType(text)
    pieces = request.content.iter_any()  # `request.read` would copy the body and keep it
    body = bytearray()
    try:
        async with asyncio.timeout(config.client_timeout):
            async for piece in pieces if encoding == "identity" else _decompressed(pieces, encoding):
                body += piece
                if len(body) > config.max_body_bytes:
                    raise errors.BodyTooLarge(f"the body is larger than {config.max_body_bytes} bytes")
                entry.receive(len(piece))
                if len(body) > len(piece):
                    await asyncio.sleep(0)  # the next piece may be there: compressed, or in chunks of a byte
    except TimeoutError:
        raise errors.TooSlow(f"the body did not arrive within {config.client_timeout:g} s") from None
    except zlib.error as error:
        text = f"the body cannot be read: it is not what Content-Encoding says ({encoding}): {error}"
        raise errors.InvalidRequest(text) from error
    except web.RequestPayloadError as error:
        raise errors.InvalidRequest(f"the body cannot be read: {error}") from error
    return body


async def _decompressed(pieces: AsyncIterable[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Yields the pieces of a body that is compressed with `encoding`, gzip or deflate. Raises zlib.error."""
    inflate: Any = None  # what `zlib.decompressobj` returns
    async for piece in pieces:
        if inflate is None:
            bare = piece[0] & 15 != 8  # some clients leave out the header of zlib
            inflate = zlib.decompressobj(31 if encoding == "gzip" else -15 if bare else 15)
        elif inflate.eof:
            raise zlib.error("bytes follow its end")
        while not inflate.eof:
            part = inflate.decompress(piece, PIECE_BYTES)
            piece = inflate.unconsumed_tail
            yield part
            if len(part) < PIECE_BYTES:  # no more comes of this piece
                break
        if inflate.unused_data:
            raise zlib.error("bytes follow its end")
    if inflate is not None and not inflate.eof:
        raise zlib.error("its end is missing")


def _check_type(header: str | None) -> None:
    """Raises UnsupportedMediaType unless the body is JSON, as vLLM does.

    A browser sends a body of another type to another origin without asking for permission first.
    """
    sent = "none" if header is None else repr(header[:80])
    if header is None or header.partition(";")[0].strip().lower() != "application/json":
        text = f"the Content-Type must be application/json, not {sent}"
        raise errors.UnsupportedMediaType(f"{text}: curl needs -H 'Content-Type: application/json'")
