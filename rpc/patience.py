"""Bounds the time for which a server waits for the message of a call."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio


async def message_of(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext, seconds: float) -> Any:
    """Returns the message of a unary request. Ends the call if it does not arrive within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(requests)
    except (TimeoutError, StopAsyncIteration):
        text = f"the call's message did not come within {seconds:g} s"
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, text)


class MessageDeadline(grpc.aio.ServerInterceptor):
    """Ends a unary request whose message does not arrive within `seconds`.

    gRPC itself waits without bound. A client could open many calls and send nothing. A handler that streams
    its answer must write it to the context, not yield it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        answer: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary

        # gRPC calls a stream handler before the first message arrives.
        async def serve(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
            response = await answer(await message_of(requests, context, self._seconds), context)
            if not handler.response_streaming:
                await context.write(response)

        return grpc.stream_stream_rpc_method_handler(
            serve, handler.request_deserializer, handler.response_serializer
        )
