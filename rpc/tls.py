"""TLS from PEM files, for HTTP and gRPC, and the credentials of gRPC.

Between routers and workers TLS is always mutual: each side shows a certificate that the cluster's own
authority signed, that of `rpc.auth` or the user's. The certificate of a worker must be for the name
`WORKER_NAME`, because workers change their addresses.
"""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from baton.rpc.port import Server
from baton.system.addresses import try_port, url_host

WORKER_NAME = "baton-worker"


@dataclass(frozen=True, slots=True)
class Pems:
    """A private key, the chain of its certificate, and the authorities of the peers. None: any peer."""

    key: bytes = field(repr=False)
    chain: bytes
    authorities: bytes | None

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key, self.chain)], self.authorities, self.authorities is not None
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authorities, self.key, self.chain)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files.

    With `ca_certs` the peer must show a certificate that one of these authorities signed. A server and a
    channel read the files once, when they are made.
    """

    certfile: str
    keyfile: str
    ca_certs: str | None = None

    @classmethod
    def of(
        cls,
        prefix: str,
        certfile: str | None,
        keyfile: str | None,
        ca_certs: str | None,
        *,
        mutual: bool = False,
    ) -> "TlsFiles | None":
        """Makes TlsFiles from the flags --PREFIX-certfile, --PREFIX-keyfile and --PREFIX-ca-certs.

        Returns None if no flag is set. With `mutual` all three are needed, else certificate and key. Raises
        ValueError if one is missing or cannot be used.
        """
        if certfile is None and keyfile is None and ca_certs is None:
            return None
        if certfile is None or keyfile is None or (mutual and ca_certs is None):
            needed = f"--{prefix}-certfile and --{prefix}-keyfile"
            also = f", --{prefix}-ca-certs" if mutual else ""
            raise ValueError(f"TLS needs {needed}{also}: some are missing")
        files = cls(certfile, keyfile, ca_certs)
        try:
            files.server_context()
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"--{prefix}-certfile {certfile}, --{prefix}-keyfile {keyfile}"
                + (f", --{prefix}-ca-certs {ca_certs}" if ca_certs else "")
                + f": cannot be used ({getattr(error, 'reason', None) or error.strerror or error})"
            ) from error
        return files

    def server_context(self) -> ssl.SSLContext:
        """Returns the context for an asyncio server. Raises OSError or ssl.SSLError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Without a password callback OpenSSL would ask for the password of an encrypted key at the terminal.
        context.load_cert_chain(self.certfile, self.keyfile, password=lambda: "")
        if self.ca_certs is not None:
            context.load_verify_locations(self.ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    @property
    def ends_at(self) -> float:
        """The Unix time at which the certificate ends. Raises OSError and ValueError."""
        from cryptography import x509

        return x509.load_pem_x509_certificate(
            Path(self.certfile).read_bytes()
        ).not_valid_after_utc.timestamp()

    def pems(self) -> Pems:
        """Reads the files. Raises OSError."""
        authorities = None if self.ca_certs is None else Path(self.ca_certs).read_bytes()
        return Pems(Path(self.keyfile).read_bytes(), Path(self.certfile).read_bytes(), authorities)


def add_port(server: Server, host: str, port: int, tls: Pems | None) -> int:
    """Makes `server` listen on `host`:`port`, with TLS if `tls` is given.

    Returns the port. Raises OSError.
    """
    try:
        return server.add_port(f"{url_host(host)}:{port}", None if tls is None else tls.server_credentials())
    except RuntimeError as error:  # gRPC hides the reason; `try_port` raises it
        try_port(host, port)
        raise OSError(str(error)) from error
