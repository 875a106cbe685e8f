"""Types of the generated module for grpc.aio, which the plugin does not write."""

import grpc
import grpc.aio

from baton.rpc.inference_pb2 import GenerateRequest, GenerateResponse

class InferenceStub:
    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Generate: grpc.aio.UnaryStreamMultiCallable[GenerateRequest, GenerateResponse]

class InferenceServicer:
    # It may also be a generator; with context.write a cancelled call ends at once, wherever it is.
    async def Generate(self, request: GenerateRequest, context: grpc.aio.ServicerContext) -> None: ...

def add_InferenceServicer_to_server(servicer: InferenceServicer, server: grpc.aio.Server) -> None: ...
