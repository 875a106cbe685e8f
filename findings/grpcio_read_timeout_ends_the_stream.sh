#!/usr/bin/env bash
# grpcio 1.85.1: a timeout around one read of a grpc.aio stream cancels the call, and the next `anext` tells of a normal end.
#
# asyncio.timeout and wait_for bound one step of a program: after a timeout of a StreamReader or a Queue one reads on.
# A call of grpc.aio takes the cancellation of `read` for its own. The next `read` raises asyncio.CancelledError, in a
# task that was not cancelled, so that task ends without a word in any log. With `anext` it is worse: the next one
# raises StopAsyncIteration, as after the last message, so a loop that looks for a token within some seconds, to send
# a keep-alive, takes a cut answer for a whole one. Only `call.code()` tells. The documentation of `read` does not name
# it. asyncio.wait, which cancels nothing, avoids it.
#
# Seen, for a server that sends 0, 1 and 2 and is slow before 1:
#     read:  0, TimeoutError, CancelledError      task asked to cancel: 0 times, call: CANCELLED
#     anext: 0, TimeoutError, StopAsyncIteration  task asked to cancel: 0 times, call: CANCELLED
#     wait:  0, pending, 1, 2                     task asked to cancel: 0 times, call: OK
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grpcio==1.85.1
cat > "$folder/try.py" <<'PY'
import asyncio
import sys

import grpc

WITHIN = 0.1  # seconds


class Numbers(grpc.GenericRpcHandler):
    def __init__(self):
        self.slow = asyncio.Event()  # set: the server goes on

    def service(self, details):
        return grpc.unary_stream_rpc_method_handler(self.count)

    async def count(self, request, context):
        yield b"0"
        await self.slow.wait()
        yield b"1"
        yield b"2"


async def by_timeout(take, slow):
    seen = [(await take()).decode()]
    try:
        async with asyncio.timeout(WITHIN):
            await take()
    except TimeoutError:
        seen.append("TimeoutError")
    slow.set()
    try:
        seen.append((await take()).decode())
    except (StopAsyncIteration, asyncio.CancelledError) as error:
        seen.append(type(error).__name__)
    return seen


async def by_wait(take, slow):
    seen = [(await take()).decode()]
    task = asyncio.ensure_future(take())
    _, pending = await asyncio.wait([task], timeout=WITHIN)
    seen += ["pending"] * len(pending)
    slow.set()
    return [*seen, (await task).decode(), (await take()).decode()]


async def main():
    handler, server = Numbers(), grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    everything = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for name, answers in ("read", by_timeout), ("anext", by_timeout), ("wait", by_wait):
            handler.slow.clear()
            call = channel.unary_stream("/numbers/Count")(b"")
            take = call.read if name == "read" else aiter(call).__anext__
            seen = await answers(take, handler.slow)
            asked, code = asyncio.current_task().cancelling(), (await call.code()).name
            print(f"{name + ':':6} {', '.join(seen):35} task asked to cancel: {asked} times, call: {code}")
            everything[name] = [*seen, asked, code]
    await server.stop(0)
    return everything != {
        "read": ["0", "TimeoutError", "CancelledError", 0, "CANCELLED"],
        "anext": ["0", "TimeoutError", "StopAsyncIteration", 0, "CANCELLED"],
        "wait": ["0", "pending", "1", "2", 0, "OK"],
    }


sys.exit(asyncio.run(main()))
PY
"$folder/venv/bin/python" "$folder/try.py" 2> "$folder/errors" || { tail -5 "$folder/errors"; exit 1; }
