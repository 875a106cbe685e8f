"""Runs batches: checks the lines of a file, sends the requests, and keeps each result at once.

The requests of a batch come after those of clients: they have a priority behind all others, and the router
refuses them while it expects a longer wait than `MAX_WAIT`. Then they are sent again. A key has one batch at
work; the others wait for it. What was sent and has no result when the router ends is sent again by the next
router.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Container, Iterator
from pathlib import Path
from typing import Any

import msgspec

from baton.router.batches.lines import (
    CONCURRENCY,
    MAX_CUSTOM_ID,
    RequestLine,
    answered,
    pause,
    request_of,
    unanswered,
)
from baton.router.batches.storage import BatchObject, Storage, timestamp
from baton.router.errors import ApiError, NoWorker, Overloaded, ShuttingDown

log = logging.getLogger(__name__)

MAX_LINES = 50_000
MAX_ERRORS = 20
"""Of a file, that a batch shows."""
PRIORITY = 100
MAX_WAIT = 1.0
"""Seconds for which a request may wait in the router: with more the router is busy with clients."""

Send = Callable[[str, str, bytes, str], Awaitable[bytes]]
"""Takes the owner, the path of the endpoint, the body and the request's id. Returns the response in JSON.
Raises ApiError."""


class InvalidFile(Exception):
    """Lines of a file are no requests. `errors`: as a batch shows them."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__()
        self.errors = errors


def check(path: Path, endpoint: str, max_bytes: int) -> list[tuple[int, str]]:
    """Reads a whole file. Returns the place and the `custom_id` of each request. Raises InvalidFile."""
    places: dict[str, int] = {}
    errors: list[dict[str, Any]] = []

    def wrong(number: int, text: str) -> None:
        errors.append({"code": "invalid_line", "line": number, "message": text, "param": None})

    for number, place, line in _lines(path, max_bytes):
        if len(errors) == MAX_ERRORS:
            break
        try:
            if len(line) > max_bytes:
                raise ValueError(f"a line has at most {max_bytes} bytes")
            places[_custom_id(line, endpoint, places)] = place
        except ValueError as error:
            wrong(number, str(error))
        if len(places) > MAX_LINES:
            wrong(number, f"a batch has at most {MAX_LINES} requests")
            break
    if not places and not errors:
        wrong(1, "the file has no request")
    if errors:
        raise InvalidFile(errors)
    return [(place, custom_id) for custom_id, place in places.items()]


def _custom_id(line: bytes, endpoint: str, earlier: Container[str]) -> str:
    """Raises ValueError unless the line is a request for the endpoint, with a new `custom_id`."""
    request = request_of(line)
    if not request.custom_id:
        raise ValueError(f"custom_id: must be there, with at most {MAX_CUSTOM_ID} characters")
    if request.custom_id in earlier:
        raise ValueError(f"custom_id: {request.custom_id[:80]!r} has come before")
    if request.url != endpoint:
        raise ValueError(f"url: must be {endpoint}, as the batch says, not {request.url[:80]!r}")
    return request.custom_id


def _lines(path: Path, max_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, place and bytes of each line that is not blank. A line that is too long is cut."""
    with path.open("rb") as file:
        number = place = 0
        while line := file.readline(max_bytes + 2):
            number += 1
            if line.strip():
                yield number, place, line.rstrip()
            while line and not line.endswith(b"\n"):
                line = file.readline(max_bytes + 2)
            place = file.tell()


def _read(path: Path, place: int) -> RequestLine:
    with path.open("rb") as file:
        file.seek(place)
        return request_of(file.readline())


class Batches:
    """Owns the tasks of the batches that have not ended."""

    def __init__(self, storage: Storage, send: Send, max_line_bytes: int) -> None:
        self._storage = storage
        self._send = send
        self._max_line_bytes = max_line_bytes
        self._turns: dict[str, asyncio.Lock] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()

    def start(self, owner: str, batch: BatchObject) -> None:
        """Runs a batch, from where it was."""
        task = asyncio.create_task(self._run(owner, batch), name=batch.id)
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def close(self) -> None:
        """Stops. Batches stay as they are, for the next router."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def cancel(self, owner: str, batch: BatchObject) -> None:
        """Ends a batch. Its results stay. One whose last result is there stays as it is."""
        if batch.status in ("validating", "in_progress") and (task := self._tasks.get(batch.id)) is not None:
            batch.now("cancelling")
            self._cancelled.add(batch.id)
            task.cancel()
            await self._keep(owner, batch)

    async def _run(self, owner: str, batch: BatchObject) -> None:
        try:
            async with asyncio.timeout(max(0, batch.expires_at - timestamp())):
                async with self._turns.setdefault(owner, asyncio.Lock()):
                    await self._advance(owner, batch)
        except TimeoutError:
            await self._finish(owner, batch, "expired")
        except InvalidFile as error:
            batch.errors = {"object": "list", "data": error.errors}
            await self._finish(owner, batch, "failed")
        except ApiError as error:
            await self._fail(owner, batch, error.code or "internal", error.message)
        except asyncio.CancelledError:
            if batch.id not in self._cancelled:
                raise  # the router ends
            self._cancelled.discard(batch.id)
            await self._finish(owner, batch, "cancelled")
        except Exception:
            log.exception("%s", batch.id)
            await self._fail(owner, batch, "internal", "the batch failed inside the router; its log has more")

    async def _advance(self, owner: str, batch: BatchObject) -> None:
        begun = {"cancelling": "cancelled", "finalizing": "completed"}.get(batch.status)
        if begun is not None:  # by a router that ended before the batch did
            await self._finish(owner, batch, begun)
            return
        call = self._storage.call
        path = await call(self._storage.content, owner, batch.input_file_id)
        requests = await call(check, path, batch.endpoint, self._max_line_bytes)
        done = await call(self._storage.results, owner, batch.id, "jsonl.out")
        failed = await call(self._storage.results, owner, batch.id, "jsonl.err")
        counts = batch.request_counts
        counts.total, counts.completed, counts.failed = len(requests), len(done), len(failed)
        if batch.status == "validating":
            batch.now("in_progress")
        await self._keep(owner, batch)
        unanswered = iter([each for each in requests if each[1] not in done | failed])

        async def work() -> None:
            for place, custom_id in unanswered:  # all tasks take from it
                request = await call(_read, path, place)
                good, result = await self._result(owner, custom_id, request)
                kind = "jsonl.out" if good else "jsonl.err"
                line = msgspec.json.encode(result) + b"\n"
                await call(self._storage.append, owner, batch.id, line, kind)
                counts.completed += good
                counts.failed += not good

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENCY, len(requests))):
                    group.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        await self._finish(owner, batch, "completed")

    async def _result(self, owner: str, custom_id: str, request: RequestLine) -> tuple[bool, dict[str, Any]]:
        """Whether a request succeeded, and the line for it. Sends it again while there is no room for it.

        Raises ShuttingDown."""
        name = os.urandom(16).hex()
        # The first of two equal fields does not count, so the request's own priority wins.
        body = b'{"priority":%d,' % PRIORITY + bytes(request.body)[1:].lstrip()
        if body.endswith(b",}"):
            body = b"{}"
        while True:
            try:
                response = await self._send(owner, request.url, body, name)
            except (Overloaded, NoWorker) as error:
                await asyncio.sleep(pause(error.retry_after))
            except ShuttingDown:
                await asyncio.Event().wait()  # until `close`
            except ApiError as error:
                return False, answered(custom_id, name, error.status, error.body)
            except Exception:
                log.exception("request %s", name)
                text = f"request {name} failed inside the router"
                return False, unanswered(custom_id, "internal", text)
            else:
                return True, answered(custom_id, name, 200, msgspec.Raw(response))

    async def _fail(self, owner: str, batch: BatchObject, code: str, text: str) -> None:
        error = {"code": code, "line": None, "message": text, "param": None}
        batch.errors = {"object": "list", "data": [error]}
        await self._finish(owner, batch, "failed")

    async def _finish(self, owner: str, batch: BatchObject, status: str) -> None:
        """Makes files of the results, and ends the batch."""
        if status == "completed":
            batch.now("finalizing")
        await self._storage.call(self._storage.finish, owner, batch, status)

    async def _keep(self, owner: str, batch: BatchObject) -> None:
        await self._storage.call(self._storage.put, owner, batch)
