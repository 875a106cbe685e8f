"""Who may call: each call carries an HMAC-SHA256 of method, time and nonce under the cluster secret.

The secret never travels. A captured header is worth nothing for another method, after `WINDOW_SECONDS`, or
a second time at the same server. Messages are neither encrypted nor signed: on an untrusted network add TLS.
"""

import hashlib
import hmac
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio

WINDOW_SECONDS = 30.0
SECRET_VARIABLE = "BATON_CLUSTER_SECRET"
MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_MAX_NONCES = 65_536
_HEADER = "x-baton-auth"
_HEALTH = "/grpc.health.v1.Health/"


def load_secret(path: str | os.PathLike[str] | None = None) -> bytes:
    """The cluster secret from a file, or from BATON_CLUSTER_SECRET when `path` is None.

    Whitespace around it is ignored. Raises ValueError when there is none or it is shorter than 16 bytes.
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


def sign(secret: bytes, method: str, *, now: float | None = None, nonce: bytes | None = None) -> str:
    """The header value for one call of `method` ("/package.Service/Method"): milliseconds, nonce and MAC."""
    milliseconds = int((time.time() if now is None else now) * 1000)
    nonce_hex = (os.urandom(16) if nonce is None else nonce).hex()
    return f"{milliseconds}.{nonce_hex}.{_mac(secret, method, str(milliseconds), nonce_hex)}"


class Verifier:
    """Checks header values and remembers the nonces it has seen for as long as they could be replayed."""

    def __init__(self, secret: bytes, *, max_nonces: int = _MAX_NONCES) -> None:
        self._secret = secret
        self._max_nonces = max_nonces
        self._seen: OrderedDict[str, float] = OrderedDict()  # nonce -> time at which its header is stale

    def refusal(self, method: str, header: str | None, *, now: float | None = None) -> str | None:
        """Why this call is refused, in words for its caller; None when it is genuine and new."""
        now = time.time() if now is None else now
        if header is None:
            return "the call is not signed with the cluster secret"
        milliseconds, _, rest = header.partition(".")
        nonce, _, mac = rest.partition(".")
        # Nothing in the header is looked at before its MAC is right.
        expected = _mac(self._secret, method, milliseconds, nonce)
        if not hmac.compare_digest(expected.encode(), mac.encode(errors="replace")):
            return "the call is signed with another cluster secret"
        offset = int(milliseconds) / 1000 - now
        if abs(offset) > WINDOW_SECONDS:
            return f"the caller's clock is {offset:+.0f} s from ours; {WINDOW_SECONDS:.0f} s is accepted"
        while self._seen and next(iter(self._seen.values())) < now:
            self._seen.popitem(last=False)
        if nonce in self._seen:
            return "the call's signature was used before"
        if len(self._seen) >= self._max_nonces:
            return f"more than {self._max_nonces} calls within {WINDOW_SECONDS:.0f} s"
        # A header from one window ahead is valid for two: all are kept that long, the oldest first.
        self._seen[nonce] = now + 2 * WINDOW_SECONDS
        return None


def _mac(secret: bytes, method: str, milliseconds: str, nonce: str) -> str:
    message = "\n".join(("baton-rpc-1", method, milliseconds, nonce)).encode(errors="replace")
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


# ---------------------------------------------------------------- interceptors


class _Signer:
    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def signed(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(_HEADER, sign(self._secret, method))
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


class _SignUnary(_Signer, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation, client_call_details, request):
        return await continuation(self.signed(client_call_details), request)


class _SignStream(_Signer, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation, client_call_details, request_iterator):
        return await continuation(self.signed(client_call_details), request_iterator)


def client_interceptors(secret: bytes) -> "list[_SignUnary | _SignStream]":
    """Sign each unary and each bidirectional call; grpc.aio wants one class per kind of call."""
    return [_SignUnary(secret), _SignStream(secret)]


class ServerAuth(grpc.aio.ServerInterceptor):
    """Refuses what is not signed with UNAUTHENTICATED, before a message is read; health checks are open."""

    def __init__(self, secret: bytes) -> None:
        self._verifier = Verifier(secret)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if method.startswith(_HEALTH):
            return await continuation(handler_call_details)
        header = next(
            (value for key, value in handler_call_details.invocation_metadata if key == _HEADER), None
        )
        if isinstance(header, bytes):
            header = header.decode(errors="replace")
        refusal = self._verifier.refusal(method, header)
        if refusal is None:
            return await continuation(handler_call_details)
        return _refuse(refusal)


def _refuse(reason: str) -> grpc.RpcMethodHandler:
    # A stream handler answers every kind of call, and does not wait for a first message as a unary one would.
    async def abort(_request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    return grpc.stream_stream_rpc_method_handler(abort)
