"""The configuration of an endpoint picker."""

from dataclasses import dataclass
from typing import Any

from baton.router.workers.discovery import Discovery
from baton.rpc import TlsFiles, logs


@dataclass(frozen=True, kw_only=True)
class PickerConfig:
    """The configuration of one endpoint picker."""

    routers: Discovery
    """Yields the HTTP addresses of routers, as the gateway names them."""
    metrics_port: int | None = None
    """Port of `/metrics` of each router. None: that of its address."""
    host: str = "127.0.0.1"
    port: int = 9002
    """Of gRPC. 0: the system chooses, and the log shows it."""
    tls: TlsFiles | None = None
    """For the gateway's connections."""
    drain_timeout: float = 60.0
    """Seconds for open streams to finish after SIGTERM."""
    log_format: logs.Format = "text"
    log_level: logs.Level = "info"

    def logging(self) -> dict[str, Any]:
        return logs.log_config(self.log_format, self.log_level, {"role": "picker"}, exception_text=False)
