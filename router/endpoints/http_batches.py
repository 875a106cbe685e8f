"""The endpoints /v1/files and /v1/batches, if the router keeps them (`--batch-dir`)."""

import asyncio
import os
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from baton.router import errors
from baton.router.api.bodies import BatchBody, FileForm
from baton.router.api.queries import BatchesQuery, FilesQuery, PageQuery, page_of
from baton.router.api.validation import parse, validate
from baton.router.batches.objects import (
    MAX_SECONDS,
    BatchObject,
    FileObject,
    file_object,
    new_id,
    owner_of,
    timestamp,
)
from baton.router.batches.runner import MAX_WAIT, Batches
from baton.router.batches.storage import MAX_FILE_BYTES, Storage
from baton.router.config import RouterConfig
from baton.router.endpoints import http_generation as http
from baton.router.endpoints.frontend import Frontend
from baton.router.endpoints.http_writer import pieces_of_file, send
from baton.router.endpoints.request_body import read_body
from baton.router.preparation.prepare import Generated

ENDPOINTS: dict[str, Generated] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
WINDOW_SECONDS = 24 * 3600
PIECE_BYTES = 1 << 20
"""Of an upload, that are written at once."""
MAX_NAME = 256
MAX_FIELD = 1024
"""Bytes of a field of an upload, without the file."""
MAX_BODY_BYTES = 16 << 10
OFF = "this router keeps no files and batches: start it with --batch-dir DIR, and one process"


class HttpBatches:
    """The handlers. Owns the storage and the batches between `start` and `close`."""

    def __init__(self, config: RouterConfig, frontend: Frontend, generation: http.HttpGeneration) -> None:
        self._config = config
        self._frontend = frontend
        self._generation = generation
        self._storage: Storage | None = None
        if config.batch_dir is not None:
            self._storage = Storage(
                Path(config.batch_dir), config.batch_bytes, lambda: len(frontend.accounts)
            )
            self._batches = Batches(self._storage, self._send, config.max_body_bytes)

    def routes(self) -> list[web.RouteDef]:
        file, batch = "/v1/files/{id}", "/v1/batches/{id}"
        return [
            web.post("/v1/files", self._upload),
            web.get("/v1/files", self._files),
            web.get(file, self._file),
            web.delete(file, self._delete),
            web.get(f"{file}/content", self._content),
            web.post("/v1/batches", self._create),
            web.get("/v1/batches", self._list),
            web.get(batch, self._batch),
            web.post(f"{batch}/cancel", self._cancel),
        ]

    async def start(self) -> None:
        """Goes on with batches that have not ended. Raises ValueError for a directory that cannot be used."""
        if self._storage is not None:
            await self._batches.open()

    async def close(self) -> None:
        if self._storage is not None:
            await self._batches.close()
            await asyncio.to_thread(self._storage.close)

    @property
    def _kept(self) -> tuple[Storage, str]:
        """The storage, and the owner that the API key of the request has there. Raises NotFound."""
        if self._storage is None:
            raise errors.NotFound(OFF)
        return self._storage, owner_of(http.ACCOUNT.get().key)

    # ------------------------------------------------------------ files

    async def _upload(self, request: web.Request) -> web.Response:
        storage, owner = self._kept
        if not request.content_type.startswith("multipart/form-data"):
            raise errors.UnsupportedMediaType("the Content-Type must be multipart/form-data")
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise errors.UnsupportedMediaType("a form must have no Content-Encoding")
        if "Origin" in request.headers and not self._config.allowed_origins:
            # A browser sends a form to another origin without asking for permission first.
            raise errors.InvalidRequest("pages of other origins may not upload: see --allowed-origins")
        id, fields = new_id("file"), dict[str, str]()
        with self._frontend.admit(http.ACCOUNT.get()):
            try:
                name, size = await self._receive(request, storage, owner, id, fields)
                form = _form(fields)
                seconds = form.expires_after.seconds if form.expires_after else MAX_SECONDS
                described = file_object(id, size, name, form.purpose, timestamp(), seconds)
                await storage.call(owner, storage.put, owner, described)
            except BaseException:
                await asyncio.shield(storage.call(owner, storage.forget, owner, id))
                raise
        return _json(described)

    async def _receive(
        self, request: web.Request, storage: Storage, owner: str, id: str, fields: dict[str, str]
    ) -> tuple[str, int]:
        """Writes the part `file`, and fills in the other ones. Returns the name and the size of the file."""
        name, size, has_file = "", 0, False
        reader = await self._in_time(request.multipart())
        while (part := await self._in_time(reader.next())) is not None:
            if not isinstance(part, BodyPartReader):
                raise errors.InvalidRequest("a part of the form has parts of its own")
            if part.name != "file":
                if len(fields) == 8:
                    raise errors.InvalidRequest("the form has too many fields")
                value = b""
                while piece := await self._in_time(part.read_chunk(MAX_FIELD)):
                    value += piece
                    if len(value) > MAX_FIELD:
                        text = f"{str(part.name)[:80]}: a field of the form has at most {MAX_FIELD} bytes"
                        raise errors.InvalidRequest(text)
                fields[str(part.name)] = value.decode(errors="replace")
                continue
            if has_file:
                raise errors.InvalidRequest("the form has two files", param="file")
            name, has_file = (part.filename or "file")[:MAX_NAME], True
            while piece := await self._in_time(part.read_chunk(PIECE_BYTES)):
                size += len(piece)
                if size > MAX_FILE_BYTES:
                    raise errors.BodyTooLarge(f"a file has at most {MAX_FILE_BYTES} bytes", param="file")
                await storage.call(owner, storage.append, owner, id, bytes(piece))
        if not size:
            raise errors.InvalidRequest.at("file", "must be there, and not be empty")
        return name, size

    async def _in_time(self, reading: Any) -> Any:
        """Awaits aiohttp's reader of the form. Raises TooSlow if a client sends nothing for its time, and
        InvalidRequest for all that the reader takes for no form."""
        try:
            async with asyncio.timeout(self._config.client_timeout):
                return await reading
        except TimeoutError:
            text = f"no part of the file arrived within {self._config.client_timeout:g} s"
            raise errors.TooSlow(text) from None
        except (ValueError, KeyError, RuntimeError, HttpProcessingError, web.RequestPayloadError) as error:
            text = f"the form cannot be read: {type(error).__name__}: {str(error)[:200]}"
            raise errors.InvalidRequest(text) from None

    async def _files(self, request: web.Request) -> web.Response:
        storage, owner = self._kept
        query = validate(FilesQuery, dict(request.query))
        files = await storage.call(owner, storage.all_of, owner, FileObject)
        return _page(query, [each for each in files if query.purpose in (None, each.purpose)])

    async def _file(self, request: web.Request) -> web.Response:
        storage, owner = self._kept
        return _json(await storage.call(owner, storage.get, owner, request.match_info["id"], FileObject))

    async def _delete(self, request: web.Request) -> web.Response:
        storage, owner = self._kept
        id = request.match_info["id"]
        await storage.call(owner, storage.delete, owner, id)
        return _json({"id": id, "object": "file", "deleted": True})

    async def _content(self, request: web.Request) -> web.StreamResponse:
        storage, owner = self._kept
        path = await storage.call(owner, storage.content, owner, request.match_info["id"])
        with await asyncio.to_thread(path.open, "rb") as file:
            headers = {"Content-Length": str(os.fstat(file.fileno()).st_size)}
            body = pieces_of_file(request, file)
            response = web.Response(body=body, content_type="application/jsonl", headers=headers)
            await send(request, response)
        return response

    # ------------------------------------------------------------ batches

    async def _create(self, request: web.Request) -> web.Response:
        storage, owner = self._kept
        with self._frontend.admit(http.ACCOUNT.get()) as entry:
            raw = await read_body(request, self._config, entry)
            if len(raw) > MAX_BODY_BYTES:  # it is parsed here
                raise errors.BodyTooLarge(f"the body of a batch has at most {MAX_BODY_BYTES} bytes")
            body = parse(BatchBody, raw)
            await storage.call(owner, storage.get, owner, body.input_file_id, FileObject)
            now = timestamp()
            batch = BatchObject(
                id=new_id("batch"),
                created_at=now,
                expires_at=now + WINDOW_SECONDS,
                **body.model_dump(),
            )
            await self._batches.create(owner, batch)
        return _json(batch)

    async def _list(self, request: web.Request) -> web.Response:
        storage, owner = self._kept
        query = validate(BatchesQuery, dict(request.query))
        return _page(query, await storage.call(owner, storage.all_of, owner, BatchObject))

    async def _batch(self, request: web.Request) -> web.Response:
        storage, owner = self._kept
        return _json(await storage.call(owner, storage.get, owner, request.match_info["id"], BatchObject))

    async def _cancel(self, request: web.Request) -> web.Response:
        storage, owner = self._kept
        batch = await storage.call(owner, storage.get, owner, request.match_info["id"], BatchObject)
        await self._batches.cancel(owner, batch)
        return _json(batch)

    async def _send(self, owner: str, path: str, body: bytes, name: str) -> bytes:
        """Sends a request of a batch. Raises ApiError."""
        account = next((each for each in self._frontend.accounts if owner_of(each.key) == owner), None)
        if account is None:
            raise errors.Unauthorized("the API key that made this batch is gone")
        headers = {"x-max-wait": f"{MAX_WAIT:g}"}
        return await self._generation.whole(ENDPOINTS[path], body, account, headers, name)


def _form(fields: dict[str, str]) -> FileForm:
    """Validates the fields of an upload. Those of an object are named `object[field]`.

    Raises InvalidRequest.
    """
    parsed: dict[str, Any] = {}
    for name, text in fields.items():
        value = int(text) if re.fullmatch("[0-9]{1,10}", text) else text
        if (inner := re.fullmatch(r"(\w+)\[(\w+)\]", name)) is None:
            parsed[name] = value
        elif isinstance(outer := parsed.setdefault(inner[1], {}), dict):
            outer[inner[2]] = value
    return validate(FileForm, parsed)


def _json(answer: Any) -> web.Response:
    return http.json_response(msgspec.json.encode(answer))


def _page(query: PageQuery, objects: list[Any]) -> web.Response:
    return _json(page_of(query, objects, attrgetter("id"), lambda each: each))
