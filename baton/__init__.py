"""Disaggregated prefill/decode LLM inference. Each package is a folder of the repository's top level."""

import os

from setproctitle import getproctitle

# Finds the room for titles of this process, while the environment is as it was at the start: later its first
# variable may have another place, and then no title is ever set.
getproctitle()
# Both must be set before grpc is imported. By default gRPC logs every connection that ends. Its fork handlers
# can crash a child process between fork and exec.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"


def version() -> str:
    from importlib import metadata  # late: it is most of the time that importing this takes

    try:
        return metadata.version("baton-llm")
    except metadata.PackageNotFoundError:
        return "unknown"  # runs from a checkout, without installation
