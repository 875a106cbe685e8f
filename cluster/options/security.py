"""Options that authenticate routers and workers to each other, and servers to their clients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from baton.cluster.options.declare import OLD_FILE, opt

if TYPE_CHECKING:
    from baton.rpc.tls import TlsFiles


def tls_files(prefix: str, *files: Path | None, mutual: bool = False) -> TlsFiles | None:
    from baton.rpc.tls import TlsFiles

    certfile, keyfile, ca_certs = (None if path is None else str(path) for path in files)
    return TlsFiles.of(prefix, certfile, keyfile, ca_certs, mutual=mutual)


@dataclass(frozen=True)
class SecretOptions:
    panel: ClassVar[str] = "Cluster"
    cluster_secret_file: Annotated[
        Path | None,
        opt("Secret that routers and workers share.", shown="BATON_CLUSTER_SECRET", **OLD_FILE),
    ] = None
    cluster_certfile: Annotated[
        Path | None,
        opt(
            "Certificate (PEM) of this process, for mutual TLS between routers and workers. A worker's "
            "certificate must have the name baton-worker.",
            shown="made from the secret",
            **OLD_FILE,
        ),
    ] = None
    cluster_keyfile: Annotated[
        Path | None, opt("Private key (PEM) of --cluster-certfile.", shown="none", **OLD_FILE)
    ] = None
    cluster_ca_certs: Annotated[
        Path | None, opt("Authorities (PEM) that sign these certificates.", shown="none", **OLD_FILE)
    ] = None

    def tls(self) -> TlsFiles | None:
        """The TLS files of this process; None: the secret makes one. Raises ValueError for unusable files."""
        return tls_files(
            "cluster", self.cluster_certfile, self.cluster_keyfile, self.cluster_ca_certs, mutual=True
        )


@dataclass(frozen=True)
class ServerTlsOptions:
    """TLS for the clients of a process."""

    ssl_certfile: Annotated[
        Path | None, opt("Certificate chain (PEM) to serve clients with TLS.", shown="no TLS", **OLD_FILE)
    ] = None
    ssl_keyfile: Annotated[
        Path | None, opt("Private key (PEM) of --ssl-certfile.", shown="none", **OLD_FILE)
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        opt("Authorities (PEM) that must have signed the clients' certificates.", shown="none", **OLD_FILE),
    ] = None

    def tls(self) -> TlsFiles | None:
        """The TLS files for clients; None without TLS. Raises ValueError for unusable files."""
        return tls_files("ssl", self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
