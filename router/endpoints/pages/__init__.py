"""The pages for browsers: the first one, a chat, the HTTP API and the dashboard.

They are files in this folder, which need nothing from other hosts and no inline script. `uPlot.*` draws
plots; it comes from npm with its licence (`make vendor`).
"""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from aiohttp import web

_FOLDER = Path(__file__).parent
_TYPES = {".js": "text/javascript", ".css": "text/css", ".LICENSE": "text/plain"}
PARTS = tuple(sorted(file.name for file in _FOLDER.iterdir() if file.suffix in _TYPES))
"""Scripts and styles of the pages. They hold no data, so they need no key."""
_LINKS = re.compile(r'href="(\w+)"')
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src {connect}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def routes(names: Iterable[str]) -> list[web.RouteDef]:
    """Returns the routes of these pages (`home` is at /) and of their parts. A page leads only to these."""
    served = tuple(names)
    pages = [web.get(f"/{name}", partial(_send, _part(name))) for name in PARTS]
    for name in served:
        text = (_FOLDER / f"{name}.html").read_text()
        lines = [line for line in text.splitlines() if {*_LINKS.findall(line)} <= {*served}]
        # A chat may be with another server, which the user names.
        connect = "'self' http: https:" if name == "chat" else "'self'"
        headers = _HEADERS | {"Content-Security-Policy": _POLICY.format(connect=connect)}
        page = "\n".join(lines).encode(), "text/html", headers
        pages.append(web.get("/" if name == "home" else f"/{name}", partial(_send, page)))
    return pages


Page = tuple[bytes, str, dict[str, str]]
"""Bytes, type and headers."""


def _part(name: str) -> Page:
    file = _FOLDER / name
    return file.read_bytes(), _TYPES[file.suffix], _HEADERS


async def _send(page: Page, request: web.Request) -> web.Response:
    body, kind, headers = page
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)
