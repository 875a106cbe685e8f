"""Prints a chat answer as it is generated, over gRPC. The router needs --grpc-port.

python examples/grpc_stream.py [HOST:PORT]

The stubs are part of Baton. For another language generate them from proto/inference.proto.
"""

import asyncio
import sys

import grpc

from baton.rpc import inference_pb2 as pb
from baton.rpc.stubs import InferenceStub


async def main(address: str = "127.0.0.1:8001") -> None:
    request = pb.GenerateRequest(
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="What is the capital of Japan?")]),
        temperature=0,
        max_tokens=32,
    )
    async with grpc.aio.insecure_channel(address) as channel:
        async for response in InferenceStub(channel).Generate(request):
            for delta in response.deltas:
                print(delta.text, end="", flush=True)
            if response.HasField("usage"):
                print(f"\n{response.usage.completion_tokens} tokens")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
