"""The router process: starts, serves until a signal, and stops.

1. Loads the tokenizer, listens, and connects to the workers.
2. SIGTERM drains: each open connection is served until its next response, and running requests finish. That
   takes `drain_timeout` at most.
   SIGINT or a second signal ends running requests at once.
3. The file of API keys is read again when it changes, and at SIGHUP.
4. The connections to workers close, which cancels what the workers still compute.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import logging.config
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import setproctitle
import uvloop

from baton.processes.children import report
from baton.processes.liveness import waits_for_cpu
from baton.router.admission.keys import ApiKey, follow_keys, from_json
from baton.router.admission.queue import Admission
from baton.router.api.jobs import SamplingDefaults, sampling_defaults, shown
from baton.router.config import RouterConfig
from baton.router.endpoints.frontend import Frontend
from baton.router.endpoints.grpc_server import GrpcEndpoint
from baton.router.endpoints.http_connections import EXTRA, RETIRE_SECONDS, HttpServer, Listener, listen
from baton.router.endpoints.http_server import HttpEndpoints
from baton.router.errors import ShuttingDown
from baton.router.generation.context import ActiveRequests, Services
from baton.router.metrics import Metrics
from baton.router.processes.sockets import serve_commands
from baton.router.status import request_timeline, router_state, router_status
from baton.router.text.model_files import locate
from baton.router.text.tokenizer import ModelTokenizer, load_tokenizer
from baton.router.workers.checks import RouterModel
from baton.router.workers.pool import WorkerPool
from baton.rpc import worker_pb2 as pb
from baton.system import memory_limit, memory_share
from baton.system.addresses import url_host
from baton.system.connections import Connections, affordable_connections
from baton.system.tracing import Tracer

log = logging.getLogger(__name__)

LAG_PERIOD = 0.01  # seconds
NEVER = 1 << 30
"""A threshold of collections of garbage but the youngest. A full one passes all objects of all requests: with
10,000 streams it would stall all of them for more than 0.1 s. A request leaves no garbage for it."""
YOUNG_PERIOD = 0.02
"""Between two collections of the youngest objects. A token frees as many objects as it makes, so Python's own
collections, one for 700 objects more, are rare and pass some of each stream: 15 ms with 10,000."""
COLLECTION_PERIOD, FEW_REQUESTS = 60.0, 100
FEW_PERIOD = 0.5
"""As `YOUNG_PERIOD`, with few requests: Python's own collections are short then, and an idle router rests."""
ERROR_SECONDS = 5.0
"""Time to send clients the error that ends their request."""
BODIES = 16
"""Bodies of the largest size that a process reads and prepares at the same time, or more smaller ones."""
ID_BYTES = 36
"""Of a token id in a list: a reference and an int."""
_M_MMAP_THRESHOLD = -3  # malloc.h
_OWN_MAPPING_BYTES = 1 << 20


def body_bytes(config: RouterConfig) -> int:
    """Bytes of bodies at the same time. The processes of a router have an eighth of the memory for them."""
    most = memory_share(8 * config.processes, BODIES * config.max_body_bytes)
    return max(config.max_body_bytes, most)


def prompt_tokens(config: RouterConfig) -> int:
    """Tokens of prompts that wait at the same time, for which processes have as much memory as for bodies."""
    return memory_limit() // (8 * config.processes * ID_BYTES)


Loaded = tuple[ModelTokenizer, SamplingDefaults]
"""What several processes of a router share."""


def main(config: RouterConfig, loaded: Loaded | None = None) -> int:
    """Runs the router until SIGTERM or SIGINT. Raises ValueError for invalid configuration."""
    number = f".{config.process_number}" if config.supervised else ""
    setproctitle.setproctitle(f"{config.process_title}{number}")
    logging.config.dictConfig(config.logging())
    _return_large_buffers()
    tokenizer, defaults = loaded or load(config)
    gc.set_threshold(gc.get_threshold()[0], NEVER, NEVER)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(config, tokenizer, defaults))


def load(config: RouterConfig) -> Loaded:
    """Loads what a router reads of its model. Raises ValueError for invalid configuration."""
    report(config.ready_fd, {"stage": "loading tokenizer", "fraction": 0.0})
    assert config.model is not None, "`ask_workers` gave the model"
    tokenizer = load_tokenizer(
        config.model,
        revision=config.revision,
        tokenizer=config.tokenizer,
        chat_template=config.chat_template,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        images=not config.language_model_only,
    )
    tool_format = tokenizer.tool_format
    log.info("--tool-call-parser: %s", "none" if tool_format is None else tool_format.name)
    log.info("--reasoning-parser: %s", tokenizer.reasoning_parser or "none")
    defaults = sampling_defaults(config.generation_config, locate(config.model, config.revision))
    log.info(
        "--advanced.generation-config %s: %s", config.generation_config, shown(defaults) or "no defaults"
    )
    _ = tokenizer.state, tokenizer.vocabulary_fingerprint  # each process needs them, and would hold its own
    gc.collect()
    gc.freeze()  # each full collection would take some 15 ms longer
    return tokenizer, defaults


def _return_large_buffers() -> None:
    """The memory of a large body goes back to the kernel when the body is freed.

    By default glibc raises this threshold with each large buffer that is freed. Later bodies then come from
    the heap, and small objects between them keep the heap from shrinking: 100 MiB after 800 bodies of 16 MB.
    """
    with contextlib.suppress(AttributeError):  # musl has no mallopt, and no such threshold
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


@dataclass(frozen=True)
class RunningRouter:
    """A router that listens."""

    url: str
    grpc_address: str | None
    services: Services
    following: asyncio.Task[None]
    """Follows discovery. Ends only with an error."""
    frontend: Frontend
    http: HttpServer
    listener: Listener
    grpc: GrpcEndpoint

    async def drain(self) -> None:
        """Serves what comes over connections that are open, until all have closed and no request runs.
        Clients of gRPC are told to leave.

        If there are any, it goes on listening for `RETIRE_SECONDS`: load balancers may not know yet."""
        active, connections = self.services.active, self.listener.connections
        log.info("draining %d requests and %d connections", len(active), len(connections))
        self.frontend.draining = True
        self.http.retire()
        self.grpc.drain()
        if connections or self.grpc.has_connections:
            await asyncio.sleep(RETIRE_SECONDS)
        self.listener.close()
        self.grpc.retire()
        await connections.none.wait()
        await active.none.wait()

    def stop_listening(self) -> None:
        """Takes no new requests from now on."""
        self.frontend.draining = self.frontend.ending = True
        self.listener.close()
        self.grpc.drain()


@contextlib.asynccontextmanager
async def running(
    config: RouterConfig, tokenizer: ModelTokenizer, defaults: SamplingDefaults
) -> AsyncIterator[RunningRouter]:
    """Listens while the context is open. Requests that still run when it closes end with an error."""
    model = RouterModel(config.model_name, tokenizer.vocab_size, tokenizer.vocabulary_fingerprint)
    pool = WorkerPool(config, model)
    process = {"baton.index": config.index, "service.instance.id": config.incarnation}
    services = Services(
        tokenizer=tokenizer,
        pool=pool,
        admission=Admission(
            prompt_tokens(config),
            pool.desk.window,
            pool.desk.free_capacity,
            max_body_bytes=body_bytes(config),
            max_wait=config.max_wait,
            shared=len(config.api_keys) > 1,
            paused=lambda: pool.pause != pb.PAUSE_NONE,
        ),
        metrics=Metrics(config.model_name),
        tracer=Tracer(config.otlp_endpoint, "baton-router", process),
        config=config,
        defaults=defaults,
    )
    services.metrics.follow(pool, services.admission, services.parked)
    pool.on_capacity = services.admission.dispatch
    pool.on_ready = services.parked.worker_ready
    frontend = Frontend(services)
    http = HttpEndpoints(services, frontend)
    grpc_endpoint = GrpcEndpoint(services, frontend)
    following = asyncio.create_task(pool.run(), name="workers")
    observed = services.metrics.loop_lag.observe, services.metrics.own_loop_lag.observe
    lag = asyncio.create_task(observe_lag(*observed), name="lag")
    collecting = asyncio.create_task(collect_garbage(services.active), name="garbage")
    try:
        await http.batches.start()
        async with HttpServer(
            http.app,
            services.metrics.failed,
            client_timeout=config.client_timeout,
            keep_alive=config.keep_alive,
            handler_cancellation=True,
        ) as http_server:
            context = None
            if config.tls is not None:
                context = config.tls.server_context()
                services.metrics.certificate_ends(config.tls.ends_at)
            listening = listen("--port", config.host, config.port, share=config.supervised)
            port = listening.getsockname()[1]
            most = affordable_connections(config.processes)
            listener = http_server.serve(listening, Connections("--port", most, EXTRA), context)
            http_server.serve_unix(None if config.supervised else config.admin_socket)

            grpc_address = None
            if config.grpc_port is not None:
                grpc_address = await grpc_endpoint.start(config.host, config.grpc_port)

            scheme = "http" if config.tls is None else "https"
            url = f"{scheme}://{url_host(config.host)}:{port}"
            router = RunningRouter(
                url, grpc_address, services, following, frontend, http_server, listener, grpc_endpoint
            )
            yield router
            router.stop_listening()
            await _cut(services)
    finally:
        await http.batches.close()
        await grpc_endpoint.close()
        await frontend.close()
        tasks = following, lag, collecting
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(services.tracer.close)


async def serve(config: RouterConfig, tokenizer: ModelTokenizer, defaults: SamplingDefaults) -> int:
    """Serves until a signal. Returns the exit status."""
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # With several processes, the supervisor gets the signals and sends commands to each.
        on_signal = (lambda: None) if config.supervised else partial(signals.put_nowait, number)
        loop.add_signal_handler(number, on_signal)
    reloading = asyncio.Event()
    if config.api_key_file is not None:
        loop.add_signal_handler(signal.SIGHUP, (lambda: None) if config.supervised else reloading.set)
    async with running(config, tokenizer, defaults) as router:
        log.info("listening on %s, gRPC: %s", router.url, router.grpc_address or "off")
        ready = {"url": router.url, "grpc_address": router.grpc_address, "pid": os.getpid()}
        ready["admin_socket"] = config.admin_socket
        report(config.ready_fd, {"ready": ready}, last=True)
        router.frontend.start()
        stopped = asyncio.create_task(signals.get())
        tasks = {router.following}
        if config.api_key_file is not None and not config.supervised:

            async def use(keys: tuple[ApiKey, ...]) -> None:
                router.frontend.use_keys(keys)

            following = follow_keys(config.read_api_keys, config.api_key_file, use, reloading)
            tasks.add(asyncio.create_task(following))
        if config.control_fd is not None:
            answer = partial(_answer, router=router, signals=signals)
            tasks.add(asyncio.create_task(serve_commands(config.control_fd, answer)))
        await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for other in tasks:
            if other.done():
                other.result()
        if not stopped.done():
            return 1  # the supervisor ended
        if stopped.result() == signal.SIGTERM:
            await _drain(router, signals, config.drain_timeout)
    return 0


async def _answer(command: str, argument: bytes, router: RunningRouter, signals: asyncio.Queue[int]) -> bytes:
    """Follows a command of the supervisor, and returns the reply."""
    match command:
        case "metrics":
            return router.services.metrics.exposition()
        case "status":
            return json.dumps(await router_status(router.services, router.frontend.draining)).encode()
        case "request":
            timeline = await request_timeline(router.services, argument.decode())
            return b"" if timeline is None else json.dumps(timeline).encode()
        case "ping":
            return json.dumps(router_state(router.services, router.frontend.draining)).encode()
        case "drain":
            signals.put_nowait(signal.SIGTERM)
        case "stop":
            signals.put_nowait(signal.SIGINT)
        case "keys":
            router.frontend.use_keys(await asyncio.to_thread(from_json, argument))
        case _:
            raise AssertionError(command)
    return b""


async def _drain(router: RunningRouter, signals: asyncio.Queue[int], timeout: float) -> None:
    """Waits for running requests. Another signal ends the wait."""
    waits = {asyncio.create_task(router.drain()), asyncio.create_task(signals.get())}
    await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


async def observe_lag(observe: Callable[[float], None], observe_own: Callable[[float], None]) -> None:
    """Measures how late timers run. A stall of the event loop delays all streams and all new requests.
    `observe_own` gets it without the wait for a CPU, which may have begun before the timer was due."""
    loop = asyncio.get_running_loop()

    # A timer, since a task that sleeps takes a fifth longer. This runs a hundred times a second.
    def measure(due: float, before: float) -> None:
        nonlocal timer
        lag, after = max(0.0, loop.time() - due), waited()
        observe(lag)
        observe_own(max(0.0, lag - max(0.0, after - before - LAG_PERIOD)))
        due = loop.time() + LAG_PERIOD
        timer = loop.call_at(due, measure, due, after)

    with waits_for_cpu(Path("/proc/self")) as waited:
        due = loop.time() + LAG_PERIOD
        timer = loop.call_at(due, measure, due, waited())
        try:
            await loop.create_future()
        finally:
            timer.cancel()


async def collect_garbage(active: ActiveRequests) -> None:
    """Collects what failures left behind: the youngest often, and all while few requests run."""
    while True:
        slept = 0.0
        while slept < COLLECTION_PERIOD:
            period = FEW_PERIOD if len(active) < FEW_REQUESTS else YOUNG_PERIOD
            await asyncio.sleep(period)
            gc.collect(0)
            slept += period
        if len(active) < FEW_REQUESTS:
            gc.collect()


async def _cut(services: Services) -> None:
    """Ends running requests with an error, and waits until clients have it."""
    services.active.abort(ShuttingDown("the router is shutting down", retry_after=1))
    with contextlib.suppress(TimeoutError):  # a client that does not read gets no error
        async with asyncio.timeout(ERROR_SECONDS):
            await services.active.none.wait()
