"""A fake API server of Kubernetes over real HTTP: list and watch of EndpointSlices.

It has resource versions, bookmarks, 410 Gone, and several ways to lose a connection.
"""

import asyncio
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

TOKEN = "a token of the tests"
NAMESPACE = "models"
PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
Object = dict[str, Any]


def endpoint(address: str, ready: bool | None = True, pod: str = "") -> Object:
    reference = {"targetRef": {"kind": "Pod", "uid": pod}} if pod else {}
    return {"addresses": [address], "conditions": {"ready": ready, "serving": ready}, **reference}


class FakeKubernetes:
    """The objects outlive `stop`. A later `start` uses the same port.

    Attributes:
        asked: the query of every request, in order.
        deny: HTTP status of every answer; 0: none.
        gone_as_event: 410 comes as an event in an open stream, as from a watch cache; else as the status.
        hasty: a watch ends as soon as it is open.
        token: the bearer token that a request must have.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.token = TOKEN
        self._tls = tls
        self.asked: list[Mapping[str, str]] = []
        self.deny = 0
        self.gone_as_event = True
        self.hasty = False
        self._version = 100
        self._objects: dict[str, Object] = {}
        self._history: list[tuple[int, str, Object]] = []
        self._forgotten = 0  # the server no longer knows events up to this version
        self._changed = asyncio.Event()
        self._ended = 0  # how often all watches were ended
        self._open: set[asyncio.Transport] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    # ------------------------------------------------------------ for tests

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(PATH, self._endpoint_slices)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True, ssl_context=self._tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            self.cut()
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, path: Path) -> Path:
        """Writes a kubeconfig for this server. Returns its path."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "current-context": "x",
        }
        path.write_text(json.dumps(config))
        return path

    def put(
        self,
        name: str,
        service: str,
        endpoints: Sequence[Object] | None,
        port: int = 7001,
        *,
        silently: bool = False,
    ) -> None:
        """Creates or replaces a slice. `silently`: watches get no event."""
        kind = "MODIFIED" if name in self._objects else "ADDED"
        self._objects[name] = {
            "kind": "EndpointSlice",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4",
            "endpoints": endpoints,
            "ports": [{"name": "metrics", "port": 9}, {"name": "grpc", "port": port, "protocol": "TCP"}],
        }
        self._happened(kind, self._objects[name], silently)

    def delete(self, name: str, *, silently: bool = False) -> None:
        self._happened("DELETED", self._objects.pop(name), silently)

    def bookmark(self) -> None:
        """Sends a bookmark with a much later version to all watches."""
        self._version += 50
        metadata = {"resourceVersion": str(self._version)}
        self._history.append((self._version, "BOOKMARK", {"kind": "EndpointSlice", "metadata": metadata}))
        self._wake()

    def forget(self) -> None:
        """Compacts the history: a watch from an earlier version gets 410."""
        self._version += 1
        self._forgotten = self._version
        self._history.clear()

    def cut(self) -> None:
        """Resets every open connection."""
        for transport in self._open:
            transport.abort()

    def end_watches(self) -> None:
        """As when their time is over, after all events up to now."""
        self._ended += 1
        self._wake()

    def watches(self) -> list[str]:
        """The versions from which watches began."""
        return [query["resourceVersion"] for query in self.asked if query.get("watch") == "true"]

    def lists(self) -> int:
        return sum("watch" not in query for query in self.asked)

    @property
    def watched(self) -> int:
        """The number of open watches."""
        return len(self._open)

    # ------------------------------------------------------------ answers

    def _happened(self, kind: str, thing: Object, silently: bool) -> None:
        self._version += 1
        thing["metadata"] = thing["metadata"] | {"resourceVersion": str(self._version)}
        if not silently:
            self._history.append((self._version, kind, dict(thing)))
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _endpoint_slices(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        if request.headers.get("authorization", "").replace("bearer", "Bearer") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if self.deny:
            return _status(self.deny, "endpointslices is forbidden")
        selector = re.fullmatch(
            r"kubernetes\.io/service-name in \((.*)\)", request.query.get("labelSelector", "")
        )
        assert selector, "the request must name its services"
        services = selector[1].split(",")
        if request.query.get("watch") == "true":
            return await self._watch(request, services)
        items = [each for each in self._objects.values() if _service(each) in services]
        answer = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": str(self._version)}}
        return web.json_response({**answer, "items": items})

    async def _watch(self, request: web.Request, services: list[str]) -> web.StreamResponse:
        seen = int(request.query["resourceVersion"])
        too_old = _gone(seen) if seen < self._forgotten else None
        if too_old and not self.gone_as_event:
            return _status(410, too_old["message"])
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        assert transport is not None
        self._open.add(transport)
        try:
            if too_old:
                await _say(response, "ERROR", too_old)
            elif not self.hasty:
                async with asyncio.timeout(int(request.query["timeoutSeconds"])):
                    await self._tell(response, seen, services)
        except TimeoutError:
            pass  # the watch ends after its timeout
        finally:
            self._open.discard(transport)
        return response

    async def _tell(self, response: web.StreamResponse, seen: int, services: list[str]) -> None:
        ended = self._ended
        while True:
            changed = self._changed
            for version, kind, thing in list(self._history):
                if version > seen and (kind == "BOOKMARK" or _service(thing) in services):
                    await _say(response, kind, thing)
                seen = max(seen, version)
            if self._ended > ended:
                return
            await changed.wait()


async def _say(response: web.StreamResponse, kind: str, thing: Object) -> None:
    await response.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")


def _service(thing: Object) -> str:
    return thing["metadata"].get("labels", {}).get("kubernetes.io/service-name", "")


def _gone(version: int) -> Object:
    return {
        "kind": "Status",
        "status": "Failure",
        "reason": "Expired",
        "code": 410,
        "message": f"too old resource version: {version}",
    }


def _status(code: int, message: str) -> web.Response:
    return web.json_response(
        {"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code
    )
