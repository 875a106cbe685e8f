"""The adapters (LoRA) of a worker, which a coordinator sets for all workers (`rpc.adapters`).

    SetAdapters ─▶ routers forget what goes ─▶ the engine drops it, and loads what is new ─▶ routers know it

A question names the revision that it replaces. So of two coordinators at the same time one is refused, and no
worker loses what the other one has just loaded.
"""

import asyncio
import logging
import re
from pathlib import PurePosixPath

from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.service_process.backend import Backend, Refused
from baton.worker.service_process.streams import Routers

log = logging.getLogger(__name__)

MAX_PATH, FINGERPRINT_BYTES = 4096, 16
_NAME = re.compile(r"[\x21-\x7e]{1,128}")


class WorkerAdapters:
    """Of one worker. `description` has the adapters that it serves now."""

    def __init__(self, backend: Backend, routers: Routers, description: pb.WorkerDescription) -> None:
        self._backend = backend
        self._routers = routers
        self._description = description
        self._one_at_a_time = asyncio.Lock()

    def has(self, fingerprint: bytes) -> bool:
        return any(each.fingerprint == fingerprint for each in self._description.adapters)

    async def set(self, asked: pb.AdapterSet) -> pb.AdapterSet:
        """Returns when the engine has exactly these. Raises Refused."""
        self._check(asked)
        async with self._one_at_a_time:
            before = {each.name: each for each in self._description.adapters}
            revision = self._description.adapters_revision
            kept = [before[x.name] for x in asked.adapters if x.name in before and _same(before[x.name], x)]
            if asked.revision == revision and len(kept) == len(asked.adapters) == len(before):
                return self._now  # another caller asked for the same
            if asked.replaces != revision or asked.revision <= revision:
                raise Refused("its adapters were changed by another call: try again")
            names = {each.name for each in kept}
            gone = [each for name, each in before.items() if name not in names]
            if gone:  # without them it has none of the known sets
                self._serve(kept, 0)
            for each in gone:
                log.info("adapter %s is unloaded", each.name)
                await self._backend.send(messages.UnloadAdapter(each.fingerprint))
            added = [each for each in asked.adapters if each.name not in names]
            loaded = await self._loaded(added)
            self._serve([*kept, *loaded], asked.revision)
            return self._now

    async def _loaded(self, added: list[pb.Adapter]) -> list[pb.Adapter]:
        """All of them, or none: raises Refused."""
        loaded = list[pb.Adapter]()
        try:
            for each in added:
                answer = await self._backend.load_adapter(pb.Adapter(name=each.name, path=each.path))
                if answer.error:
                    raise Refused(f"adapter {each.name}: {answer.error}")
                loaded.append(pb.Adapter(name=each.name, path=each.path, fingerprint=answer.fingerprint))
                if each.fingerprint not in (b"", answer.fingerprint):
                    text = f"the files at {each.path} are not those of the other workers"
                    raise Refused(f"adapter {each.name}: {text}")
                log.info("adapter %s of %s is loaded", each.name, each.path)
        except Refused:
            for each in loaded:
                await self._backend.send(messages.UnloadAdapter(each.fingerprint))
            raise
        return loaded

    @property
    def _now(self) -> pb.AdapterSet:
        described = self._description
        return pb.AdapterSet(revision=described.adapters_revision, adapters=described.adapters)

    def _serve(self, adapters: list[pb.Adapter], revision: int) -> None:
        """Takes requests for these from now on, and tells all routers."""
        described, adapters_now = self._description, pb.AdapterSet(adapters=adapters)
        described.ClearField("adapters")
        described.adapters.extend(adapters_now.adapters)
        described.adapters_revision = revision
        self._routers.broadcast(pb.WorkerMessage(description=described).SerializeToString())

    def _check(self, asked: pb.AdapterSet) -> None:
        if self._backend.draining:
            raise Refused(self._backend.draining)
        most, names = self._description.max_adapters, set[str]()
        if asked.adapters and not most:
            remedy = "start it with --engine vllm, and with --lora-modules or --advanced.max-loras"
            raise Refused(f"it loads no adapters: {remedy}")
        if len(asked.adapters) > most:
            text = f"{len(asked.adapters)} adapters are more than {most}"
            raise Refused(f"{text}: unload one, or start the workers with a larger --advanced.max-cpu-loras")
        for each in asked.adapters:
            if not _NAME.fullmatch(each.name):
                raise Refused("an adapter's name must be 1 to 128 printable characters without spaces")
            if each.name in names or each.name == self._description.served_model_name:
                raise Refused(f"adapter {each.name}: another model has this name")
            names.add(each.name)
            if not 0 < len(each.path) <= MAX_PATH or "\0" in each.path:
                raise Refused(f"adapter {each.name}: its path must have 1 to {MAX_PATH} characters")
            if not PurePosixPath(each.path).is_absolute():
                raise Refused(f"adapter {each.name}: its path must be absolute, not {each.path}")
            if len(each.fingerprint) not in (0, FINGERPRINT_BYTES):
                raise Refused(f"adapter {each.name}: its fingerprint must have {FINGERPRINT_BYTES} bytes")


def _same(loaded: pb.Adapter, asked: pb.Adapter) -> bool:
    return loaded.path == asked.path and asked.fingerprint in (b"", loaded.fingerprint)
