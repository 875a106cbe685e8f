"""Options of an endpoint picker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from baton.cluster.options.declare import PORT, opt
from baton.cluster.options.process import LogLineOptions
from baton.cluster.options.security import ServerTlsOptions
from baton.cluster.options.transfer import DrainOptions


@dataclass(frozen=True)
class PickerOptions(ServerTlsOptions):
    """How an endpoint picker serves gateways, and how it finds routers."""

    panel: ClassVar[str] = "Gateways and routers"
    host: Annotated[str, opt("Address to listen on; 0.0.0.0 is all interfaces.", "ADDRESS")] = "127.0.0.1"
    port: Annotated[int, opt("Port of gRPC (Envoy's ext_proc), for gateways.", "PORT", **PORT)] = 9002
    router: Annotated[
        list[str], opt("HTTP address of a router, as the gateway names it; repeat it.", "IP:PORT")
    ] = field(default_factory=list)
    kubernetes_service: Annotated[
        list[str],
        opt("Service in this pod's namespace whose ready endpoints (port http) are routers.", "NAME"),
    ] = field(default_factory=list)
    router_metrics_port: Annotated[
        int | None, opt("Port of each router's metrics.", "PORT", shown="that of its address", **PORT)
    ] = None


@dataclass(frozen=True)
class PickerRole:
    """The options of `baton picker`."""

    picker: PickerOptions
    drain: DrainOptions
    logs: LogLineOptions
