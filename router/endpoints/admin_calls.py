"""All calls with the admin key, which workers carry out."""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from baton.router.config import RouterConfig
from baton.router.endpoints.http_adapters import HttpAdapters
from baton.router.endpoints.http_admin import AdminCalls
from baton.router.endpoints.http_pause import HttpPause
from baton.router.endpoints.http_weight_transfer import HttpWeightTransfer
from baton.router.endpoints.http_weights import HttpWeights


def add_admin_calls(
    app: web.Application, config: RouterConfig, status: Callable[[], Awaitable[dict[str, Any]]]
) -> None:
    """`status`: gives what `/status` shows."""
    calls = AdminCalls(config, status)
    transfer = HttpWeightTransfer(calls)
    app.on_cleanup.append(transfer.close)
    for handlers in (HttpWeights(calls), HttpPause(calls), transfer, HttpAdapters(calls)):
        app.add_routes(handlers.routes())
