"""HTTP calls that replace the weights of all workers, as SGLang has them. They need the admin key."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from aiohttp import web

from baton.router import errors
from baton.router.admission.keys import KeyRing
from baton.router.api.bodies import UpdateWeightsBody
from baton.router.api.validation import parse
from baton.router.config import RouterConfig
from baton.router.endpoints.http_generation import authorization
from baton.router.workers.checks import explain
from baton.rpc import worker_pb2 as pb
from baton.rpc.weights import NotReplaced, replace_weights

Handler = Callable[[web.Request], Awaitable[web.Response]]

PATHS = "/get_world_size", "/update_weights_from_disk"
_OFF = "is off: start the router with --admin-key-file FILE or BATON_ADMIN_KEY, and send that key"
_KEY = "send the key of --admin-key-file or BATON_ADMIN_KEY as `Authorization: Bearer KEY`"


class HttpWeights:
    """Of one router: its only process serves them, or its supervisor."""

    def __init__(self, config: RouterConfig, status: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """`status`: gives what `/status` shows."""
        self._config = config
        self._status = status
        self._keys = None if config.admin_key is None else KeyRing((config.admin_key,))

    def routes(self) -> list[web.RouteDef]:
        world_size, update = PATHS
        return [
            web.get(world_size, self._answered(self._world_size)),
            web.post(update, self._answered(self._update)),
        ]

    def _answered(self, handler: Handler) -> Handler:
        """Checks the key, and turns errors into responses."""

        async def answer(request: web.Request) -> web.Response:
            try:
                if self._keys is None:
                    raise errors.NotFound(f"{request.path} {_OFF}")
                try:
                    self._keys.authorize(authorization(request))
                except errors.Unauthorized:
                    raise errors.Unauthorized(_KEY) from None
                return await handler(request)
            except errors.ApiError as error:
                return web.json_response(error.body, status=error.status)

        return answer

    async def _world_size(self, request: web.Request) -> web.Response:
        workers = (await self._status())["workers"]
        size = sum(worker["description"]["tensor_parallel_size"] for worker in workers)
        return web.json_response({"world_size": size})

    async def _update(self, request: web.Request) -> web.Response:
        body = parse(UpdateWeightsBody, await self._body(request))
        workers = (await self._status())["workers"]
        # A worker that has started again with the weights of its --model is refused: it gets these, too.
        missing = [worker for worker in workers if worker["state"] not in ("ready", "refused")]
        if missing or not workers:
            names = ", ".join(_name(worker) for worker in missing) or "no worker is known"
            text = "all workers must be ready to get new weights; see `baton status`"
            raise errors.NoWorker(f"{names}: {text}")
        names = {worker["address"]: _name(worker) for worker in workers}
        label = "" if body.weight_version is None else f"{body.weight_version}-"
        weights = pb.StageWeights(path=body.model_path, version=f"{label}{uuid.uuid4().hex}")
        config = self._config
        try:
            done = await replace_weights(list(names), weights, config.secret, config.cluster_tls)
        except NotReplaced as error:
            raise self._failed(error, names) from error
        text = f"{len(names)} workers compute with {weights.path}; no worker served for {done.pause:.2f} s"
        found = {"success": True, "message": text, "weight_version": weights.version}
        return web.json_response({**found, "num_paused_requests": 0})

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._config.client_timeout):
                return await request.read()
        except TimeoutError:
            raise errors.TooSlow(f"no whole body within {self._config.client_timeout:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise errors.BodyTooLarge("the body is too large") from None

    def _failed(self, error: NotReplaced, names: dict[str, str]) -> errors.ApiError:
        refused, faults = not error.changed, list[str]()
        for address, fault in error.faults.items():
            if fault is not None and fault.code() is grpc.StatusCode.FAILED_PRECONDITION:
                why = fault.details() or ""
            else:
                refused = False
                files = self._config.cluster_tls is not None
                why = "it ended the call" if fault is None else explain(fault, files=files)[0]
            faults.append(f"{names[address]}: {why}")
        text = f"{'; '.join(faults)}. {error.outcome}"
        return errors.InvalidRequest(text, param="model_path") if refused else errors.Failed(text)


def _name(worker: dict[str, Any]) -> str:
    return f"{worker['role']} {worker['index']} at {worker['address']}"
