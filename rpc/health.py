"""gRPC's standard health service, with a limit on open watches."""

import asyncio

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

Status = health_pb2.HealthCheckResponse
MOST_WATCHES = 1_000


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Reports the state of each service. "" names the whole server. At most `MOST_WATCHES` watches are open.

    A client that does not read its watch delays only that watch. In grpcio's own servicer such a client
    delays every change of state, and so the end of the server.
    """

    def __init__(self) -> None:
        self._states: dict[str, int] = {"": Status.SERVING}
        self._changed = asyncio.Event()  # replaced with each change
        self._watches = 0
        self._stopping = False

    async def Check(  # pyrefly: ignore[bad-override]
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> Status:
        if request.service not in self._states:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return Status(status=self._states[request.service])

    async def Watch(  # pyrefly: ignore[bad-override]
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> None:
        if self._watches >= MOST_WATCHES:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MOST_WATCHES} watches are open")
        self._watches += 1
        told = None
        try:
            while True:
                changed = self._changed
                state = self._states.get(request.service, Status.SERVICE_UNKNOWN)
                if state != told:
                    await context.write(Status(status=state))
                    told = state
                await changed.wait()
        finally:
            self._watches -= 1

    def set(self, service: str, state: int) -> None:
        """Sets the state of `service` and tells its watches. It has no effect after `stop`."""
        if not self._stopping:
            self._states[service] = state
            self._changed.set()
            self._changed = asyncio.Event()

    def stop(self) -> None:
        """Sets every service to NOT_SERVING for good."""
        for service in self._states:
            self.set(service, Status.NOT_SERVING)
        self._stopping = True
