#!/usr/bin/env bash
# uvloop 0.23.0, and asyncio from Python 3.12 on: a buffer that is used again after `write` sends what came later.
#
# `write` of a stream returns at once, and the documentation says that what the socket does not take "is queued in an
# internal write buffer". asyncio up to Python 3.11 copies it there. uvloop, and asyncio of newer Pythons, queue a view of
# the caller's bytearray instead. What's new in Python 3.12 tells it as speed alone: "asyncio now avoids unnecessary
# copying when writing to sockets" (python/cpython, issue 91166). No page says that the buffer must stay as it is. A
# program that fills one staging buffer again and again, for slices of KV or of weights, thus sends parts of the next
# slice in place of the first, without an error, once the receiver is slower than the sender. A change of Python or of
# the event loop brings this into a program that was right. `write(bytes(buffer))` avoids it.
#
# Seen, with one buffer of 16 MiB that is filled with 1 and written, then filled with 2 and written: the share of the
# first 16 MiB that arrives as it was when it was written
#     asyncio of Python 3.11  1.00
#     asyncio of Python 3.12  0.23
#     uvloop                  0.23
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet uvloop==0.23.0
cat > "$folder/try.py" <<'PY'
import asyncio
import sys

import uvloop

SIZE = 1 << 24


async def ones():
    """The share of the first 16 MiB that arrives as it was when it was written."""
    arrived = asyncio.get_running_loop().create_future()

    async def receive(reader, writer):
        arrived.set_result(await reader.read())
        writer.close()

    server = await asyncio.start_server(receive, "127.0.0.1", 0, limit=2 * SIZE)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    buffer = bytearray(SIZE)
    for number in 1, 2:
        buffer[:] = bytes([number]) * SIZE
        writer.write(buffer)
    writer.write_eof()
    data = await arrived
    writer.close(), server.close()
    assert len(data) == 2 * SIZE
    return data[:SIZE].count(1) / SIZE


copies = sys.version_info < (3, 12)
shares = {f"asyncio of Python 3.{sys.version_info.minor}": asyncio.run(ones()), "uvloop": uvloop.run(ones())}
for name, share in shares.items():
    print(f"{name:23} {share:.2f}")
plain, other = shares.values()
sys.exit((plain < 1) == copies or other == 1)
PY
"$folder/venv/bin/python" "$folder/try.py"
