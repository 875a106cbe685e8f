"""`baton run-batch`: sends the requests of a file in OpenAI's batch form, and writes their responses.

A line of the input is `{"custom_id": …, "method": "POST", "url": "/v1/completions", "body": {…}}`. A line of
the output has the `custom_id`, and a `response` or an `error`. Lines are written as answers come.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import aiohttp

from baton.cluster.options.clients import EndpointOptions, RunBatchOptions
from baton.cluster.tools.http import session
from baton.router.batches.lines import RequestLine, answered, pause, request_of, unanswered
from baton.system.lines import bounded_lines
from baton.system.words import counted

TRIES = 20
"""Of a request that the server has no room for (429), or no worker (503)."""
AGAIN = (429, 503)


def run(endpoint: EndpointOptions, batch: RunBatchOptions) -> int:
    """Returns 1 if a request failed. Raises ValueError for unusable files, and without a server."""
    if batch.input_file is None or batch.output_file is None:
        raise ValueError("give both files: -i INPUT -o OUTPUT")
    with _opened(batch.output_file, batch.input_file) as output:
        done, failed = asyncio.run(send(endpoint, batch.input_file, output, batch.concurrency))
    print(f"{counted(done, 'request')}, {failed} failed; {batch.output_file} written.", file=sys.stderr)
    return 1 if failed else 0


async def send(endpoint: EndpointOptions, source: Path, output: IO[str], concurrency: int) -> tuple[int, int]:
    """Sends all requests, so many at a time. Returns how many there were, and how many failed."""
    lines, counts = _lines(source), [0, 0]

    async def work(http: aiohttp.ClientSession) -> None:
        for request in lines:  # all tasks take from it
            result = await _answer(http, request)
            counts[0] += 1
            counts[1] += result["error"] is not None or result["response"]["status_code"] != 200
            output.write(json.dumps(result) + "\n")
            output.flush()

    async with session(endpoint, aiohttp.ClientTimeout(total=None)) as http:
        tasks = [asyncio.create_task(work(http)) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return counts[0], counts[1]


def _opened(path: Path, source: Path) -> IO[str]:
    """The output. Raises ValueError if it cannot be written, or is the input."""
    try:
        if path.is_file() and path.samefile(source):
            raise ValueError(f"-o {path}: it is the input, which would be lost; name another file")
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"-o {path}: {error.strerror}; name a file that you may write to") from error


def _lines(source: Path) -> Iterator[RequestLine]:
    """Raises ValueError that names the line."""
    with source.open("rb") as file:
        try:
            for number, line in bounded_lines(file):
                if line.strip():
                    yield _request(number, line)
        except ValueError as error:
            raise ValueError(f"{source}, {error}") from None


def _request(number: int, line: bytes) -> RequestLine:
    try:
        return request_of(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


async def _answer(http: aiohttp.ClientSession, request: RequestLine) -> dict[str, Any]:
    """The line of the output. Asks again while the server has no room."""
    body = {**json.loads(bytes(request.body)), "stream": False}
    for tries in reversed(range(TRIES)):
        async with http.post(request.url.lstrip("/"), json=body) as response:
            name = response.headers.get("x-request-id", "")
            if response.status in AGAIN and tries:
                await asyncio.sleep(pause(response.headers.get("Retry-After")))
                continue
            text = await response.text()
            try:
                return answered(request.custom_id, name, response.status, json.loads(text))
            except ValueError:
                return unanswered(request.custom_id, "invalid_response", text[:1000])
    raise AssertionError("the last try returns")
