"""All calls with the admin key, which workers carry out."""

from aiohttp import web

from baton.router.config import RouterConfig
from baton.router.endpoints.http_adapters import HttpAdapters
from baton.router.endpoints.http_admin import Status
from baton.router.endpoints.http_pause import HttpPause
from baton.router.endpoints.http_weight_transfer import HttpWeightTransfer
from baton.router.endpoints.http_weights import HttpWeights


def add_admin_calls(app: web.Application, config: RouterConfig, status: Status) -> None:
    transfer = HttpWeightTransfer(config, status)
    app.on_cleanup.append(transfer.close)
    for calls in (transfer, *(each(config, status) for each in (HttpWeights, HttpPause, HttpAdapters))):
        app.add_routes(calls.routes())
