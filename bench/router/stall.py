"""The longest stall of the router's event loop beside one large request, as another client sees it.

A child process asks for /health again and again over one connection. The event loop itself answers, so the
longest answer takes as long as the longest stall, plus the delays of the machine's scheduler.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from multiprocessing.sharedctypes import Synchronized
from urllib.parse import urlsplit

from baton.bench.router.ends import CONTEXT

_PAUSE_S = 0.0005
_ASK = b"GET /health HTTP/1.1\r\nHost: bench\r\n\r\n"
_BYTES = (16 << 20) - 1024
"""Just below the default of `--max-body-bytes`."""
_LONG_ANSWER = {"n": 16, "max_tokens": 1000}
_SENTENCE = "The router chooses a worker, and sends it what to read. "


def large_requests() -> dict[str, tuple[str, bytes]]:
    """Path and body by name: 300,000 messages, 16 MB of each field that can be long, and a long answer."""
    text = _SENTENCE * (_BYTES // len(_SENTENCE))
    ids = [100] * (_BYTES // len("100, "))
    chat, short = "/v1/chat/completions", {"role": "user", "content": "Hi"}
    settings = {"a": [[]] * (_BYTES // 4)}
    requests = {
        "messages": (chat, {"messages": [short] * 300_000}),
        "message": (chat, {"messages": [short | {"content": text}]}),
        "settings": (chat, {"messages": [short], "chat_template_kwargs": settings, "max_tokens": 1}),
        "text": ("/v1/completions", {"prompt": text}),
        "token_ids": ("/v1/completions", {"prompt": ids}),
        "invocation": ("/invocations", {"prompt": ids}),
        "responses": ("/v1/responses", {"input": ids}),
        "tokenize": ("/tokenize", {"prompt": text[: 1 << 20]}),  # 16 MB would take half a minute
        "detokenize": ("/detokenize", {"tokens": ids}),
        "answer": ("/v1/completions", {"prompt": [100], "logprobs": 20, "ignore_eos": True} | _LONG_ANSWER),
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in requests.items()}


def longest_stalls(url: str, requests: dict[str, tuple[str, bytes]], repeats: int) -> dict[str, list[float]]:
    """The longest stall beside each request, in milliseconds. Sends one request at a time."""
    found: dict[str, list[float]] = {name: [] for name in requests}
    with Watch(url) as watch:
        for _ in range(repeats):
            for name, (path, body) in requests.items():
                found[name].append(longest_stall(watch, url, path, body))
    return found


class Watch:
    """Asks for /health until it is closed. `longest` is in seconds and may be reset at any time."""

    def __init__(self, url: str) -> None:
        self.longest = CONTEXT.Value("d", 0.0)
        self._process = CONTEXT.Process(target=_watch, args=(url, self.longest), daemon=True)

    def __enter__(self) -> Watch:
        self._process.start()
        while not self.longest.value:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def longest_stall(watch: Watch, url: str, path: str, body: bytes) -> float:
    """The longest stall in milliseconds while one request is sent and answered."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    watch.longest.value = 0.0
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status not in (200, 400):
        raise RuntimeError(f"{path}: the router answered {answer.status}")
    return 1e3 * watch.longest.value


def _watch(url: str, longest: Synchronized[float]) -> None:
    where = urlsplit(url)
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            asked = time.perf_counter()
            connection.sendall(_ASK)
            if not connection.recv(4096):
                return
            longest.value = max(longest.value, time.perf_counter() - asked)
            time.sleep(_PAUSE_S)
