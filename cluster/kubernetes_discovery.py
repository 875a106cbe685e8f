"""Finds workers on Kubernetes: the ready endpoints of Services, listed once and then watched.

Life: list → watch from the list's version for `WATCH_SECONDS` → watch on from the last version seen, and so
forth; a new list every `RESYNC_SECONDS`, and whenever the server has forgotten our version (410 Gone).
While the API server cannot be reached the last addresses stay, and it is asked again with growing pauses.
This is the protocol of https://kubernetes.io/docs/reference/using-api/api-concepts/.

The router's ServiceAccount needs `list` and `watch` of `endpointslices` in its own namespace, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from cluster.endpoint_slices import EndpointSlice, EndpointSlices, Metadata

if TYPE_CHECKING:
    from kubernetes.aio.client import DiscoveryV1Api

log = logging.getLogger(__name__)

WATCH_SECONDS = 30  # a connection to a server that is gone without a word is given up a little later
RESYNC_SECONDS = 300.0
TIMEOUT = 5.0  # seconds to answer a list; beyond WATCH_SECONDS, to end a watch
FIRST_BACKOFF, LAST_BACKOFF = 0.1, 5.0
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
SERVICE_LABEL = "kubernetes.io/service-name"


class _List(msgspec.Struct):
    metadata: Metadata
    items: list[EndpointSlice] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Versioned(msgspec.Struct):
    metadata: Metadata


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Gone(Exception):
    """The server no longer knows the version from which we watch."""


class _Refused(Exception):
    """It answered with an error."""


_UNREADABLE = (
    aiohttp.ClientError,
    OSError,
    TimeoutError,
    ValueError,  # a line that is longer than aiohttp's buffer
    msgspec.MsgspecError,
    _Refused,
)


class KubernetesDiscovery:
    """A `router.workers.discovery.Discovery`: the ready endpoints of `services` in this pod's own namespace.

    Raises ValueError where the `kubernetes` package is not installed.
    """

    def __init__(self, services: Sequence[str]) -> None:
        try:
            import kubernetes.aio  # noqa: F401
        except ImportError as error:
            raise ValueError(
                "--kubernetes-service: the Kubernetes client is not installed; in Baton's source directory "
                "`pip install -e '.[kubernetes]'` installs it"
            ) from error
        self._selector = f"{SERVICE_LABEL} in ({','.join(sorted(services))})"

    async def watch(self) -> AsyncIterator[frozenset[str]]:
        """Raises ValueError when it runs neither in a pod nor where there is a kubeconfig."""
        configuration, namespace = await _load_configuration()
        from kubernetes.aio.client import ApiClient, DiscoveryV1Api

        async with ApiClient(configuration) as client:
            source = _Source(DiscoveryV1Api(client), namespace, self._selector)
            known: frozenset[str] | None = None
            while True:
                async with contextlib.aclosing(source.changes()) as changes:
                    async for addresses in changes:
                        if addresses != known:
                            known = addresses
                            yield addresses
                await source.pause()


class _Source:
    """Follows the slices in the API server. Owns the table of them and the version it is of."""

    def __init__(self, api: DiscoveryV1Api, namespace: str, selector: str) -> None:
        self._api = api
        self._namespace = namespace
        self._selector = selector
        self._slices = EndpointSlices()
        self._version = ""
        self._resync_at = 0.0  # seconds on the monotonic clock; 0: with the next call
        self._backoff = 0.0
        self._trouble = ""  # why the server could not be heard last; "" since it was

    async def changes(self) -> AsyncGenerator[frozenset[str], None]:
        """The addresses after each thing heard; ends with the watch, for whatever reason."""
        opened = time.monotonic()
        try:
            if opened >= self._resync_at:
                await self._list()
                yield self._slices.addresses()
            async with await self._watch() as response:
                self._heard()
                async for line in response.content:
                    if self._take(line):
                        yield self._slices.addresses()
        except _Gone:
            log.debug("the API server forgot version %s: listing again", self._version)
            self._resync_at = 0.0
        except _UNREADABLE as error:
            trouble = str(error) or type(error).__name__
            if trouble != self._trouble:
                log.warning("endpoints of workers: %s; the last list stays", trouble)
            self._trouble = trouble
        # One that ends at once does not count as success, however it ended: never ask in a tight loop.
        stood = time.monotonic() - opened >= 1.0
        self._backoff = 0.0 if stood else min(LAST_BACKOFF, max(FIRST_BACKOFF, 2 * self._backoff))

    async def pause(self) -> None:
        await asyncio.sleep(self._backoff * random.uniform(0.5, 1))

    async def _list(self) -> None:
        async with await self._ask(_request_timeout=TIMEOUT) as response:
            found = msgspec.json.decode(await response.read(), type=_List)
        self._slices.replace(found.items or ())
        self._version = found.metadata.resource_version
        self._resync_at = time.monotonic() + RESYNC_SECONDS
        self._heard()

    async def _watch(self) -> aiohttp.ClientResponse:
        return await self._ask(
            watch=True,
            resource_version=self._version,
            allow_watch_bookmarks=True,  # so that our version grows where no endpoint changes
            timeout_seconds=WATCH_SECONDS,
            _request_timeout=WATCH_SECONDS + TIMEOUT,
        )

    def _take(self, line: bytes) -> bool:
        """Takes an event in. Returns whether it was about endpoints."""
        event = msgspec.json.decode(line, type=_Event)
        if event.type == "ERROR":
            raise _error(msgspec.json.decode(event.object, type=_Status))
        self._version = msgspec.json.decode(event.object, type=_Versioned).metadata.resource_version
        if event.type == "BOOKMARK":
            return False
        changed = msgspec.json.decode(event.object, type=EndpointSlice)
        if event.type == "DELETED":
            self._slices.remove(changed.metadata.name)
        else:
            self._slices.put(changed)
        return True

    async def _ask(self, **how: Any) -> aiohttp.ClientResponse:
        """An open response, which the caller closes. Raises what `changes` expects."""
        response = await self._api.list_namespaced_endpoint_slice_without_preload_content(
            self._namespace, label_selector=self._selector, **how
        )
        if response.status != 200:
            async with response:
                try:
                    status = msgspec.json.decode(await response.read(), type=_Status)
                except msgspec.MsgspecError:
                    status = _Status()
            raise _error(_Status(response.status, status.message or str(response.reason)))
        return response

    def _heard(self) -> None:
        if self._trouble:
            self._trouble = ""
            log.info("endpoints of workers: the API server answers again")


def _error(status: _Status) -> Exception:
    if status.code == 410:
        return _Gone()
    remedy = (
        " (the router's ServiceAccount needs list and watch of endpointslices)" if status.code == 403 else ""
    )
    return _Refused(f"{status.code}: {status.message}{remedy}")


async def _load_configuration() -> tuple[Any, str]:
    """How to reach the API server, and our namespace: a pod's own, or as kubectl would have it."""
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
            f"--kubernetes-service: no way to reach the API server ({error}): run in a pod with a "
            "ServiceAccount, or where kubectl works"
        ) from error
