"""Types of the generated module for grpc.aio, which the plugin does not write."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from baton.rpc.ext_proc_pb2 import ProcessingRequest, ProcessingResponse

class ExternalProcessorStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Process: grpc.aio.StreamStreamMultiCallable[ProcessingRequest, ProcessingResponse]

class ExternalProcessorServicer:
    def Process(
        self, request_iterator: AsyncIterator[ProcessingRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[ProcessingResponse]: ...

def add_ExternalProcessorServicer_to_server(
    servicer: ExternalProcessorServicer, server: grpc.aio.Server
) -> None: ...
