"""What routers and workers speak: stubs generated from proto/, channels, authentication, the routing hash.

Life of a call: `connect` opens a channel with keepalive and message bounds. Each call made on it carries an
HMAC of the server's id, the method, the time and a nonce under the cluster secret (`rpc.auth`). The server
made by `create_server` verifies it before any message is read, refuses replays, and answers. Health checks
alone need no secret. With `TlsFiles` both ends also show certificates of the cluster. `create_public_server`
makes a server for clients, which know no secret.

`rpc.logs` and `rpc.tracing` are how every process can be watched: one format of log lines, traces over OTLP.

The stubs `*_pb2*` are written by `make proto` and checked in.
"""

import os

# Both must be set before grpc is imported. gRPC logs every connection that ends, and its fork handlers can
# crash a child process between fork and exec.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

from grpc import RpcError
from grpc.aio import Channel

from rpc.auth import load_secret
from rpc.channel import check_health, connect, create_public_server, create_server
from rpc.chunk_hash import CHUNK_TOKENS, chunk_hashes
from rpc.health import HealthServicer
from rpc.ports import cannot_listen, try_port, url_host
from rpc.tls import TlsFiles, add_port
from rpc.vocabulary import vocabulary_fingerprint

__all__ = [
    "CHUNK_TOKENS",
    "Channel",
    "HealthServicer",
    "RpcError",
    "TlsFiles",
    "add_port",
    "cannot_listen",
    "check_health",
    "chunk_hashes",
    "connect",
    "create_public_server",
    "create_server",
    "load_secret",
    "try_port",
    "url_host",
    "vocabulary_fingerprint",
]
