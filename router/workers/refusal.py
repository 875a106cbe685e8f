"""Why a worker is not part of the pool, and what a person can do about it."""

import grpc

OWN_LOG = "Look at the worker's log."
SECRET = "Give the router and all workers the same --cluster-secret-file or BATON_CLUSTER_SECRET."
PORT = "Give the router the worker's gRPC port, --port; --kv-port and --metrics-port are others."
TLS = "Give --cluster-certfile, --cluster-keyfile and --cluster-ca-certs to the router and all workers."
CERTIFICATE = (
    "Issue the worker's certificate for the DNS name baton-worker, by an authority of --cluster-ca-certs."
)
UPGRADE = "Run the same version of Baton on the router and all workers."
START = "Start the worker, or correct its address: host and --port."

_CAUSES = (
    # What gRPC says, in lower case; what it means; the remedy.
    ("clock is", "the clocks differ", "Set the clocks of both machines, for example by NTP."),
    ("call is not signed", "the worker is of an older version, which this router cannot call", UPGRADE),
    ("unimplemented", "another service answers at this address", PORT),
    ("wrong_version_number", "the router uses TLS, this port does not", f"{TLS} {PORT}"),
    ("certificate_verify_failed", "the worker's certificate is not trusted", CERTIFICATE),
    ("hostname verification", "the worker's certificate is for another name", CERTIFICATE),
    ("unauthenticated", "the worker refuses the router's calls", SECRET),
    ("http/2", "another service answers at this address", PORT),
    ("connection refused", "nothing listens at this address", START),
    ("errors resolving", "the host name is unknown", START),
)
_CLOSED = "failed to connect", "socket closed"


class Refused(Exception):
    """This worker cannot be part of the pool."""

    def __init__(self, reason: str, remedy: str = OWN_LOG) -> None:
        super().__init__(reason)
        self.remedy = remedy


def cause(error: grpc.aio.AioRpcError, *, tls: bool) -> tuple[str, str]:
    """The reason and the remedy for a worker that cannot be reached. `tls`: the router uses it."""
    details = error.details() or ""
    said = f"{error.code().name}: {details}".lower()
    for words, reason, remedy in _CAUSES:
        if words in said:
            return f"{reason} ({details})", remedy
    if all(words in said for words in _CLOSED):
        if tls:
            reason = "the worker closes the connection: it may not trust the router's certificate"
        else:
            reason = "the worker closes the connection: it may require TLS"
        return f"{reason} ({details})", TLS
    remedy = "Look at the worker's log, at its address, and at firewalls between the router and the worker."
    return f"{error.code().name.lower()}: {details}", remedy
