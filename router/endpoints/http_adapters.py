"""HTTP calls that load and unload adapters (LoRA) on all workers, as vLLM has them.

They need the admin key."""

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from baton.router import errors
from baton.router.api.admin_bodies import LoadAdapterBody, UnloadAdapterBody
from baton.router.api.validation import parse
from baton.router.endpoints.http_admin import AdminCalls, Handler, name_of
from baton.rpc import worker_pb2 as pb
from baton.rpc.adapters import change_adapters
from baton.rpc.all_workers import NotDone

PURPOSE = "load or unload adapters"
SHOWN_WITHIN, SHOWN_CHECK = 5.0, 0.02  # seconds


class HttpAdapters(AdminCalls):
    def handlers(self) -> dict[str, Handler]:
        return {"POST /v1/load_lora_adapter": self._load, "POST /v1/unload_lora_adapter": self._unload}

    async def _load(self, request: web.Request) -> web.Response:
        body = parse(LoadAdapterBody, await self.body(request))
        name, workers = body.lora_name, await self.ready_workers(PURPOSE)
        if name in self.config.model_names:
            raise errors.InvalidRequest(f"the model itself is called {name!r}", param="lora_name")
        newest = _newest(workers)
        # One that a call has left on some workers is loaded on the others.
        if name in newest and all(name in _adapters(worker) for worker in workers):
            text = f"the adapter {name!r} has already been loaded; unload it first"
            raise errors.InvalidRequest(text, param="lora_name")
        adapters = newest | {name: pb.Adapter(name=name, path=body.lora_path)}
        await self._change(workers, adapters, "lora_path")
        await self._shown(name, served=True)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        body = parse(UnloadAdapterBody, await self.body(request))
        name, workers = body.lora_name, await self.ready_workers(PURPOSE)
        if not any(name in _adapters(worker) for worker in workers):
            raise errors.NotFound(f"the adapter {name!r} cannot be found", param="lora_name")
        adapters = {other: each for other, each in _newest(workers).items() if other != name}
        await self._change(workers, adapters, "lora_name")
        await self._shown(name, served=False)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _change(
        self, workers: list[dict[str, Any]], wanted: Mapping[str, pb.Adapter], param: str
    ) -> None:
        """Gives all workers these adapters."""
        names = {worker["address"]: name_of(worker) for worker in workers}
        known = {
            worker["address"]: pb.AdapterSet(
                revision=worker["description"]["adapters_revision"], adapters=_adapters(worker).values()
            )
            for worker in workers
        }
        config = self.config
        try:
            adapters, within = [*wanted.values()], config.request_timeout
            await change_adapters(known, adapters, config.secret, config.cluster_tls, within)
        except NotDone as error:
            outcome = "The adapters are those of before."
            if not error.faults:
                text = f"the files at this path differ between the hosts of the workers. {outcome}"
                raise errors.InvalidRequest(text, param=param) from error
            raise self.failed(error, names, outcome, param) from error

    async def _shown(self, name: str, *, served: bool) -> None:
        """Returns when all processes of this router know that the adapter came, or went."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SHOWN_WITHIN
        while loop.time() < end:
            status = await self.status()
            processes = status.get("processes", [status["router"]])
            if all((name in process["models"]) is served for process in processes):
                return
            await asyncio.sleep(SHOWN_CHECK)


def _adapters(worker: Mapping[str, Any]) -> dict[str, pb.Adapter]:
    """By name."""
    return {
        each["name"]: pb.Adapter(
            name=each["name"], path=each["path"], fingerprint=bytes.fromhex(each["fingerprint"])
        )
        for each in worker["description"]["adapters"]
    }


def _newest(workers: list[dict[str, Any]]) -> dict[str, pb.Adapter]:
    return _adapters(max(workers, key=lambda worker: worker["description"]["adapters_revision"]))
