"""The service process of a worker: starts the process tree, serves routers, drains, and stops the tree."""

import asyncio
import logging.config
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise

import setproctitle
from grpc_health.v1 import health_pb2
from msgspec import structs

from baton.processes.children import report
from baton.rpc import worker_pb2 as pb
from baton.rpc.channel import cluster_pems, create_server
from baton.rpc.health import HealthServicer
from baton.rpc.pools import POOLS
from baton.rpc.stubs import WORKER, add_service
from baton.rpc.tls import add_port
from baton.system import cpu_engines
from baton.system.addresses import cannot_listen, try_port, url_host
from baton.system.kept_pages import KeptMemory
from baton.worker.config import WorkerConfig
from baton.worker.engine_process import to_routers
from baton.worker.messages import EngineReady
from baton.worker.processes import EngineError, EngineRestart, StartError, TreeError
from baton.worker.service_process.backend import SHUTTING_DOWN, Backend
from baton.worker.service_process.grpc_service import AttachService
from baton.worker.service_process.journal import Journal
from baton.worker.service_process.kv_events import KVEventPublisher
from baton.worker.service_process.metrics import Metrics
from baton.worker.service_process.standby import Standby
from baton.worker.service_process.streams import Routers
from baton.worker.service_process.succession import TRANSITIONS, Event, Phase
from baton.worker.service_process.tree import WorkerTree, discard
from baton.worker.service_process.validation import Limits

log = logging.getLogger(__name__)

DRAIN_CHECK = 0.05  # seconds, as the next
SERVER_STOP = 1.0


def run(config: WorkerConfig) -> int:
    """Runs a worker to its end.

    Returns 0 after SIGTERM or SIGINT. Returns 1 if the worker could not start or if one of its processes
    died.
    """
    setproctitle.setproctitle(f"{config.title}: {config.name}")
    incarnation = int.from_bytes(os.urandom(8))
    logging.config.dictConfig(config.logging(incarnation))
    if config.settings is not None:
        log.info("%s", config.settings)

    async def run_service() -> int:
        try:
            service = Service(config, incarnation)
        except (StartError, ValueError) as error:
            log.error("%s", error)
            ReadyPipe(config.ready_fd).error(str(error))
            return 1
        return await service.run()

    return asyncio.run(run_service())


class Interrupted(Exception):
    """SIGINT, or SIGTERM before the worker was ready."""


class Service:
    """The life of the service process. It is made and used inside the event loop.

    Raises StartError or ValueError if the user's configuration is wrong.

    Attributes:
        phase: of the engine process, as in `succession`.
    """

    def __init__(self, config: WorkerConfig, incarnation: int) -> None:
        self._config = config
        self._ready = ReadyPipe(config.ready_fd)
        self._incarnation = incarnation
        self._interrupted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._drain_asked = asyncio.Event()
        self._serving = False
        self._health = HealthServicer()
        self._server = create_server(config.secret, config.tls, self._health)
        self._metrics = Metrics(config.role, config.model_name, config.engine.tensor_parallel_size)
        self._journal = Journal(config, incarnation)
        # They have no names. So the system gives memory back when the processes of this worker have ended.
        self._kept_files = [KeptMemory.create() for _ in range(config.ranks if config.replace_engine else 0)]
        self._tree = WorkerTree(config, self._incarnation, self._kept_files)
        self.phase: Phase = "starting"
        self._numbers = count(1)
        """Of the trees after the first one."""
        self._first: tuple[EngineReady, str] | None = None
        """What the first engine process has described, and the address of its KV lanes."""
        self._crashed: list[bytes] = []
        """Attempts that were in the last step of the engine process that has ended."""
        self._routers = Routers()
        self._kv_events = None
        if config.kv_events_endpoint is not None:
            self._kv_events = KVEventPublisher(config.kv_events_endpoint, config.kv_events_topic)
        self._backend = Backend(config, self._routers, self._metrics, self._journal, self._kv_events)
        self._standby = self._backend.standby = Standby(self._standby_tree) if config.standby else None

    async def run(self) -> int:
        """Runs until a signal or a failure ends the worker. Returns the exit code."""
        loop = asyncio.get_running_loop()
        # A shell starts background programs with SIGINT ignored, so the handler must be set explicitly.
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        try:
            await self._live()
            await self._stop()
        except Interrupted:
            log.info("interrupted: stopping")
            await self._stop()
        except (StartError, TreeError) as error:
            log.error("%s", error)
            self._ready.error(str(error))
            if self._serving and (self._crashed or isinstance(error, EngineError)):
                self._fail_crashed_step(str(error))
            return 1
        finally:
            if self._standby is not None:
                await self._standby.close()
            await self._tree.kill()
            await self._close()
        log.info("stopped")
        return 0

    # ------------------------------------------------------------ life cycle

    async def _live(self) -> None:
        """Returns when the worker has drained. Raises what ends it before."""
        self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        # The ports come first, so that a wrong port fails before the model is loaded.
        ports = await self._open_ports()
        lives = self._serve(*ports), self._keep_engines(), self._backend.report()
        tasks = [asyncio.create_task(life) for life in lives]
        try:
            await asyncio.wait({*tasks, self._interrupted}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    return task.result()
            raise Interrupted
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _serve(self, port: int, metrics_port: int, host: str) -> None:
        config = self._config
        await self._backend.serving()
        assert self._first is not None, "it serves"
        engine, kv_address = self._first
        host = url_host(host)
        metrics_address = f"{host}:{metrics_port}"
        self._metrics.cache_config(engine, config.engine.enable_prefix_caching)
        service = AttachService(
            self._backend,
            self._routers,
            Limits(engine.description.vocab_size, engine.description.max_model_len, engine.images),
            self._description(engine, kv_address, metrics_address),
            encodes=config.role == "encode",
        )
        add_service(self._server, WORKER, service, as_bytes=("Attach",))
        await self._server.start()
        self._serving = True
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        log.info("ready at %s:%d, KV lanes at %s", host, port, kv_address)
        if config.engine.device == "cpu":
            engines = cpu_engines.other_engines()  # that of this worker is one of them
            if advice := cpu_engines.remedy(engines):
                log.warning("%s: %s", cpu_engines.shown(engines), advice)
        self._ready.ready(
            role=config.role,
            index=config.index,
            address=f"{host}:{port}",
            kv_address=kv_address,
            metrics_address=metrics_address,
            incarnation=self._incarnation,
            pid=os.getpid(),
        )
        await self._drain_asked.wait()
        await self._drain()

    async def _open_ports(self) -> tuple[int, int, str]:
        config = self._config
        try:
            host = config.reachable_host()
        except ValueError as error:
            raise StartError(str(error)) from error
        with _listening("--port", config.host, config.port):
            pems = cluster_pems(config.secret, config.tls)
            port = add_port(self._server, config.host, config.port, pems)
        with _listening("--metrics-port", config.host, config.metrics_port):
            metrics_port = await self._metrics.listen(config.host, config.metrics_port, self._serves)
        # Fails early: the transfer process, which will listen there, starts after the model is loaded.
        for kv_host in config.kv_listen_hosts():
            with _listening("--kv-port", kv_host, config.kv_port):
                try_port(kv_host, config.kv_port)
        return port, metrics_port, host

    def _serves(self) -> bool:
        return self._serving and self._backend.serves

    async def _drain(self) -> None:
        """Refuses new attempts. Returns when all accepted ones have ended, or after the drain deadline."""
        timeout = self._config.drain_timeout
        log.info("draining, for %.0f s at most", timeout)
        self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        end = time.monotonic() + timeout
        self._backend.drain(SHUTTING_DOWN)
        try:
            async with asyncio.timeout(timeout):
                while not (await self._backend.engine_status()).told.idle:
                    if self._backend.pause == pb.PAUSE_STEPS:
                        log.info("paused: the requests are handed back")
                        break
                    await asyncio.sleep(DRAIN_CHECK)
        except TimeoutError:
            log.warning("still busy after %.0f s: the remaining requests are handed back", timeout)
        if self._config.group is not None:
            await self._config.group.all_drained(end - time.monotonic())

    async def _stop(self) -> None:
        if (engine := self._backend.engine) is not None and not engine.has_ended:
            await self._tree.stop()

    def _fail_crashed_step(self, error: str) -> None:
        """Tells the routers which attempts were in the crashed step.

        One of these attempts may have caused the crash, and routers count that. All other attempts end with
        their stream. Only the engine knew which router owns an attempt, so every router is told.
        """
        for attempt_id in self._crashed or self._tree.heartbeat.step:
            text = f"it was being computed when {error}"
            self._routers.deliver(to_routers.failed(None, attempt_id, pb.FAILURE_CODE_ENGINE, text))

    async def _close(self) -> None:
        """Writes the queued messages to the routers, then closes everything. The processes have ended."""
        if self._serving:
            self._routers.finish()
        await self._server.stop(SERVER_STOP)
        self._metrics.close()
        if self._kv_events is not None:
            self._kv_events.close()
        await asyncio.to_thread(self._journal.close)
        await self._tree.close()
        for files in self._kept_files:
            files.close()
        self._ready.close()

    # ------------------------------------------------------------ engine processes

    async def _keep_engines(self) -> None:
        """Runs one engine process after the other, as `succession` says. Raises the end of the last one. The
        gRPC server and its streams stay."""
        stages: dict[str, float] = {}
        """When each stage of a replacement began: time.monotonic()."""
        planned = False
        while True:
            try:
                await self._run_engine(stages, planned=planned)
            except (StartError, TreeError, OSError, ValueError) as error:
                takes_over = self.phase == "taking over"
                self._after(error)
                if self.phase == "over":
                    raise
                if takes_over:
                    log.error("the standby cannot take over: %s", error)
                else:
                    planned = isinstance(error, EngineRestart)
                    level = logging.INFO if planned else logging.ERROR
                    log.log(level, "%s: another engine process goes on", error)
                    stages = {"ending processes": time.monotonic()}
                self._crashed = [] if planned else self._tree.heartbeat.step or self._crashed
                self._backend.ended(str(error), self._crashed)
            # The transfer process has slots, credits and transfers of the engine process that has ended. It
            # ends with it, so nothing of them can be written into the memory that the next one maps. Peers
            # see that lanes break, and fetch again.
            await discard(self._tree)
            self._tree = await self._taken() or self._next_tree()

    def _after(self, error: BaseException) -> None:
        """An engine process has ended so, or could not start."""
        engine = self._backend.engine
        if engine is not None and not engine.has_ended and engine.is_proven:
            self._enter("computed")
        if isinstance(error, EngineRestart):
            self._enter("restart")
        else:
            # With less memory there is no KV that the next one could keep.
            follows = self._config.replace_engine and not self._backend.lacks_memory
            follows = follows and isinstance(error, EngineError)
            self._enter("ended" if follows else "failed")

    def _enter(self, event: Event) -> None:
        self.phase = TRANSITIONS[self.phase, event]

    async def _run_engine(self, stages: dict[str, float], *, planned: bool) -> None:
        """Raises the end of this engine process, and StartError if it cannot start for a reason that the user
        can mend. `planned`: the one before was asked to end."""
        begins = asyncio.create_task(self._begin(stages))
        failure = self._tree.failure
        try:
            await asyncio.wait({begins, failure}, return_when=asyncio.FIRST_COMPLETED)
            if begins.done():
                begins.result()
                self._began(stages, planned=planned)
                await asyncio.wait({failure})
            failure.result()
        finally:
            begins.cancel()
            await asyncio.wait({begins})

    async def _begin(self, stages: dict[str, float]) -> None:
        """An engine process begins with what is there: weights, KV and open attempts. The first one finds
        nothing."""

        def note(name: str, fraction: float) -> None:
            stages.setdefault(name, time.monotonic())

        tree, stage = self._tree, note if stages else self._ready.stage
        stage("waking the standby" if tree.is_standby else "starting the engine process", 0.0)
        engine = await tree.start_engine(stage)
        stage("starting the transfer process", 0.0)
        first, _ = self._first or (engine, "")
        # Lanes keep the fingerprint of the start, as those of peers do, whose weights were replaced, too.
        kv_address = await tree.start_transfer(first)
        if self._first is None:
            self._first = engine, kv_address
        if (weights := self._backend.weights) is not None:
            first = structs.replace(first, description=weights.described(first.description))
        if differing := [*_differing(engine, first)]:
            raise TreeError(f"the next engine process differs in {', '.join(differing)}")
        stage("submitting attempts", 0.0)
        await self._backend.begin(tree)

    def _began(self, stages: dict[str, float], *, planned: bool) -> None:
        self._enter("ready")
        if planned:
            self._enter("computed")
        self._crashed = []
        if self._standby is not None and not self._backend.lacks_memory:
            self._standby.start()
        if stages:
            times = [*stages.values(), time.monotonic()]
            split = [f"{name} {b - a:.2f}" for name, (a, b) in zip(stages, pairwise(times), strict=True)]
            log.info(
                "another engine process goes on after %.2f s: %s", times[-1] - times[0], ", ".join(split)
            )

    async def _taken(self) -> WorkerTree | None:
        """Of the standby. The next one verifies what this one writes into the memory of KV."""
        if self.phase != "taking over":
            return None
        tree = None if self._standby is None else await self._standby.take()
        if tree is None:
            self._enter("no standby")
        return tree

    def _next_tree(self) -> WorkerTree:
        """Of an engine process that starts alone. Raises TreeError."""
        try:
            return self._standby_tree()
        except (OSError, ValueError) as error:  # no descriptor is left, or no directory can be made
            raise TreeError(f"no other engine process can be started: {error}") from error

    def _standby_tree(self) -> WorkerTree:
        """A tree that may take the place of the one that serves."""
        assert self._first is not None, "it takes the place of another one"
        config = replace(self._config, kv_port=int(self._first[1].rpartition(":")[2]))
        if (weights := self._backend.weights) is not None:
            config = replace(config, engine=weights.of(config.engine))
        return WorkerTree(config, self._incarnation, self._kept_files, next(self._numbers))

    def _interrupt(self) -> None:
        if not self._interrupted.done():
            self._interrupted.set_result(None)

    def _terminate(self) -> None:
        if self._serving:
            self._drain_asked.set()
        else:
            self._interrupt()

    def _description(
        self, engine: EngineReady, kv_address: str, metrics_address: str
    ) -> pb.WorkerDescription:
        config = self._config
        described = pb.WorkerDescription(
            first_pool=POOLS[config.role],
            index=config.index,
            incarnation=self._incarnation,
            model=config.engine.model,
            layout_fingerprint=engine.layout.fingerprint,
            kv_address=kv_address,
            max_num_seqs=config.engine.max_num_seqs,
            max_num_batched_tokens=config.engine.max_num_batched_tokens,
            dtype=engine.layout.dtypes.kv,
            kv_token_bytes=engine.layout.bytes_per_token,
            device=config.engine.device,
            tensor_parallel_size=config.engine.tensor_parallel_size,
            pid=os.getpid(),
            metrics_address=metrics_address,
            num_layers=engine.layout.num_layers,
            served_model_name=config.model_name,
            revision=config.engine.revision or "",
            group="" if config.group is None else config.group.id,
            data_parallel_size=1 if config.group is None else config.group.size,
        )
        described.MergeFrom(engine.description)
        return described


def _differing(one: EngineReady, other: EngineReady) -> Iterator[str]:
    """Yields the names of what differs."""
    for a, b, names in (
        (one, other, [name for name in one.__struct_fields__ if name != "description"]),
        (one.description, other.description, pb.WorkerDescription.DESCRIPTOR.fields_by_name),
    ):
        yield from (name for name in names if getattr(a, name) != getattr(b, name))


@contextmanager
def _listening(flag: str, host: str, port: int) -> Iterator[None]:
    """Turns an error of the system into the message for the user."""
    try:
        yield
    except OSError as error:
        raise StartError(cannot_listen(flag, host, port, error)) from error


class ReadyPipe:
    """Reports the start-up of a worker to its parent process, as JSON lines on an inherited descriptor.

    1. Any number of `{"stage": "loading weights", "fraction": 0.4}`.
    2. Exactly one `{"ready": {...}}`, or one `{"error": "message for the user"}` before a non-zero exit. A
       worker that a signal stops during its start writes neither.
    3. The worker closes the descriptor.

    Owns `fd`; with None it writes nothing.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._last = ("", 0.0)

    def stage(self, stage: str, fraction: float) -> None:
        """Writes a stage when it begins, every 5 % of it, and its end. A loader reports every tensor."""
        last_stage, last_fraction = self._last
        if stage != last_stage or fraction - last_fraction >= 0.05 or fraction == 1.0:
            self._last = (stage, fraction)
            report(self._fd, {"stage": stage, "fraction": round(fraction, 3)})

    def ready(self, **about: str | int) -> None:
        report(self._fd, {"ready": about})
        self.close()

    def error(self, message: str) -> None:
        report(self._fd, {"error": message})
        self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
