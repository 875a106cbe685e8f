"""Finds workers or routers on Kubernetes: lists and watches the ready endpoints of Services.

Life:

1. List the EndpointSlices.
2. Watch from the version of the list for `WATCH_SECONDS`.
3. Watch again from the last version seen, and so on.
4. List again every `RESYNC_SECONDS`, and when the server has dropped our version (410 Gone).

While the API server cannot be reached, the last addresses stay and requests are retried with growing delays.
This is the protocol of https://kubernetes.io/docs/reference/using-api/api-concepts/.

The pod's ServiceAccount needs only `list` and `watch` of `endpointslices` in its own namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

if TYPE_CHECKING:
    from kubernetes.aio.client import DiscoveryV1Api

log = logging.getLogger(__name__)

WATCH_SECONDS = 30  # after which the server ends a watch; a dead connection times out TIMEOUT later
RESYNC_SECONDS = 300.0
TIMEOUT = 5.0  # seconds for the server to answer a list, or to end a watch after WATCH_SECONDS
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 5.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
SERVICE_LABEL = "kubernetes.io/service-name"


class Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class Conditions(msgspec.Struct):
    ready: bool | None = None  # None means ready


class TargetRef(msgspec.Struct):
    uid: str = ""


class Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: Conditions = msgspec.field(default_factory=Conditions)
    target_ref: TargetRef | None = None


class Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, rename="camel"):
    """The fields of a `discovery.k8s.io/v1` EndpointSlice that are read. A bookmark has no address."""

    metadata: Metadata
    address_type: str = ""
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


def ready_addresses(slices: Iterable[EndpointSlice], port: str) -> frozenset[str]:
    """The "HOST:PORT" of every ready endpoint, for the Service port of this name. The workers of a group have
    ports of this name with a number, such as grpc-1.

    The endpoints of a Service are spread over several slices. While Kubernetes moves an endpoint, two slices
    contain it. A dual-stack Service has an endpoint for each address family: of these, "IPv4" sorts first.
    """
    of_pod: dict[str, tuple[str, str, list[int]]] = {}  # pod or host → family, host and ports
    named = re.compile(rf"{re.escape(port)}(-\d+)?")
    for each in slices:
        ports = [p.port for p in each.ports or () if p.port is not None and named.fullmatch(p.name or "")]
        for endpoint in each.endpoints or ():
            if not endpoint.addresses or endpoint.conditions.ready is False:
                continue
            host = endpoint.addresses[0]  # "the addresses of an endpoint are fungible"
            address = each.address_type, f"[{host}]" if each.address_type == "IPv6" else host, ports
            pod = (endpoint.target_ref or TargetRef()).uid or f"{host} {ports}"
            of_pod[pod] = min(address, of_pod.get(pod, address))
    return frozenset(f"{host}:{number}" for _, host, ports in of_pod.values() for number in ports)


class _List(msgspec.Struct):
    metadata: Metadata
    items: list[EndpointSlice] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Refused(Exception):
    """The server answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        right = " (the pod's ServiceAccount needs list and watch of endpointslices)" if code == 403 else ""
        super().__init__(f"{code}: {message}{right}")
        self.code = code


_RETRIED = (
    aiohttp.ClientError,
    OSError,
    TimeoutError,
    ValueError,  # raised by aiohttp for a line longer than its buffer
    msgspec.MsgspecError,
    _Refused,
)


class KubernetesDiscovery:
    """A `router.discovery.Discovery`: the ready endpoints of `services` in this pod's own namespace.

    `port` is the name of the Service port that the addresses are for. Owns the table of EndpointSlices and
    its version. Raises ValueError if the `kubernetes` package is not installed.
    """

    _api: DiscoveryV1Api
    _namespace: str

    def __init__(self, services: Sequence[str], port: str) -> None:
        try:
            import kubernetes.aio  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "--kubernetes-service: the Kubernetes client is not installed; run "
                "`pip install -e '.[kubernetes]'` in Baton's source directory"
            ) from error
        self._port = port
        self._selector = f"{SERVICE_LABEL} in ({','.join(sorted(services))})"
        self._slices: dict[str, EndpointSlice] = {}  # by name
        self._version = ""
        self._backoff = 0.0  # seconds until the next call
        self._trouble = ""  # why the last request failed; "" if it succeeded

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """Yields the set of addresses ("HOST:PORT") whenever it changes.

        Raises ValueError outside of a pod without a kubeconfig.
        """
        configuration, self._namespace = await _load_configuration()
        self._resync_at = 0.0  # seconds of time.monotonic(); 0: list with the next call
        from kubernetes.aio.client import ApiClient, DiscoveryV1Api

        async with ApiClient(configuration) as client:
            self._api = DiscoveryV1Api(client)
            yielded: frozenset[str] | None = None
            while True:
                async with contextlib.aclosing(self._changes()) as changes:
                    async for addresses in changes:
                        if addresses != yielded:
                            yielded = addresses
                            yield addresses
                await asyncio.sleep(self._backoff * random.uniform(0.5, 1))

    async def _changes(self) -> AsyncGenerator[frozenset[str], None]:
        """Yields the addresses after each list and event. Returns when the watch ends or a request fails."""
        opened = time.monotonic()
        try:
            if opened >= self._resync_at:
                await self._list()
                yield ready_addresses(self._slices.values(), self._port)
            watch = self._ask(
                watch=True,
                resource_version=self._version,
                allow_watch_bookmarks=True,  # bookmarks keep our version recent when no endpoint changes
                timeout_seconds=WATCH_SECONDS,
                _request_timeout=WATCH_SECONDS + TIMEOUT,
            )
            async with await watch as response:
                self._succeeded()
                async for line in response.content:
                    if self._take(line):
                        yield ready_addresses(self._slices.values(), self._port)
        except _RETRIED as error:
            if isinstance(error, _Refused) and error.code == 410:
                log.debug("the API server no longer has version %s: listing again", self._version)
                self._resync_at = 0.0
            elif (trouble := str(error) or type(error).__name__) != self._trouble:
                log.warning("cannot watch the endpoints: %s; keeping the last list", trouble)
                self._trouble = trouble
        # A watch that ends within a second counts as a failure, so that no tight loop of requests can form.
        lasted = time.monotonic() - opened >= 1.0
        self._backoff = 0.0 if lasted else min(LAST_BACKOFF, max(FIRST_BACKOFF, 2 * self._backoff))

    async def _list(self) -> None:
        async with await self._ask(_request_timeout=TIMEOUT) as response:
            listing = msgspec.json.decode(await response.read(), type=_List)
        self._slices = {each.metadata.name: each for each in listing.items or ()}
        self._version = listing.metadata.resource_version
        self._resync_at = time.monotonic() + RESYNC_SECONDS
        self._succeeded()

    def _take(self, line: bytes) -> bool:
        """Applies one event. Returns whether it was about endpoints."""
        event = msgspec.json.decode(line, type=_Event)
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            raise _Refused(status.code, status.message)
        changed = msgspec.json.decode(event.object, type=EndpointSlice)
        self._version = changed.metadata.resource_version
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        elif event.type != "BOOKMARK":
            self._slices[changed.metadata.name] = changed
        return event.type != "BOOKMARK"

    async def _ask(self, **parameters: Any) -> aiohttp.ClientResponse:
        """Sends a list or watch request. The caller closes the response. Raises one of _RETRIED."""
        response = await self._api.list_namespaced_endpoint_slice_without_preload_content(
            self._namespace, label_selector=self._selector, **parameters
        )
        if response.status != 200:
            async with response:
                try:
                    status = msgspec.json.decode(await response.read(), type=_Status)
                except msgspec.MsgspecError:
                    status = _Status()
            raise _Refused(response.status, status.message or str(response.reason))
        return response

    def _succeeded(self) -> None:
        if self._trouble:
            self._trouble = ""
            log.info("the API server answers again: watching the endpoints")


async def _load_configuration() -> tuple[Any, str]:
    """The client configuration and the namespace: of this pod, or outside of a pod those of kubectl.

    Raises ValueError if there is neither.
    """
    from kubernetes.aio import config
    from kubernetes.aio.client import Configuration

    configuration = Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(configuration)
            return configuration, NAMESPACE_FILE.read_text().strip()
        file = os.environ.get("KUBECONFIG")
        await config.load_kube_config(file, client_configuration=configuration)
        _, active = config.list_kube_config_contexts(file)
        return configuration, active["context"].get("namespace", "default")
    except (config.ConfigException, OSError) as error:
        raise ValueError(
            f"--kubernetes-service: cannot configure access to the API server ({error}); run in a pod with a "
            "ServiceAccount, or where kubectl works"
        ) from error
