"""gRPC between routers and workers: stubs, channels, authentication, health and TLS.

Life of a call:

1. `channel.connect` opens a channel with keepalive and message bounds.
2. Both sides prove with mutual TLS that they have the cluster secret (`auth`). With `tls.TlsFiles` they show
   certificates of the user's authority, and each call carries a token that is made from the secret.

`channel.create_public_server` makes a server for clients, which have no secret.

`stubs` calls and serves the services of proto/, from which `make proto` generates the messages `*_pb2`. They
are checked in. Processes that need only messages import only those: gRPC itself would delay their start.
"""

SHORTEST_REPORT = 0.05
"""Seconds between two reports of a worker's status to its routers."""
LONGEST_REPORT = 1.0


def bounded_report(seconds: float) -> float:
    """Returns `seconds` between two reports, or the bound that they exceed."""
    return min(LONGEST_REPORT, max(SHORTEST_REPORT, seconds))
