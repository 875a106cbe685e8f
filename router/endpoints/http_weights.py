"""HTTP calls that replace the weights of all workers, as SGLang has them. They need the admin key."""

import uuid

import grpc
from aiohttp import web

from baton.router import errors
from baton.router.api.bodies import UpdateWeightsBody
from baton.router.api.validation import parse
from baton.router.endpoints.http_admin import AdminCalls, name_of
from baton.rpc import worker_pb2 as pb
from baton.rpc.weights import NotReplaced, replace_weights

PATHS = "/get_world_size", "/update_weights_from_disk"


class HttpWeights:
    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls

    def routes(self) -> list[web.RouteDef]:
        world_size, update = PATHS
        return [
            web.get(world_size, self._calls.answered(self._world_size)),
            web.post(update, self._calls.answered(self._update)),
        ]

    async def _world_size(self, request: web.Request) -> web.Response:
        workers = (await self._calls.status())["workers"]
        size = sum(worker["description"]["tensor_parallel_size"] for worker in workers)
        return web.json_response({"world_size": size})

    async def _update(self, request: web.Request) -> web.Response:
        body = parse(UpdateWeightsBody, await self._calls.body(request))
        workers = (await self._calls.status())["workers"]
        # A worker that has started again with the weights of its --model is refused: it gets these, too.
        missing = [worker for worker in workers if worker["state"] not in ("ready", "refused")]
        if missing or not workers:
            names = ", ".join(name_of(worker) for worker in missing) or "no worker is known"
            text = "all workers must be ready to get new weights; see `baton status`"
            raise errors.NoWorker(f"{names}: {text}")
        names = {worker["address"]: name_of(worker) for worker in workers}
        label = "" if body.weight_version is None else f"{body.weight_version}-"
        weights = pb.StageWeights(path=body.model_path, version=f"{label}{uuid.uuid4().hex}")
        config = self._calls.config
        try:
            done = await replace_weights(list(names), weights, config.secret, config.cluster_tls)
        except NotReplaced as error:
            raise self._failed(error, names) from error
        text = f"{len(names)} workers compute with {weights.path}; no worker served for {done.pause:.2f} s"
        found = {"success": True, "message": text, "weight_version": weights.version}
        return web.json_response({**found, "num_paused_requests": 0})

    def _failed(self, error: NotReplaced, names: dict[str, str]) -> errors.ApiError:
        refused, faults = not error.changed, list[str]()
        for address, fault in error.faults.items():
            refused &= fault is not None and fault.code() is grpc.StatusCode.FAILED_PRECONDITION
            why = "it ended the call" if fault is None else self._calls.why(fault)
            faults.append(f"{names[address]}: {why}")
        text = f"{'; '.join(faults)}. {error.outcome}"
        return errors.InvalidRequest(text, param="model_path") if refused else errors.Failed(text)
