"""Computes the addresses of ready pods from EndpointSlices. Takes lists and watch events; does no I/O.

The endpoints of a Service are spread over several slices. While Kubernetes moves an endpoint, two slices
contain it. A dual-stack Service has an endpoint for each address family.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec


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
    """The fields of a `discovery.k8s.io/v1` EndpointSlice that this module reads."""

    metadata: Metadata
    address_type: str
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None


class EndpointSlices:
    """The table of present slices, by name."""

    def __init__(self, port: str) -> None:
        """`port`: the name of the Service port that the addresses are for."""
        self._port = port
        self._slices: dict[str, EndpointSlice] = {}

    def replace(self, slices: Iterable[EndpointSlice]) -> None:
        """Replaces the table by a list. A slice that is missing in the list was deleted."""
        self._slices = {each.metadata.name: each for each in slices}

    def put(self, changed: EndpointSlice) -> None:
        self._slices[changed.metadata.name] = changed

    def remove(self, name: str) -> None:
        self._slices.pop(name, None)

    def addresses(self) -> frozenset[str]:
        """The "HOST:PORT" of every ready endpoint, once for a pod with several addresses."""
        of_pod: dict[str, tuple[str, str]] = {}
        for family, pod, address in self._ready():
            pod = pod or address
            of_pod[pod] = min((family, address), of_pod.get(pod, (family, address)))
        return frozenset(address for _, address in of_pod.values())

    def _ready(self) -> Iterator[tuple[str, str, str]]:
        """Family, pod uid and address of ready endpoints. "IPv4" sorts first, so `addresses` prefers it."""
        for each in self._slices.values():
            port = next((p.port for p in each.ports or () if p.name == self._port), None)
            for endpoint in each.endpoints or ():
                if port is not None and endpoint.addresses and endpoint.conditions.ready is not False:
                    host = endpoint.addresses[0]  # "the addresses of an endpoint are fungible"
                    pod = endpoint.target_ref.uid if endpoint.target_ref else ""
                    shown = f"[{host}]" if each.address_type == "IPv6" else host
                    yield each.address_type, pod, f"{shown}:{port}"
