"""Runs batches: checks the lines of a file, sends the requests, and keeps each result at once.

The requests of a batch come after those of clients: they have a priority behind all others, and the router
refuses them while it expects a longer wait than `MAX_WAIT`. Then they are sent again. A key has one batch at
work; the others wait for it. What was sent and has no result when the router ends is sent again by the next
router.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Container, Generator, Iterator
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
from baton.router.batches.objects import BatchObject, result_id, timestamp
from baton.router.batches.storage import LINE_BYTES, SLICE_BYTES, Storage
from baton.router.errors import ApiError, NoWorker, Overloaded, ShuttingDown

log = logging.getLogger(__name__)

MAX_LINES = 50_000
"""Of a file of requests, blank ones included."""
MAX_ERRORS = 20
"""Of a file, that a batch shows."""
MAX_SENT_BYTES = 32 << 20
"""Of the lines of a batch whose requests are sent or wait for room."""
PRIORITY = 100
MAX_WAIT = 1.0
"""Seconds for which a request may wait in the router: with more the router is busy with clients."""
TIDY_SECONDS = 60.0
"""Between two times at which expired files are removed."""

Send = Callable[[str, str, bytes, str], Awaitable[bytes]]
"""Takes the owner, the path of the endpoint, the body and the request's id. Returns the response in JSON.
Raises ApiError."""


class InvalidFile(Exception):
    """Lines of a file are no requests. `errors`: as a batch shows them."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__()
        self.errors = errors


def check(path: Path, endpoint: str, max_bytes: int) -> Generator[None, None, list[tuple[int, str]]]:
    """Reads a whole file, in slices. Returns the place and the `custom_id` of each request.

    Raises InvalidFile.
    """
    places: dict[str, int] = {}
    errors: list[dict[str, Any]] = []
    done = 0

    def wrong(number: int, text: str) -> None:
        errors.append({"code": "invalid_line", "line": number, "message": text, "param": None})

    for number, place, line, end in _lines(path, max_bytes):
        if len(errors) == MAX_ERRORS:
            break
        if number > MAX_LINES:
            wrong(number, f"the file of a batch has at most {MAX_LINES} lines, blank ones included")
            break
        try:
            if len(line) > max_bytes:
                raise ValueError(f"a line has at most {max_bytes} bytes")
            if line and not line.isspace():
                places[_custom_id(line, endpoint, places)] = place
        except ValueError as error:
            wrong(number, str(error))
        if number * LINE_BYTES + end >= done + SLICE_BYTES:
            done = number * LINE_BYTES + end
            yield
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


def _lines(path: Path, max_bytes: int) -> Iterator[tuple[int, int, bytes, int]]:
    """Number, place and bytes of each line, and how far the file is read.

    A line that is too long comes as `max_bytes` + 2 bytes, and then as pieces without bytes.
    """
    with path.open("rb") as file:
        number = place = 0
        while line := file.readline(max_bytes + 2):
            number += 1
            yield number, place, line.removesuffix(b"\n"), file.tell()
            while line and not line.endswith(b"\n"):
                line = file.readline(SLICE_BYTES)
                yield number, place, b"", file.tell()
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
        self._cancellable: set[str] = set()
        """Batches that wait for their turn, or whose requests are sent."""
        self._tidying: asyncio.Task[None] | None = None
        self._closed = False

    async def open(self) -> None:
        """Goes on with batches that have not ended. Raises ValueError for a directory that cannot be used."""
        await self._storage.call("", self._storage.open)
        for owner in self._storage.owners():
            for batch in await self._storage.call(owner, self._storage.all_of, owner, BatchObject):
                if not batch.ended:
                    self._start(owner, batch)
        self._tidying = asyncio.create_task(self._tidy(), name="batches: tidy")

    async def close(self) -> None:
        """Stops. Batches stay as they are, for the next router."""
        self._closed = True
        tasks = [*self._tasks.values(), *([] if self._tidying is None else [self._tidying])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, owner: str, batch: BatchObject) -> None:
        """Keeps a batch, and runs it. A client that leaves meanwhile changes nothing.

        Raises RateLimited and BodyTooLarge.
        """

        def start(put: asyncio.Future[None]) -> None:
            if not put.cancelled() and put.exception() is None:
                self._start(owner, batch)

        put = asyncio.ensure_future(self._keep(owner, batch))
        put.add_done_callback(start)
        await asyncio.shield(put)

    def _start(self, owner: str, batch: BatchObject) -> None:
        """Runs a batch, from where it was."""
        if not self._closed:
            task = asyncio.create_task(self._run(owner, batch), name=batch.id)
            self._tasks[batch.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def cancel(self, owner: str, batch: BatchObject) -> None:
        """Ends a batch. Its results stay. One whose last result is there stays as it is."""
        if batch.status in ("validating", "in_progress"):
            batch.now("cancelling")
            if batch.id in self._cancellable:
                self._tasks[batch.id].cancel()
            await self._keep(owner, batch)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            for owner in self._storage.owners():
                try:
                    await self._storage.call(owner, self._storage.tidy, owner)
                except Exception:
                    log.exception("files of %s", owner)

    async def _run(self, owner: str, batch: BatchObject) -> None:
        """Runs a batch to its end. From the last `await` of its work on, nothing cancels it."""
        status, error = "failed", None
        try:
            status = await self._work(owner, batch)
        except InvalidFile as invalid:
            batch.errors = {"object": "list", "data": invalid.errors}
        except ApiError as caught:
            error = caught
        except Exception:
            log.exception("%s", batch.id)
            error = ApiError("the batch failed inside the router; its log has more")
        if error is not None:
            shown = {"code": error.code or "internal", "line": None, "message": error.message, "param": None}
            batch.errors = {"object": "list", "data": [shown]}
        if status == "completed":
            batch.now("finalizing")
        elif batch.status != "cancelling":
            batch.status = "finalizing"
        await self._storage.call(owner, self._storage.finish, owner, batch, status)

    async def _work(self, owner: str, batch: BatchObject) -> str:
        """Sends the requests. Returns the status that the batch ends with.

        Raises InvalidFile and ApiError.
        """
        results = self._storage.results
        done = await self._storage.in_slices(owner, results(owner, batch.id, "output"))
        failed = await self._storage.in_slices(owner, results(owner, batch.id, "error"))
        batch.request_counts.completed, batch.request_counts.failed = len(done), len(failed)
        if batch.status == "cancelling":
            return "cancelled"
        self._cancellable.add(batch.id)
        try:
            async with asyncio.timeout(max(0, batch.expires_at - timestamp())):
                async with self._turns.setdefault(owner, asyncio.Lock()):
                    await self._send_all(owner, batch, done | failed)
        except TimeoutError:
            return "expired"
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise  # the router ends
            return "cancelled"
        finally:
            self._cancellable.discard(batch.id)
        return "completed"

    async def _send_all(self, owner: str, batch: BatchObject, done: set[str]) -> None:
        """Checks the file of the batch, and sends its requests without those that are `done`."""
        call = self._storage.call
        path = await call(owner, self._storage.content, owner, batch.input_file_id)
        requests = await self._storage.in_slices(owner, check(path, batch.endpoint, self._max_line_bytes))
        batch.request_counts.total = len(requests)
        ends = [place for place, _ in requests[1:]] + [await call(owner, lambda: path.stat().st_size)]
        longest = max(end - place for end, (place, _) in zip(ends, requests, strict=True))
        if batch.status != "in_progress":
            batch.now("in_progress")
        await self._keep(owner, batch)
        unanswered = iter([each for each in requests if each[1] not in done])

        async def work() -> None:
            for place, custom_id in unanswered:  # all tasks take from it
                request = await call(owner, _read, path, place)
                good, result = await self._result(owner, custom_id, request)
                await call(owner, self._add, owner, batch, good, msgspec.json.encode(result) + b"\n")

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(CONCURRENCY, len(requests), max(1, MAX_SENT_BYTES // longest))):
                    group.create_task(work())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def _add(self, owner: str, batch: BatchObject, good: bool, line: bytes) -> None:
        """Keeps a result and counts it: in the thread of the storage, so no cancel comes between the two."""
        self._storage.append(owner, result_id(batch.id, "output" if good else "error"), line)
        batch.request_counts.completed += good
        batch.request_counts.failed += not good

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

    async def _keep(self, owner: str, batch: BatchObject) -> None:
        await self._storage.call(owner, self._storage.put, owner, batch)
