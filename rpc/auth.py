"""Authentication of calls: each carries an HMAC-SHA256 that is keyed with the cluster secret.

The HMAC covers the server's id, the method, the time and a nonce. A server draws its id when it is made, and
tells the id to every caller. A channel asks for the id before its first signed call, and again after a unary
call was refused. So a signature is valid for one incarnation of one server.

The secret never travels. A captured header is refused by another server, for another method, after
`WINDOW_SECONDS`, and when it is used again. Messages are neither encrypted nor signed. An attacker who can
change the traffic can also send a false id. On an untrusted network add TLS.
"""

import asyncio
import hashlib
import hmac
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio

WINDOW_SECONDS = 30.0
SECRET_VARIABLE = "BATON_CLUSTER_SECRET"
MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_MAX_NONCES = 65_536
_HEADER = "x-baton-auth"
_SERVER_ID = "/baton.v1.Auth/ServerId"  # the server answers with its id, and reads no message
_CHECK = "/grpc.health.v1.Health/Check"
_UNSIGNED = (_SERVER_ID, _CHECK)


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


def sign(secret: bytes, server_id: bytes, method: str, *, now: float | None = None) -> str:
    """Returns the header value for one call of `method` ("/package.Service/Method").

    It is the time in milliseconds, the nonce and the MAC, joined by dots. `now` is in seconds since the
    epoch.
    """
    milliseconds = int((time.time() if now is None else now) * 1000)
    nonce = os.urandom(16).hex()
    return f"{milliseconds}.{nonce}.{_mac(secret, server_id, method, str(milliseconds), nonce)}"


class Verifier:
    """Checks header values. Remembers each nonce for as long as its header could be replayed."""

    def __init__(self, secret: bytes, server_id: bytes) -> None:
        self._secret = secret
        self._server_id = server_id
        self._seen: OrderedDict[str, float] = OrderedDict()  # nonce -> time at which its header is stale

    def refusal(self, method: str, header: str | None, *, now: float | None = None) -> str | None:
        """Returns why the call is refused, as a text for its caller; None if the call is accepted."""
        now = time.time() if now is None else now
        if header is None:
            return "the call is not signed with the cluster secret"
        milliseconds, _, rest = header.partition(".")
        nonce, _, mac = rest.partition(".")
        # The MAC is verified before any other part of the header is parsed.
        expected = _mac(self._secret, self._server_id, method, milliseconds, nonce)
        if not hmac.compare_digest(expected.encode(), mac.encode(errors="replace")):
            return "the call is signed with another cluster secret, or for another server"
        offset = int(milliseconds) / 1000 - now
        if abs(offset) > WINDOW_SECONDS:
            return f"the caller's clock is {offset:+.0f} s from ours; {WINDOW_SECONDS:.0f} s is accepted"
        while self._seen and next(iter(self._seen.values())) < now:
            self._seen.popitem(last=False)
        if nonce in self._seen:
            return "the call's signature was used before"
        if len(self._seen) >= _MAX_NONCES:
            return f"more than {_MAX_NONCES} calls within {2 * WINDOW_SECONDS:.0f} s"
        # A header with a time one window ahead is valid for two windows. Keeping every nonce for two
        # windows also keeps `_seen` sorted by expiry.
        self._seen[nonce] = now + 2 * WINDOW_SECONDS
        return None


def _mac(secret: bytes, server_id: bytes, method: str, milliseconds: str, nonce: str) -> str:
    parts = ("baton-rpc-1", server_id.hex(), method, milliseconds, nonce)
    message = "\n".join(parts).encode(errors="replace")
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


# ---------------------------------------------------------------- interceptors


async def ask_server_id(
    channel: grpc.aio.Channel, timeout: float | None = None, wait_for_ready: bool | None = None
) -> bytes:
    """Returns the id of the server that answers now. Raises grpc.aio.AioRpcError if no server answers."""
    ask = channel.unary_unary(_SERVER_ID, bytes, bytes)
    return await ask(b"", timeout=timeout, wait_for_ready=wait_for_ready)


class Signer:
    """Signs the calls of one channel. `channel` must be set before the first call."""

    channel: grpc.aio.Channel

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._server_id: bytes | None = None  # None: ask the server before the next call

    def interceptors(self) -> "list[_SignUnary | _SignStream]":
        """Returns one interceptor per kind of call, since grpc.aio needs a class for each."""
        return [_SignUnary(self), _SignStream(self)]

    async def sign_details(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        if method in _UNSIGNED:
            return details
        if self._server_id is None:
            self._server_id = await ask_server_id(self.channel, details.timeout, details.wait_for_ready)
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(_HEADER, sign(self._secret, self._server_id, method))
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )

    def forget_server_id(self) -> None:
        """Makes the next call ask for the id, because another server may answer at this address now."""
        self._server_id = None


class _SignUnary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    async def intercept_unary_unary(self, continuation, client_call_details, request):
        call = await continuation(await self._signer.sign_details(client_call_details), request)
        try:
            if await call.code() is grpc.StatusCode.UNAUTHENTICATED:
                self._signer.forget_server_id()
        except asyncio.CancelledError:
            call.cancel()
            raise
        return call


class _SignStream(grpc.aio.StreamStreamClientInterceptor):
    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    async def intercept_stream_stream(self, continuation, client_call_details, request_iterator):
        return await continuation(await self._signer.sign_details(client_call_details), request_iterator)


class ServerAuth(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid signature (UNAUTHENTICATED) before it reads a message.

    Health/Check and the question for the server's id need no signature. Health/Watch needs one, because such
    a call stays open.
    """

    def __init__(self, secret: bytes) -> None:
        self._server_id = os.urandom(16)
        self._verifier = Verifier(secret, self._server_id)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if method == _SERVER_ID:
            return _server_id_handler(self._server_id)
        if method == _CHECK:
            return await continuation(handler_call_details)
        header = next(
            (value for key, value in handler_call_details.invocation_metadata if key == _HEADER), None
        )
        if isinstance(header, bytes):
            header = header.decode(errors="replace")
        refusal = self._verifier.refusal(method, header)
        if refusal is None:
            return await continuation(handler_call_details)
        return _refusal_handler(refusal)


# Stream handlers serve every kind of call. Unlike unary handlers they do not wait for a first message.


def _server_id_handler(server_id: bytes) -> grpc.RpcMethodHandler:
    async def tell(_requests: object, _context: object) -> AsyncIterator[bytes]:
        yield server_id

    return grpc.stream_stream_rpc_method_handler(tell)


def _refusal_handler(reason: str) -> grpc.RpcMethodHandler:
    async def abort(_requests: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    return grpc.stream_stream_rpc_method_handler(abort)
