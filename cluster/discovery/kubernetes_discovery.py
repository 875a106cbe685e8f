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

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient, V1EndpointSlice
    from kubernetes.aio.watch import Watch

log = logging.getLogger(__name__)

WATCH_SECONDS = 30  # after which the server ends a watch; a dead connection times out TIMEOUT later
RESYNC_SECONDS = 300.0
TIMEOUT = 5.0  # seconds for the server to answer a list, or to end a watch after WATCH_SECONDS
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 5.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
SERVICE_LABEL = "kubernetes.io/service-name"


def ready_addresses(slices: Iterable[V1EndpointSlice], port: str) -> frozenset[str]:
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
            if not endpoint.addresses or (endpoint.conditions and endpoint.conditions.ready is False):
                continue  # None means ready
            host = endpoint.addresses[0]  # "the addresses of an endpoint are fungible"
            address = each.address_type, f"[{host}]" if each.address_type == "IPv6" else host, ports
            pod = (endpoint.target_ref.uid if endpoint.target_ref else None) or f"{host} {ports}"
            of_pod[pod] = min(address, of_pod.get(pod, address))
    return frozenset(f"{host}:{number}" for _, host, ports in of_pod.values() for number in ports)


class KubernetesDiscovery:
    """A `router.discovery.Discovery`: the ready endpoints of `services` in this pod's own namespace.

    `port` is the name of the Service port that the addresses are for. Owns the table of EndpointSlices and
    its version. Raises ValueError if the `kubernetes` package is not installed.
    """

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
        self._slices: dict[str, V1EndpointSlice] = {}  # by name
        self._version: str | None = ""
        self._backoff = 0.0  # seconds until the next call
        self._trouble = ""  # why the last request failed; "" if it succeeded

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """Yields the set of addresses ("HOST:PORT") whenever it changes.

        Raises ValueError outside of a pod without a kubeconfig.
        """
        configuration, namespace = await _load_configuration()
        self._resync_at = 0.0  # seconds of time.monotonic(); 0: list with the next call
        from kubernetes.aio.client import ApiClient
        from kubernetes.aio.watch import Watch

        async with ApiClient(configuration) as client:
            # All watches share one: it makes a TLS context, which reads all certificates of the system.
            watch = Watch()
            yielded: frozenset[str] | None = None
            while True:
                async with contextlib.aclosing(self._changes(client, namespace, watch)) as changes:
                    async for addresses in changes:
                        if addresses != yielded:
                            yielded = addresses
                            yield addresses
                await asyncio.sleep(self._backoff * random.uniform(0.5, 1))

    async def _changes(
        self, client: ApiClient, namespace: str, watch: Watch
    ) -> AsyncGenerator[frozenset[str], None]:
        """Yields the addresses after each list and event. Returns when the watch ends or a request fails."""
        from kubernetes.aio.client import ApiException, DiscoveryV1Api

        ask: Any = DiscoveryV1Api(client).list_namespaced_endpoint_slice
        of_services = {"label_selector": self._selector}
        opened, trouble = time.monotonic(), ""
        try:
            if opened >= self._resync_at:
                listing = await ask(namespace, **of_services, _request_timeout=TIMEOUT)
                self._slices = {each.metadata.name: each for each in listing.items or ()}
                self._version = listing.metadata.resource_version
                self._resync_at = time.monotonic() + RESYNC_SECONDS
                yield ready_addresses(self._slices.values(), self._port)
            async with watch:
                events = watch.stream(
                    ask,
                    namespace,
                    **of_services,
                    resource_version=self._version,
                    allow_watch_bookmarks=True,  # bookmarks keep our version recent when no endpoint changes
                    timeout_seconds=WATCH_SECONDS,
                    _request_timeout=WATCH_SECONDS + TIMEOUT,
                )
                async for event in events:
                    if isinstance(event, str):
                        raise ValueError(f"the API server sent no event: {event[:100]!r}")
                    self._succeeded()
                    self._version = watch.resource_version
                    if event["type"] == "BOOKMARK":
                        continue
                    changed = event["object"]
                    self._slices[changed.metadata.name] = changed
                    if event["type"] == "DELETED":
                        del self._slices[changed.metadata.name]
                    yield ready_addresses(self._slices.values(), self._port)
        except ApiException as error:
            if error.status == 410:
                log.debug("the API server no longer has version %s: listing again", self._version)
                self._resync_at = 0.0
            else:
                right = " (the pod's ServiceAccount needs list and watch of endpointslices)"
                trouble = f"{error.status}: {error.reason}{right if error.status == 403 else ''}"
        except Exception as error:  # noqa: BLE001  (the client raises bare ones for what is no event)
            trouble = str(error) or type(error).__name__
        if not trouble:
            self._succeeded()
        elif trouble != self._trouble:
            log.warning("cannot watch the endpoints: %s; keeping the last list", trouble)
            self._trouble = trouble
        # A watch that ends within a second counts as a failure, so that no tight loop of requests can form.
        lasted = time.monotonic() - opened >= 1.0
        self._backoff = 0.0 if lasted else min(LAST_BACKOFF, max(FIRST_BACKOFF, 2 * self._backoff))

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
