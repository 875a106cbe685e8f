"""Types of the generated module for grpc.aio, which the plugin does not write."""

from collections.abc import AsyncIterable, AsyncIterator

import grpc
import grpc.aio

from baton.rpc.worker_pb2 import (
    DescribeRequest,
    RouterMessage,
    SetPoolRequest,
    StatusRequest,
    WorkerDescription,
    WorkerMessage,
    WorkerStatus,
)

class WorkerStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Attach: grpc.aio.StreamStreamMultiCallable[RouterMessage, WorkerMessage]
    Describe: grpc.aio.UnaryUnaryMultiCallable[DescribeRequest, WorkerDescription]
    GetStatus: grpc.aio.UnaryUnaryMultiCallable[StatusRequest, WorkerStatus]
    SetPool: grpc.aio.UnaryUnaryMultiCallable[SetPoolRequest, WorkerStatus]

class WorkerServicer:
    def Attach(
        self, request_iterator: AsyncIterator[RouterMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterable[WorkerMessage]: ...
    async def Describe(
        self, request: DescribeRequest, context: grpc.aio.ServicerContext
    ) -> WorkerDescription: ...
    async def GetStatus(self, request: StatusRequest, context: grpc.aio.ServicerContext) -> WorkerStatus: ...
    async def SetPool(self, request: SetPoolRequest, context: grpc.aio.ServicerContext) -> WorkerStatus: ...

def add_WorkerServicer_to_server(servicer: WorkerServicer, server: grpc.aio.Server) -> None: ...
