"""What routers and workers prove to each other: that both have the cluster secret.

The secret gives the private key of an authority, the same in every process. Each process makes a key of its
own and certifies it by that authority. TLS demands such a certificate of both sides of a connection, so only
processes that have the secret can open, accept, read or change one. Certificates do not expire, as the secret
does not.

With `TlsFiles` an authority of the user takes that place. Others may have its certificates, so each call also
carries a token that is made from the secret. It travels in TLS, to a server that has proved itself.
"""

import datetime
import functools
import hmac
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from baton.rpc.tls import WORKER_NAME, Pems

SECRET_VARIABLE = "BATON_CLUSTER_SECRET"
MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_ALWAYS = datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 31)  # no clock has to be right
_HEADER = "authorization"


def load_secret(path: str | os.PathLike[str] | None = None) -> bytes:
    """Reads the cluster secret from the file `path`, or from BATON_CLUSTER_SECRET if `path` is None.

    Strips whitespace at both ends. Raises ValueError if there is no secret, if the file cannot be read, or if
    the secret does not have 16 to 4,096 bytes.
    """
    if path is not None:
        source = f"--cluster-secret-file {os.fspath(path)}:"
        try:
            with Path(path).open("rb") as file:
                secret = file.read(_MAX_SECRET_BYTES + 1).strip()
        except OSError as error:
            raise ValueError(f"{source} cannot be read ({error.strerror})") from error
    else:
        source = f"{SECRET_VARIABLE}:"
        value = os.environ.get(SECRET_VARIABLE)
        if value is None:
            raise ValueError(
                "no cluster secret, which routers and workers share: make one with "
                f"`export {SECRET_VARIABLE}=$(openssl rand -hex 32)` and set it for every process, or name a "
                "file that holds it with --cluster-secret-file"
            )
        secret = value.encode().strip()
    if not MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ValueError(
            f"{source} a secret of {len(secret)} bytes; it must have {MIN_SECRET_BYTES} to "
            f"{_MAX_SECRET_BYTES}, as the output of `openssl rand -hex 32`"
        )
    return secret


def cluster_name(secret: bytes) -> str:
    """Names the cluster that has the secret. It does not reveal the secret."""
    return _derive(secret, b"baton cluster name", 8).hex()


@functools.cache
def certificate(secret: bytes) -> Pems:
    """Returns the certificate of this process. Every holder of `secret` trusts it, and nothing else does."""
    number = int.from_bytes(_derive(secret, b"baton cluster authority", 48)) % (_P256_ORDER - 1) + 1
    authority = ec.derive_private_key(number, ec.SECP256R1())
    public = authority.public_key()
    # Authorities have names of their own, so that TLS names the cause if the other side has another one.
    known = x509.SubjectKeyIdentifier.from_public_key(public).digest.hex()
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = _name(f"baton cluster {known[:16]}")
    trusted = _certify(issuer, public, issuer, authority, is_authority=True)
    chain = _certify(_name(WORKER_NAME), key.public_key(), issuer, authority, is_authority=False)
    return Pems(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        chain.public_bytes(Encoding.PEM),
        trusted.public_bytes(Encoding.PEM),
    )


def _certify(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    authority: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
) -> x509.Certificate:
    made = x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), *_ALWAYS)
    made = made.add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(WORKER_NAME)]), critical=False)
    return made.sign(authority, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _derive(secret: bytes, label: bytes, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, salt=None, info=label).derive(secret)


def token(secret: bytes) -> str:
    """What each call carries, in hexadecimal, if the certificates are not made from the secret."""
    return _derive(secret, b"baton cluster token", 32).hex()


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the token (UNAUTHENTICATED) before it reads a message."""

    def __init__(self, secret: bytes) -> None:
        self._expected = f"Bearer {token(secret)}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        sent = dict(handler_call_details.invocation_metadata).get(_HEADER, "")
        if isinstance(sent, str) and hmac.compare_digest(sent.encode(errors="replace"), self._expected):
            return await continuation(handler_call_details)
        # A stream handler serves every kind of call, and does not wait for a first message.
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_requests: object, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not prove this cluster's secret")
