"""The routers that requests can go to, and the choice among them."""

import asyncio
import logging
import math
import random
from collections.abc import Callable, Collection

import aiohttp

from baton.endpoint_picker.conversation import Conversation
from baton.router.discovery import Discovery
from baton.router.endpoints.stored_responses import home_tag
from baton.router.policy.prefill import Ring
from baton.system.metrics_page import samples

log = logging.getLogger(__name__)

BOUND = 1.25
"""A router may have so many times the mean requests before a conversation leaves it, and `SLACK` more. Their
lengths are not known here, so no measured speed says how late they are."""
SLACK = 10
"""Requests that do not make a router busy: with few requests, each conversation stays at its router."""
POLL_SECONDS = 1.0
POLL_TIMEOUT = 2.0
_REQUESTS = "vllm:num_requests_waiting", "vllm:num_requests_running"


def reported_requests(page: str) -> float:
    """Returns the requests of a router, from its metrics. Raises ValueError if they are not there."""
    numbers = [sample.value for sample in samples(page, *_REQUESTS)]
    if not numbers or not all(0 <= number < math.inf for number in numbers):
        raise ValueError("its metrics do not tell how many requests it has")
    return sum(numbers)


class Routers:
    """The addresses that discovery finds, and the requests that each router has.

    A router that does not answer is chosen only if no router answers. Runs on the event loop.

    Attributes:
        requests: of each address, as reported and as chosen since then.
        silent: the addresses that do not answer.
    """

    def __init__(
        self, discovery: Discovery, metrics_port: int | None, on_found: Callable[[], None] = lambda: None
    ) -> None:
        """`on_found` is called when discovery yields routers."""
        self._on_found = on_found
        self._discovery = discovery
        self._metrics_port = metrics_port
        self.requests: dict[str, float] = {}
        self.silent: set[str] = set()
        self._ring = Ring()
        self._names: list[str] = []  # row of the ring → address

    async def run(self) -> None:
        """Follows discovery and the loads until it is cancelled."""
        polling = asyncio.create_task(self._poll(), name="loads of routers")
        try:
            async for addresses in self._discovery.watch():
                self.update(addresses)
            await polling  # a fixed set of routers has no later changes
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    def choose(self, conversation: Conversation, allowed: Collection[str] | None = None) -> str | None:
        """Returns the address of the router for a request; None if there is none.

        `allowed`: the addresses to choose from. None: all.
        """
        candidates = {name for name in self._names if allowed is None or name in allowed}
        candidates = candidates - self.silent or candidates
        if not candidates:
            return None
        chosen = self._home(conversation, candidates)
        self.requests[chosen] += 1
        return chosen

    def _home(self, conversation: Conversation, candidates: set[str]) -> str:
        """The router that made the earlier response. Else the first one on the ring, from the conversation's
        point on, that is not too busy, as in `router.policy.prefill.sticky`."""
        if conversation.response_id is not None:
            for name in sorted(candidates):
                if conversation.response_id.startswith(home_tag(name)):
                    return name
        requests = self.requests
        if conversation.key is None:
            return min(candidates, key=lambda name: (requests[name], random.random()))
        most = BOUND * sum(requests[name] for name in candidates) / len(candidates) + SLACK
        # At least one router is not above the mean, so the walk finds one.
        in_order = (self._names[row] for row in self._ring.walk(conversation.key))
        return next(name for name in in_order if name in candidates and requests[name] <= most)

    # ------------------------------------------------------------ what routers report

    def update(self, addresses: frozenset[str]) -> None:
        """Discovery found these."""
        self.requests = {name: self.requests.get(name, 0.0) for name in addresses}
        self.silent &= addresses
        self._names, self._ring = sorted(addresses), Ring()
        for row, name in enumerate(self._names):
            self._ring.add(name, row)
        log.info("%d routers: %s", len(self._names), ", ".join(self._names))
        if addresses:
            self._on_found()

    async def _poll(self) -> None:
        # New connections, because a router that drains still answers on old ones.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=POLL_TIMEOUT)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                await asyncio.gather(*(self._ask(session, name) for name in self._names))
                await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, name: str) -> None:
        host, _, port = name.rpartition(":")
        try:
            async with session.get(f"http://{host}:{self._metrics_port or port}/metrics") as response:
                response.raise_for_status()
                requests = reported_requests(await response.text())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if name not in self.silent and name in self.requests:
                log.warning("router at %s: %s", name, str(error) or type(error).__name__)
                self.silent.add(name)
            return
        if name in self.requests:
            self.requests[name] = requests
            self.silent.discard(name)
