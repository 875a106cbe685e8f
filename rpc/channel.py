"""Channels and servers, with the keepalive and the limits of size and time that both sides rely on."""

from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.rpc.auth import TokenCheck, certificate, token
from baton.rpc.health import HealthServicer
from baton.rpc.port import Server
from baton.rpc.tls import WORKER_NAME, Pems, TlsFiles

MAX_MESSAGE_BYTES = 8 << 20  # a prompt of a million tokens is 3 MiB

# gRPC pings after 2 s of silence and waits 3 s for the answer. So calls to a stalled peer end within 5 s.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # A keepalive ping waits behind a bandwidth probe, which by default may take 60 s.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

# Any host can connect. The server closes a connection that sends nothing, or that has no open call.
_IDLE = [
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.max_concurrent_streams", 1_000),  # per connection
]


_BOUNDS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]


def connect(address: str, secret: bytes, tls: TlsFiles | None = None) -> grpc.aio.Channel:
    """Opens a channel to the worker at `address` ("host:port"). The caller closes the channel.

    Both sides show certificates: of `tls`, or made from the secret. The worker's must be for `WORKER_NAME`.
    """
    options: list[tuple[str, int | str]] = [
        *_KEEPALIVE,
        *_BOUNDS,
        ("grpc.enable_http_proxy", 0),
        # A new channel must not inherit a connection or a backoff.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.ssl_target_name_override", WORKER_NAME),
    ]
    if tls is None:
        credentials = certificate(secret).channel_credentials()
    else:
        credentials = grpc.composite_channel_credentials(
            tls.pems().channel_credentials(), grpc.access_token_call_credentials(token(secret))
        )
    return grpc.aio.secure_channel(address, credentials, options=options)


async def check_health(channel: grpc.aio.Channel, timeout: float) -> None:
    """Returns when the server answers, in any health state. Raises grpc.RpcError if it does not answer.

    `timeout` is in seconds.
    """
    # pyrefly: ignore[missing-attribute]  (the stubs leave it out)
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)


def cluster_pems(secret: bytes, tls: TlsFiles | None) -> Pems:
    """Returns what a process shows to the others of its cluster. Raises OSError if `tls` cannot be read."""
    return certificate(secret) if tls is None else tls.pems()


def create_public_server(
    max_request_bytes: int,
    health_servicer: HealthServicer,
    services: Sequence[str],
    *,
    message_timeout: float,
    share: bool,
) -> Server:
    """Makes a server for clients: callers prove nothing here.

    The server has the health service, and reflection of `services` (full names). A call ends if its message
    does not arrive within `message_timeout` seconds. With `share` other processes of the same router may
    listen on the same port. The caller adds services and port, starts and stops it, and says which calls are
    of clients that may make them (`Server.call`).
    """
    options = [
        *_KEEPALIVE,
        *_IDLE,
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.so_reuseport", int(share)),
    ]
    server = Server([], options, proven=False, message_timeout=message_timeout)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server.grpc)
    shown = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(shown, server.grpc)
    return server


def create_server(
    secret: bytes, tls: TlsFiles | None = None, health_servicer: HealthServicer | None = None
) -> Server:
    """Makes a server for a worker. The caller adds its services and the port, starts and stops it.

    The port verifies callers: `add_port(…, cluster_pems(secret, tls))`. With `tls` the server verifies calls.
    Pass `health_servicer` to report a state other than SERVING (`servicer.set("", state)`). Two servers never
    share a port.
    """
    options = [
        *_KEEPALIVE,
        *_IDLE,
        *_BOUNDS,
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]
    interceptors = [] if tls is None else [TokenCheck(secret)]
    server = Server(interceptors, options, proven=True)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer or HealthServicer(), server.grpc)
    return server
