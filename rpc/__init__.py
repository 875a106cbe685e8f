"""gRPC between routers and workers: stubs, channels, authentication, health, TLS, logs and traces.

Life of a call:

1. `connect` opens a channel with keepalive and message bounds.
2. Both sides prove with mutual TLS that they have the cluster secret (`rpc.auth`). With `TlsFiles` they show
   certificates of the user's authority, and each call carries a token that is made from the secret.

`create_public_server` makes a server for clients, which have no secret. `rpc.vocabulary` is a fingerprint
that routers and workers compare. `rpc.logs` defines the log lines of every process, and `rpc.tracing` exports
traces over OTLP.

`make proto` generates the stubs `*_pb2*` from proto/. They are checked in.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Both must be set before grpc is imported. By default gRPC logs every connection that ends. Its fork handlers
# can crash a child process between fork and exec.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

if TYPE_CHECKING:
    from grpc import RpcError
    from grpc.aio import Channel

    from baton.rpc.auth import load_secret
    from baton.rpc.channel import check_health, cluster_pems, connect, create_public_server, create_server
    from baton.rpc.health import HealthServicer
    from baton.rpc.ports import cannot_listen, try_port, url_host
    from baton.rpc.tls import TlsFiles, add_port
    from baton.rpc.vocabulary import vocabulary_fingerprint

_MODULE_OF = {
    "Channel": "grpc.aio",
    "HealthServicer": "baton.rpc.health",
    "RpcError": "grpc",
    "TlsFiles": "baton.rpc.tls",
    "add_port": "baton.rpc.tls",
    "cannot_listen": "baton.rpc.ports",
    "check_health": "baton.rpc.channel",
    "cluster_pems": "baton.rpc.channel",
    "connect": "baton.rpc.channel",
    "create_public_server": "baton.rpc.channel",
    "create_server": "baton.rpc.channel",
    "load_secret": "baton.rpc.auth",
    "try_port": "baton.rpc.ports",
    "url_host": "baton.rpc.ports",
    "vocabulary_fingerprint": "baton.rpc.vocabulary",
}


def __getattr__(name: str) -> Any:
    """Imports the module of a name when the name is used.

    Engine processes and the router's children need the fingerprint or the logs. gRPC would delay their start.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rpc' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


__all__ = [
    "Channel",
    "HealthServicer",
    "RpcError",
    "TlsFiles",
    "add_port",
    "cannot_listen",
    "check_health",
    "cluster_pems",
    "connect",
    "create_public_server",
    "create_server",
    "load_secret",
    "try_port",
    "url_host",
    "vocabulary_fingerprint",
]
