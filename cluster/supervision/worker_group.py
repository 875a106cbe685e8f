"""`baton prefill` and `baton decode` with `--data-parallel-size N`: the process that starts the N workers of
a group, and ends all of them when one ends.

    baton prefill --data-parallel-size 2 ─┬─▶ baton prefill --index 0 --port P     --group …
                                          └─▶ baton prefill --index 1 --port P + 1 --group …

The engines of a group compute each step together, so without one of them the others hang. This process has
no part in what they serve. It tells its supervisor their addresses, passes signals on, and waits.
"""

import asyncio
import logging
import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import msgspec
import setproctitle

from baton.cluster.gpus import default_device, visible_gpus
from baton.cluster.options.parameters import role_environment, to_argv
from baton.cluster.options.roles import WorkerRole
from baton.cluster.supervision.calls import until_silent
from baton.processes import ready_pipe
from baton.processes.children import Child, describe_exit, report
from baton.processes.tree import StopSignals
from baton.rpc.auth import SECRET_VARIABLE
from baton.rpc.tls import TlsFiles
from baton.system.addresses import free_port
from baton.system.python_path import python_path
from baton.worker.group import Group

log = logging.getLogger(__name__)


def run(role: str, flags: WorkerRole, secret: bytes, program: Sequence[str]) -> int:
    """Runs a group to its end: 0 after a signal that all of its workers obeyed. Raises ValueError for options
    that it cannot have. `program`: the command `baton`."""
    size = flags.engine.data_parallel_size
    if flags.network.kv_events_endpoint is not None:
        raise ValueError(
            f"--advanced.kv-events-endpoint: with --data-parallel-size {size} several workers "
            "would have it; leave it out"
        )
    commands = [command_of(role, flags, rank, program) for rank in range(size)]
    environments = [variables | {SECRET_VARIABLE: secret.decode()} for variables in _gpus(flags)]
    setproctitle.setproctitle(f"{flags.process.title}: {role} group {flags.process.index}")
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    async def run_group() -> int:
        signals = StopSignals()
        signals.install()
        return await WorkerGroup(role, flags, secret, signals).run(commands, environments)

    return asyncio.run(run_group())


def command_of(role: str, flags: WorkerRole, rank: int, program: Sequence[str]) -> list[str]:
    """Of the worker with this rank, without its group. Its ports are those given, plus its rank."""
    network = flags.network
    ports = {
        name: port + rank for name in ("port", "kv_port", "metrics_port") if (port := getattr(network, name))
    }
    index = flags.process.index * flags.engine.data_parallel_size + rank
    process = replace(flags.process, index=index, ready_fd=None)
    of_rank = replace(flags, network=replace(network, **ports), process=process)
    return [*program, role, *to_argv(*vars(of_rank).values())]


def _gpus(flags: WorkerRole) -> list[dict[str, str]]:
    """The variables of each worker, which has GPUs of its own. Raises ValueError if there are too few."""
    size, each = flags.engine.data_parallel_size, flags.engine.tensor_parallel_size
    if not (flags.engine.device or default_device()).startswith("cuda"):
        return [{} for _ in range(size)]
    present = visible_gpus()
    if len(present) < size * each:
        raise ValueError(
            f"--data-parallel-size {size}: these workers need {size * each} GPUs, but there are "
            f"{len(present)}; lower it, or run them on the CPU with --device cpu"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(present[i * each : (i + 1) * each])} for i in range(size)]


class _Rank(Child):
    """A worker of the group, which starts now. `pipe`: its ready pipe, which this owns."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], pipe: BinaryIO) -> None:
        super().__init__(name, popen, session=True)
        self.ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.error = ""
        self._pipe = pipe

    async def follow(self, stages: int | None) -> int:
        """Reads what the worker tells until it has ended. Its stages go to the descriptor `stages`. Returns
        its exit code."""
        stage = ready_pipe.passes_on(stages)
        self.error = await ready_pipe.follow(self._pipe, self.ready.set_result, stage, self.kill)
        return await self.wait()


class WorkerGroup:
    """Made inside the event loop. Its workers die with this process (`tie_to_parent`)."""

    def __init__(self, role: str, flags: WorkerRole, secret: bytes, signals: StopSignals) -> None:
        self._role = role
        self._flags = flags
        self._secret = secret
        self._signals = signals
        self._stopping = False
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self, commands: Sequence[list[str]], environments: Sequence[Mapping[str, str]]) -> int:
        """One command and one environment for each worker. Returns the exit code."""
        ranks = list[_Rank]()
        drained, undrained = os.pipe()
        try:
            group = Group(secrets.token_hex(8), 0, len(commands), free_port(), undrained, drained)
            for rank, (command, variables) in enumerate(zip(commands, environments, strict=True)):
                of_rank = msgspec.json.encode(msgspec.structs.replace(group, rank=rank)).decode()
                ranks.append(self._start([*command, "--group", of_rank], variables, rank, group))
        finally:
            os.close(drained)
            os.close(undrained)
        try:
            return await self._until_end(ranks)
        finally:
            for each in ranks:
                each.kill()
            await asyncio.gather(*(each.wait() for each in ranks))

    def _start(self, command: list[str], variables: Mapping[str, str], rank: int, group: Group) -> _Rank:
        popen, pipe = ready_pipe.start(
            command,
            role_environment(os.environ, **{**python_path(), **variables}),
            pass_fds=(group.undrained, group.drained),
        )
        name = f"{self._role} {self._flags.process.index * group.size + rank}"
        return _Rank(name, popen, pipe)

    async def _until_end(self, ranks: Sequence[_Rank]) -> int:
        """Until all workers have ended, or one has failed."""
        ready_fd = self._flags.process.ready_fd
        watching = asyncio.create_task(self._watch_all(ranks, ready_fd))
        serving = asyncio.create_task(self._serve(ranks, ready_fd))
        stop = asyncio.create_task(self._signals.stop.wait())
        hurry = asyncio.create_task(self._signals.hurry.wait())
        try:
            await asyncio.wait({watching, self._failed, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                self._stopping = True
                for each in ranks:
                    each.signal(self._signals.first)
                await asyncio.wait({watching, self._failed, hurry}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                log.error("%s; the other workers of the group end with it", self._failed.result())
                report(ready_fd, {"error": self._failed.result()})
            return int(self._failed.done() or not watching.done())
        finally:
            tasks = watching, serving, stop, hurry
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_all(self, ranks: Sequence[_Rank], ready_fd: int | None) -> None:
        await asyncio.gather(*(self._watch(each, ready_fd, first=each is ranks[0]) for each in ranks))

    async def _watch(self, rank: _Rank, ready_fd: int | None, *, first: bool) -> None:
        code = await rank.follow(ready_fd if first else None)
        ends_as_told = self._stopping and code in (0, -self._signals.first)  # it may have had no handler yet
        if not ends_as_told:
            self._fail(f"{rank.name}: {rank.error or describe_exit(code)}")

    async def _serve(self, ranks: Sequence[_Rank], ready_fd: int | None) -> None:
        """Tells the addresses when all workers are ready, then asks all whether they live."""
        ready = await asyncio.gather(*(each.ready for each in ranks))
        addresses = [str(each["address"]) for each in ready]
        report(ready_fd, {"ready": {**ready[0], "pid": os.getpid(), "addresses": addresses}})
        tls = self._flags.secret.tls()
        await asyncio.gather(*(self._silent(*each, tls) for each in zip(ranks, ready, strict=True)))

    async def _silent(self, rank: _Rank, ready: Mapping[str, Any], tls: TlsFiles | None) -> None:
        patience = self._flags.deadlines.failure_timeout
        self._fail(f"{rank.name} {await until_silent(ready, self._secret, tls, patience=patience)}")

    def _fail(self, why: str) -> None:
        if not self._failed.done():
            self._failed.set_result(why)
