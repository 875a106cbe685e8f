#!/usr/bin/env bash
# pyzmq 27.3.0: `recv` of zmq.asyncio within asyncio.timeout loses the message that arrives as the time ends.
#
# The socket takes the message out of ZeroMQ's queue and puts it into the future that `recv` returned. If the timeout
# ends in the same turn of the event loop, the task is cancelled before it sees the result. The message is gone: the
# next `recv` returns the one after it. A loop that was busy meanwhile, with a tokenizer or a garbage collection, handles
# both in one turn, so this is no rare race. `recv_string` and `recv_json` warn, `recv` and `recv_multipart` do not.
# From Python 3.12 on, asyncio.wait_for is made of asyncio.timeout. asyncio's own Queue and StreamReader keep what
# arrived. Known since zeromq/pyzmq issue 1925 as "quite unlikely, but not impossible", and not in the documentation.
#
# Seen: of 20 messages that arrive while the loop is busy for longer than the timeout, lost:
#     zmq recv            20
#     zmq recv_multipart  20
#     asyncio.Queue        0
#     StreamReader         0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pyzmq==27.3.0
cat > "$folder/try.py" <<'PY'
import asyncio
import socket
import sys
import time

import zmq
import zmq.asyncio

COUNT, TIMEOUT, BUSY = 20, 0.02, 0.1  # seconds


async def lost(send, receive):
    received = 0
    for number in range(COUNT):

        async def take():
            async with asyncio.timeout(TIMEOUT):
                await receive()

        task = asyncio.create_task(take())
        await asyncio.sleep(0)  # the task waits now
        send(b"%20d" % number)
        time.sleep(BUSY)  # the event loop has other work
        try:
            await task
            received += 1
        except TimeoutError:
            pass
    send(b"%20s" % b"end")
    while await receive() not in (b"%20s" % b"end", [b"%20s" % b"end"]):
        received += 1
    return COUNT - received


async def main():
    seen = {}
    receivers, senders = zmq.asyncio.Context(), zmq.Context()
    for name in "recv", "recv_multipart":
        receiver, sender = receivers.socket(zmq.PULL), senders.socket(zmq.PUSH)
        sender.connect(f"tcp://127.0.0.1:{receiver.bind_to_random_port('tcp://127.0.0.1')}")
        sender.send(b"begin")
        await receiver.recv()
        seen[f"zmq {name}"] = await lost(sender.send, getattr(receiver, name))
    receivers.destroy(linger=0), senders.destroy(linger=0)
    queue = asyncio.Queue()
    seen["asyncio.Queue"] = await lost(queue.put_nowait, queue.get)
    one, other = socket.socketpair()
    reader, _ = await asyncio.open_connection(sock=one)
    seen["StreamReader"] = await lost(other.sendall, lambda: reader.readexactly(20))
    for name, count in seen.items():
        print(f"{name:18} {count:3}")
    return seen["zmq recv"] == 0 or seen["zmq recv_multipart"] == 0 or seen["asyncio.Queue"] + seen["StreamReader"] > 0


sys.exit(asyncio.run(main()))
PY
"$folder/venv/bin/python" "$folder/try.py"
