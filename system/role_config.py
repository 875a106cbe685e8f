"""What the configurations of all roles share."""

from dataclasses import dataclass

from baton.system import logs


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Of a process that serves, which may be a router, a worker or an endpoint picker."""

    host: str = "127.0.0.1"
    port: int = 0
    """Of HTTP for a router, else of gRPC. 0: the system chooses, and the process reports it."""
    drain_timeout: float = 60.0
    """Seconds for what runs to finish after SIGTERM."""
    log_format: logs.Format = "text"
    log_level: logs.Level = "info"


@dataclass(frozen=True, kw_only=True)
class RoleConfig(ServerConfig):
    """Of a router or a worker, which a supervisor may start."""

    index: int = 0
    """Its number within its role, in process titles, logs and `baton status`."""
    title: str = "baton"
    """The prefix of the titles of its processes."""
    otlp_endpoint: str | None = None
    """http://HOST:PORT or https://HOST:PORT of an OTLP/gRPC receiver of traces. None: no traces."""
    ready_fd: int | None = None
    """An inherited descriptor for progress, and then for where it listens or the error."""
