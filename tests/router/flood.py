"""A client that sends one request over and over, over many connections, as a process.

    python -m tests.router.flood URL KEY CONNECTIONS < body

URL is that of the endpoint. The process prints a line for each answer, and goes on until it is killed.
"""

import asyncio
import sys

import aiohttp


async def main(url: str, key: str, connections: int, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    async def ask_again_and_again() -> None:
        while True:
            async with http.post(url, data=body, headers=headers) as response:
                await response.read()
                assert response.status in (200, 400, 429), await response.text()
            print("answered", flush=True)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(*(ask_again_and_again() for _ in range(connections)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.stdin.buffer.read()))
