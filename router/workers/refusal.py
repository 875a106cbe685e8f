"""Words the reason why a worker is not part of the pool, and the remedy."""

import grpc

SEE_WORKER_LOG = "Look at the worker's log."
SECRET = "Give the router and all workers the same --cluster-secret-file or BATON_CLUSTER_SECRET."
PORT = "Give the router the worker's gRPC port, --port; --kv-port and --metrics-port are others."
TLS = "Give all of them or none --cluster-certfile, --cluster-keyfile and --cluster-ca-certs."
CERTIFICATE = (
    "Issue the worker's certificate for the DNS name baton-worker, by an authority of --cluster-ca-certs."
)
WAIT = "Wait until the worker is ready: its log says how far it is. If it is ready, correct the port."
DRAINED = "Start it again, or take its address off the router's list."
START = "Start the worker, or correct its address: host and --port."

_CAUSES = (
    # Text in gRPC's error, in lower case; its meaning; the remedy.
    ("wrong_version_number", "another service answers at this address, without TLS", PORT),
    ("hostname verification", "the worker's certificate is for another name", CERTIFICATE),
    ("unauthenticated", "the worker has another cluster secret", SECRET),
    (
        "handshake read failed (endpoint closing)",
        "the worker is still starting, or another service listens there",
        WAIT,
    ),
    ("connection refused", "nothing listens at this address", START),
    ("errors resolving", "the host name is unknown", START),
)
_CLOSED_AT_ONCE = "failed to connect", "socket closed"


class RefusedWorker(Exception):
    """A worker cannot be part of the pool. The message is the reason."""

    def __init__(self, reason: str, remedy: str = SEE_WORKER_LOG) -> None:
        super().__init__(reason)
        self.remedy = remedy


def explain(error: grpc.aio.AioRpcError, *, files: bool) -> tuple[str, str]:
    """Returns the reason and the remedy for a failed call to a worker. `files`: the router has
    --cluster-certfile."""
    details = error.details() or ""
    text = f"{error.code().name}: {details}".lower()
    for words, reason, remedy in _CAUSES:
        if words in text:
            return f"{reason} ({details})", remedy
    if "certificate_verify_failed" in text:
        if files:
            return f"the worker's certificate is not trusted ({details})", f"{CERTIFICATE} {TLS}"
        return f"the worker does not prove the cluster secret ({details})", f"{SECRET} {TLS}"
    if files and all(words in text for words in _CLOSED_AT_ONCE):
        reason = "the worker closed the connection: it may not trust the router's certificate"
        return f"{reason} ({details})", TLS
    remedy = "Look at the worker's log, at its address, and at firewalls between the router and the worker."
    return f"{error.code().name.lower()}: {details}", remedy
