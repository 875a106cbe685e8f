"""HTTP calls by which a trainer moves weights, as vLLM has them. They need the admin key.

    /init_weight_transfer_engine, once ─▶ /start_weight_update ─▶ /update_weights ─▶ /finish_weight_update
                                              │ begins an update     │ all workers       │ all workers compute
                                              └ ends one before it   └ read and check    └ with the weights

Nothing changes before the last call. An update whose trainer has died ends after `request_timeout`.
"""

import asyncio
import contextlib
import logging

from aiohttp import web

from baton.router import errors
from baton.router.api.admin_bodies import FinishWeightsBody, InitTransferBody, UpdateInfoBody
from baton.router.api.validation import parse
from baton.router.config import RouterConfig
from baton.router.endpoints.http_admin import AdminCalls, Handler, Status
from baton.router.endpoints.http_weights import new_version, workers_for_weights
from baton.rpc.all_workers import NotDone
from baton.rpc.weights import Replacement, named, outcome_of, replacement_at

log = logging.getLogger(__name__)


class _Update:
    """Between start and finish."""

    def __init__(self) -> None:
        self.calls = contextlib.AsyncExitStack()
        self.replacement: Replacement | None = None
        """Its weights are staged."""
        self.names: dict[str, str] = {}
        self.expiry: asyncio.TimerHandle | None = None


class HttpWeightTransfer(AdminCalls):
    def __init__(self, config: RouterConfig, status: Status) -> None:
        super().__init__(config, status)
        self._update: _Update | None = None
        self._one_at_a_time = asyncio.Lock()
        self._expiring: asyncio.Task[None] | None = None

    def handlers(self) -> dict[str, Handler]:
        return {
            "POST /init_weight_transfer_engine": self._init,
            "POST /start_weight_update": self._start,
            "POST /update_weights": self._stage,
            "POST /finish_weight_update": self._finish,
        }

    async def close(self, app: web.Application) -> None:
        """Ends the update that is under way, if there is one. Workers keep their weights."""
        async with self._one_at_a_time:
            await self._end()

    async def _init(self, request: web.Request) -> web.Response:
        parse(InitTransferBody, await self.body(request))  # there is one backend
        return web.json_response({"message": "Weight transfer initialized"})

    async def _start(self, request: web.Request) -> web.Response:
        async with self._one_at_a_time:
            await self._end()  # its trainer has died, and begins again
            self._update = _Update()
            self._expires_later(self._update)
        return web.json_response({"message": "Weight update started"})

    async def _stage(self, request: web.Request) -> web.Response:
        path = parse(UpdateInfoBody, await self.body(request)).update_info.path
        async with self._one_at_a_time:
            update = self._started()
            if update.replacement is not None:
                raise errors.InvalidRequest("this update has its weights: call /finish_weight_update")
            update.names = await workers_for_weights(self)
            config = self.config
            opened = replacement_at(list(update.names), config.secret, config.cluster_tls)
            try:
                replacement = await update.calls.enter_async_context(opened)
                weights = named(path, new_version(None))
                nbytes, seconds = await replacement.stage(weights)
            except NotDone as error:
                await self._end()
                raise self.failed(error, update.names, outcome_of(error), "update_info") from error
            except BaseException:
                await self._end()
                raise
            update.replacement = replacement
            self._expires_later(update)
        fields = {"message": "Weights updated", "bytes": nbytes, "read_seconds": seconds}
        return web.json_response(fields)

    async def _finish(self, request: web.Request) -> web.Response:
        raw = await self.body(request)
        label = parse(FinishWeightsBody, raw).weight_version if raw.strip() else None
        async with self._one_at_a_time:
            update = self._started()
            if update.replacement is None:
                raise errors.InvalidRequest("this update has no weights: call /update_weights first")
            version = new_version(label)
            try:
                pause = await update.replacement.apply(version)
            except NotDone as error:
                raise self.failed(error, update.names, outcome_of(error), "update_info") from error
            finally:
                await self._end()
        fields = {"message": "Weight update finished", "weight_version": version, "pause_seconds": pause}
        return web.json_response(fields)

    def _started(self) -> _Update:
        if self._update is None:
            raise errors.InvalidRequest("no update of the weights has begun: call /start_weight_update first")
        return self._update

    def _expires_later(self, update: _Update) -> None:
        if update.expiry is not None:
            update.expiry.cancel()
        seconds = self.config.request_timeout
        update.expiry = asyncio.get_running_loop().call_later(seconds, self._expire, update)

    def _expire(self, update: _Update) -> None:
        expired = update.expiry

        async def expire() -> None:
            async with self._one_at_a_time:
                if self._update is update and update.expiry is expired:  # no call went on with it
                    log.warning("the update of the weights was not finished in time, and changes nothing")
                    await self._end()

        self._expiring = asyncio.create_task(expire())

    async def _end(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            if update.expiry is not None:
                update.expiry.cancel()
            await update.calls.aclose()
