"""HTTP calls that pause all workers and let them go on, as vLLM has them, and those of SGLang by which
workers give memory back. They need the admin key."""

import contextlib
from collections.abc import AsyncIterator
from typing import get_args

from aiohttp import web

from baton.router import errors
from baton.router.api.admin_bodies import LONGEST_PAUSE, MemoryBody, MemoryTag, PauseQuery
from baton.router.api.validation import parse, validate
from baton.router.endpoints.http_admin import AdminCalls, Handler, name_of
from baton.rpc.all_workers import NotDone
from baton.rpc.pause import Workers, workers_at
from baton.system.words import counted


class HttpPause(AdminCalls):
    def handlers(self) -> dict[str, Handler]:
        return {
            "POST /pause": self._pause,
            "POST /resume": self._resume,
            "GET /is_paused": self._is_paused,
            "POST /release_memory_occupation": self._release,
            "POST /resume_memory_occupation": self._take_again,
        }

    async def _pause(self, request: web.Request) -> web.Response:
        query = validate(PauseQuery, dict(request.query))
        seconds = query.seconds or min(self.config.request_timeout, LONGEST_PAUSE)
        async with self._workers("The cluster goes on.") as workers:
            try:
                await workers.pause(query.mode, seconds, keep_kv=not query.clear_cache)
            except TimeoutError:
                text = f"requests still ran after {seconds:g} s, so the cluster goes on; pause with mode=keep"
                raise errors.TimedOut(text) from None
        return web.json_response({"status": "paused", "seconds": seconds})

    async def _resume(self, request: web.Request) -> web.Response:
        async with self._workers(
            "They stay paused, and go on at the end of the pause if they can."
        ) as workers:
            await workers.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        pause = (await self.status())["router"]["pause"]
        return web.json_response({"is_paused": pause != "none", "pause": pause})

    async def _release(self, request: web.Request) -> web.Response:
        tags = await self._tags(request)
        outcome = "The other workers have released it: try again, or call /resume_memory_occupation."
        async with self._workers(outcome) as workers:
            if busy := await workers.busy():
                text = f"requests are at {counted(busy, 'worker')}: call /pause?mode=abort or mode=wait first"
                raise errors.InvalidRequest(text)
            await workers.release(tags)
        return web.json_response({"success": True, "released": tags})

    async def _take_again(self, request: web.Request) -> web.Response:
        tags = await self._tags(request)
        async with self._workers("The other workers have it: try again.") as workers:
            statuses = await workers.take_again(tags)
        lacks = sorted({tag for status in statuses for tag in status.released})
        outcome = {"success": True, "released": lacks}
        return web.json_response(outcome | {"lost_weights": any(status.lost_weights for status in statuses)})

    async def _tags(self, request: web.Request) -> list[str]:
        raw = await self.body(request)
        tags = parse(MemoryBody, raw).tags if raw.strip() else None
        return list(dict.fromkeys(tags or get_args(MemoryTag)))

    @contextlib.asynccontextmanager
    async def _workers(self, outcome: str) -> AsyncIterator[Workers]:
        """All workers. `outcome`: what a user reads behind the faults of those that did not do it.

        One that is not connected may have dropped the router's stream to take new weights, or start only.
        Then it gets no request while the others are paused."""
        listed = (await self.status())["workers"]
        names = {worker["address"]: name_of(worker) for worker in listed}
        lacking = {w["address"] for w in listed if w["state"] not in ("ready", "draining")}
        if not names:
            raise errors.NoWorker("no worker is known; see `baton status`")
        config = self.config
        opened = workers_at(list(names), config.secret, config.cluster_tls, may_lack=lacking)
        try:
            async with opened as workers:
                yield workers
        except NotDone as error:
            raise self.failed(error, names, outcome) from error
