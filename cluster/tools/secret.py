"""The cluster secret of a command that calls workers."""

import os

from baton.cluster.options.clients import EndpointOptions, LocalOptions
from baton.cluster.options.roles import SecretOptions
from baton.cluster.supervision import announcement
from baton.rpc.auth import SECRET_VARIABLE, load_secret

LOCAL = (
    "The secret of a `baton serve` of the same user on this machine is found by --url, the URL of its "
    "router, and --advanced.run-dir, if that was given to it"
)


def secret_for(endpoint: EndpointOptions, secret: SecretOptions, local: LocalOptions) -> bytes:
    """The secret that the user gives, else that of the local cluster at the URL. Raises ValueError."""
    if secret.cluster_secret_file is None and SECRET_VARIABLE not in os.environ:
        announced = announcement.secret_of(endpoint.url, local.run_dir)
        if announced is not None:
            return announced
    try:
        return load_secret(secret.cluster_secret_file)
    except ValueError as error:
        raise ValueError(f"{error}. {LOCAL}") from error
