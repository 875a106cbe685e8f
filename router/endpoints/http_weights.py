"""HTTP calls that replace the weights of all workers, as SGLang has them. They need the admin key."""

import uuid

from aiohttp import web

from baton.router.api.admin_bodies import UpdateWeightsBody
from baton.router.api.validation import parse
from baton.router.endpoints.http_admin import AdminCalls, Handler, name_of
from baton.rpc.all_workers import NotDone
from baton.rpc.pools import in_turns
from baton.rpc.weights import named, outcome_of, replace_weights
from baton.system.words import counted

CONNECT_WITHIN = 5.0  # seconds


class HttpWeights(AdminCalls):
    def handlers(self) -> dict[str, Handler]:
        return {"GET /get_world_size": self._world_size, "POST /update_weights_from_disk": self._update}

    async def _world_size(self, request: web.Request) -> web.Response:
        workers = (await self.status())["workers"]
        size = sum(worker["description"]["tensor_parallel_size"] for worker in workers)
        return web.json_response({"world_size": size})

    async def _update(self, request: web.Request) -> web.Response:
        body = parse(UpdateWeightsBody, await self.body(request))
        names = await workers_for_weights(self)
        at_once = body.max_unavailable or 0
        weights = named(body.model_path, new_version(body.weight_version), rolls=at_once > 0)
        config = self.config
        try:
            done = await replace_weights(list(names), weights, config.secret, config.cluster_tls, at_once)
        except NotDone as error:
            raise self.failed(error, names, outcome_of(error), "model_path") from error
        text = f"the weights of {counted(len(names), 'worker')} are {weights.path}; {done.outage}"
        fields = {"success": True, "message": text, "weight_version": weights.version}
        return web.json_response({**fields, "num_paused_requests": 0})


def new_version(label: str | None) -> str:
    """A name that no other weights have or had. It begins with the label."""
    return f"{'' if label is None else f'{label}-'}{uuid.uuid4().hex}"


async def workers_for_weights(calls: AdminCalls) -> dict[str, str]:
    """The workers that new weights go to: all, by address, and how errors name them. Their order is that of
    `in_turns`. Raises NoWorker.

    A worker that has started again with the weights of its --model is refused: it gets these, too. One that
    has just got weights is connected again soon."""
    workers = await calls.ready_workers("get new weights", CONNECT_WITHIN)
    names = {worker["address"]: name_of(worker) for worker in workers}
    return {address: names[address] for address in in_turns(workers)}
