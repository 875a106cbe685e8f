"""What the calls with the admin key share: the key, their errors, their bodies, and the workers they name."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from aiohttp import web

from baton.router import errors
from baton.router.admission.keys import KeyRing
from baton.router.config import RouterConfig
from baton.router.endpoints.http_connections import refusal, serving_key
from baton.router.endpoints.http_generation import authorization
from baton.router.workers.checks import explain
from baton.rpc.all_workers import NotDone

CONNECT_CHECK = 0.05  # seconds
Handler = Callable[[web.Request], Awaitable[web.Response]]
Status = Callable[[], Awaitable[dict[str, Any]]]
"""Gives what `/status` shows."""

_REFUSED = grpc.StatusCode.FAILED_PRECONDITION
_OFF = "is off: start the router with --admin-key-file FILE or BATON_ADMIN_KEY, and send that key"
_KEY = "send the key of --admin-key-file or BATON_ADMIN_KEY as `Authorization: Bearer KEY`"


class AdminCalls:
    """Of one router: its only process serves them, or its supervisor. A subclass has the handlers."""

    def __init__(self, config: RouterConfig, status: Status) -> None:
        self.config = config
        self.status = status
        self._keys = None if config.admin_key is None else KeyRing((config.admin_key,))

    def handlers(self) -> dict[str, Handler]:
        """By method and path."""
        raise NotImplementedError

    def routes(self) -> list[web.RouteDef]:
        named = ((*call.split(), handler) for call, handler in self.handlers().items())
        return [web.route(method, path, self._answered(handler)) for method, path, handler in named]

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
                with serving_key(request):
                    return await handler(request)
            except errors.ApiError as error:
                return refusal(error)

        return answer

    async def body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self.config.client_timeout):
                return await request.read()
        except TimeoutError:
            raise errors.TooSlow(f"no whole body within {self.config.client_timeout:g} s") from None
        except web.HTTPRequestEntityTooLarge:
            raise errors.BodyTooLarge("the body is too large") from None
        except web.RequestPayloadError as error:
            raise errors.InvalidRequest(f"the body cannot be read: {error}") from None

    async def ready_workers(self, purpose: str, within: float = 0.0) -> list[dict[str, Any]]:
        """All workers of the status, once each can take a call. Raises NoWorker after `within` seconds, which
        says what they are needed for.

        A worker is refused while it has other weights or adapters than the others. It can take a call."""
        end = time.monotonic() + within
        while True:
            workers = (await self.status())["workers"]
            missing = [worker for worker in workers if worker["state"] not in ("ready", "refused")]
            if workers and not missing:
                return workers
            if not workers or time.monotonic() >= end:
                names = ", ".join(map(name_of, missing)) or "no worker is known"
                text = f"all workers must be ready to {purpose}; see `baton status`"
                raise errors.NoWorker(f"{names}: {text}")
            await asyncio.sleep(CONNECT_CHECK)

    def failed(
        self,
        error: NotDone,
        names: Mapping[str, str],
        outcome: str,
        param: str | None = None,
    ) -> errors.ApiError:
        """The answer to a call that not all workers have carried out, of which `outcome` tells the end.
        `names`: of workers, by address.

        A call that workers refuse is the client's fault, unless it has changed other workers. `param`: the
        field of the body that is at fault then."""
        causes = "; ".join(f"{names[address]}: {self._why(fault)}" for address, fault in error.faults.items())
        refused = all(fault is not None and fault.code() is _REFUSED for fault in error.faults.values())
        text = f"{causes}. {outcome}"
        if error.changed or not refused:
            return errors.Failed(text)
        return errors.InvalidRequest(text, param=param)

    def _why(self, fault: grpc.aio.AioRpcError | None) -> str:
        if fault is None:
            return "it ended the call"
        if fault.code() is _REFUSED:
            return fault.details() or ""
        return explain(fault, files=self.config.cluster_tls is not None)[0]


def name_of(worker: Mapping[str, Any]) -> str:
    """Of a worker in the status."""
    return f"{worker['role']} {worker['index']} at {worker['address']}"
