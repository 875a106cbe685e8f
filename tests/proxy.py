"""A server between two workers, in a thread and an event loop of its own."""

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any


class Proxy(ABC):
    """Subclasses carry connections; what they need for that is there before `__init__` here is called."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._do(asyncio.start_server(self._carry, "127.0.0.1", 0))
        self.address = "127.0.0.1:" + str(self._server.sockets[0].getsockname()[1])

    @abstractmethod
    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """One connection, both ways, until either end closes."""

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            # A connection that was just accepted may start more tasks.
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)
