"""Stubs of the services in proto/ for grpc.aio, and what adds a service to a server.

The descriptors have names, kinds and types of the methods, so gRPC's plugin for protoc is not needed. Each
stub says the types of its methods for readers and type checkers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from baton.rpc import ext_proc_pb2, inference_pb2, worker_pb2
from baton.rpc.port import Server

WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
EXTERNAL_PROCESSOR = ext_proc_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"]


@cache  # each connection to a worker makes a stub
def _methods(service: ServiceDescriptor) -> Mapping[str, tuple[str, type[Message], type[Message]]]:
    """Each method's kind as gRPC names it (`unary_stream` for one request and a stream of responses), and its
    types, by the name of the method."""
    return {
        each.name: (
            "_".join(
                "stream" if side else "unary" for side in (each.client_streaming, each.server_streaming)
            ),
            GetMessageClass(each.input_type),
            GetMessageClass(each.output_type),
        )
        for each in service.methods
    }


class _Stub:
    """Has an attribute for each method of its service, which calls the method over a channel. It is made at
    its first use: a router has a stub for each worker, and calls one of its methods."""

    service: ClassVar[ServiceDescriptor]

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    if not TYPE_CHECKING:  # a type checker would take any name for a method

        def __getattr__(self, name: str) -> Any:
            if (method := _methods(self.service).get(name)) is None:
                raise AttributeError(f"{self.service.full_name} has no method {name}")
            kind, request, response = method
            path = f"/{self.service.full_name}/{name}"
            call = getattr(self._channel, kind)(path, request.SerializeToString, response.FromString)
            setattr(self, name, call)
            return call


class WorkerStub(_Stub):
    service = WORKER
    Attach: grpc.aio.StreamStreamMultiCallable[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]
    Describe: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.DescribeRequest, worker_pb2.WorkerDescription]
    GetStatus: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.StatusRequest, worker_pb2.WorkerStatus]
    GetPhases: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.PhasesRequest, worker_pb2.Phases]
    ReplaceWeights: grpc.aio.StreamStreamMultiCallable[worker_pb2.WeightsCommand, worker_pb2.WeightsReport]
    ReadCheckpoint: grpc.aio.UnaryStreamMultiCallable[worker_pb2.CheckpointRequest, worker_pb2.CheckpointPart]
    RestartEngine: grpc.aio.UnaryUnaryMultiCallable[
        worker_pb2.RestartEngineRequest, worker_pb2.RestartedEngine
    ]
    SetAdapters: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.AdapterSet, worker_pb2.AdapterSet]
    SetMemory: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.MemoryRequest, worker_pb2.WorkerStatus]
    SetPause: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.PauseRequest, worker_pb2.WorkerStatus]
    SetPool: grpc.aio.UnaryUnaryMultiCallable[worker_pb2.SetPoolRequest, worker_pb2.WorkerStatus]


class InferenceStub(_Stub):
    service = INFERENCE
    Generate: grpc.aio.UnaryStreamMultiCallable[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


def add_service(
    server: Server, service: ServiceDescriptor, servicer: Any, as_bytes: Collection[str] = ()
) -> None:
    """Lets the methods of `servicer` serve those of the same names. The server refuses those that it lacks.

    A method gets the request, or the requests as an iterator, and the `ServicerContext`. It returns the
    response, writes responses to the context, or yields them. Those that `as_bytes` names get and give the
    bytes of messages.
    """
    handlers = {}
    for name, (kind, request, response) in _methods(service).items():
        if (serve := getattr(servicer, name, None)) is not None:
            make = getattr(grpc, f"{kind}_rpc_method_handler")
            coders = () if name in as_bytes else (request.FromString, response.SerializeToString)
            handlers[name] = make(serve, *coders)
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
