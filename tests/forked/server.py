"""The fork server: imports what its kind of process imports, then forks one for each request.

python -m tests.forked.server KIND SOCKET
"""

import asyncio
import atexit
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import setproctitle

from baton.kv_transfer.nixl.memory import WHEELS
from baton.processes.children import die_with_parent
from tests.forked import clock, popen

# Since 3.12 Python counts threads in /proc/self/stat, and reads another field if a title has a space.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

_MESSAGE = 1 << 18  # bytes, at most: the arguments and the environment
_MAX_FDS = 64
_OPEN_FILES = 1 << 20  # of one process, at most, where /proc/sys/fs/nr_open is as Linux sets it
_PRELOADED: dict[str, tuple[str, ...]] = {
    "roles": (
        "torch",
        "baton.cluster.cli",
        "baton.cluster.engine_process",
        "baton.cluster.roles",
        "baton.cluster.serve",
        "baton.decode_worker.role",
        "baton.engine.execution.rank",
        "baton.kv_transfer.process.__main__",
        "baton.kv_transfer.endpoint.rank_copier",
        "baton.prefill_worker.role",
        "baton.router.preparation.child",
        "baton.router.preparation.grammar_child",
        "baton.router.server",
        "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
        "opentelemetry.trace.propagation.tracecontext",
        "pythonjsonlogger.json",
        "tests.decode_worker.engine_process",
        "tests.elastic_engine",
        "tests.ledger",
        "tests.ledger_engine",
        "tests.router.small_router",
        "tests.worker.eager_engine",
        "tests.worker.held_engine",
        "tests.worker.other_layout_engine",
        "tests.worker.other_pages_engine",
        "tests.worker.patient_engine",
        "tests.worker_process",
        "typer._adapters",  # the parameters of a command, which it imports late
        "baton.worker.engine_process.offload",
        "baton.worker.engine_process.paged_kv",
        "baton.worker.engine_process.prefix_fetches",
        "baton.worker.engine_process.process",
        "baton.worker.engine_process.rank_process",
        "baton.worker.service_process.service",
    ),
    "transfers": (
        "baton.kv_transfer.process.__main__",
        "baton.kv_transfer.nixl.memory",
        "baton.kv_transfer.protocol.encryption",
        "psutil",
    ),
    "vllm": (
        "tests.vllm_worker.vllm_server",
        "vllm",
        "vllm.entrypoints.llm",
        "vllm.model_executor.models.llama",
        "vllm.renderers.hf",
        "vllm.v1.engine.async_llm",
        "vllm.v1.engine.core",
        "vllm.v1.executor.multiproc_executor",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.worker.cpu_worker",
        "baton.cluster.cli",
        "baton.cluster.roles",
        "baton.cluster.serve",
        "baton.kv_transfer.process.__main__",
        "baton.router.preparation.child",
        "baton.router.server",
        "baton.vllm_worker.connector",
        "baton.vllm_worker.engine_process",
        "baton.vllm_worker.llm",
        "baton.worker.service_process.service",
    ),
    "loads": (
        "baton.bench.load.cli",
        "baton.bench.load.commands",
        "baton.bench.load.traffic.client_process",
        "baton.cluster.cli",
        "numpy.ma",
        "tests.bench.mock_server",
        "typer._adapters",
    ),
}
_PRELOADED["tests"] = (
    *_PRELOADED["roles"],
    *_PRELOADED["loads"],
    "_pytest.assertion.rewrite",
    "aiohttp",
    "anthropic.types.beta",
    "baton.bench.lab.chaos",
    "baton.cluster.tools.doctor",
    "baton.engine.kernels.attention.latent_kernels",
    "baton.engine.kernels.attention.latent_tiling",
    "execnet.gateway_base",
    "hypothesis.stateful",
    "jsonschema",
    "openai.resources.chat",
    "openapi_spec_validator",
    "pytest",
    "tests.forked.gateway",
    "torch.testing",
    "transformers.modeling_utils",  # two processes compare with its models
    "triton.language",
    "trustme",
)
_PARENTS = ("serve", "prefill", "decode", "router", "tests.worker_process", "bench")
"""These start other processes that are forked: `baton` commands, and modules."""


_CLI = "baton.cluster.cli"
_set_by_imports: dict[str, str] = {}
"""Environment variables."""


def main() -> None:
    kind, number = sys.argv[1:]
    before = dict(os.environ)
    setproctitle.setproctitle("baton tests: fork server")  # finds the room for the titles of forks
    gc.disable()  # imports make no garbage
    for module in _PRELOADED[kind.split()[0]]:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:  # a GPU machine may lack what only clients and manifests need
            if str(error.name).startswith(("baton", "tests")):
                raise
    if kind == "transfers":
        _load_nixl()
    elif kind.startswith("vllm"):
        _name_processes_of_vllm_late()
    if kind not in ("transfers", "loads"):
        _close_before_the_end_of_serve()
    if _CLI in sys.modules:
        _build_commands_once()
    _set_by_imports.update(os.environ.items() - before.items())
    gc.freeze()
    threads = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    assert len(threads) == 1, f"a fork has only one of these threads: {threads}"
    _serve(socket.socket(fileno=int(number)))


def _load_nixl() -> None:
    """NIXL and NumPy, which it imports, take 0.3 s to load. They start no thread then, so a fork is safe."""
    if wheel := next(filter(find_spec, WHEELS), None):
        importlib.import_module(f"{wheel}._bindings")


def _name_processes_of_vllm_late() -> None:
    """vLLM reads the prefix of the names of its processes when it is imported."""

    class Prefix(str):
        def __format__(self, _: str) -> str:
            return os.environ.get("VLLM_PROCESS_NAME_PREFIX", self)

    utils = importlib.import_module("vllm.utils.system_utils")
    assert utils.set_process_title.__defaults__ == ("", "VLLM")
    utils.set_process_title.__defaults__ = "", Prefix("VLLM")


def _close_before_the_end_of_serve() -> None:
    """`baton serve` waits at its end until it has no descendant."""
    serve = importlib.import_module("baton.cluster.serve")
    end_descendants = serve.end_descendants

    def end(*arguments: Any) -> Any:
        popen.close()
        return end_descendants(*arguments)

    serve.__dict__["end_descendants"] = end


def _build_commands_once() -> None:
    """`baton` builds all of its commands when it starts, which takes 50 ms."""
    typer, app = importlib.import_module("typer.main"), sys.modules[_CLI].__dict__["app"]
    build, built = typer.get_command, typer.get_command(app)
    typer.__dict__["get_command"] = lambda asked: built if asked is app else build(asked)


def _serve(requests: socket.socket) -> None:
    """Forks twice for a request: the process between ends, so that the process that asked adopts the role."""
    while True:
        packet, fds, _, _ = socket.recv_fds(requests, _MESSAGE, _MAX_FDS)
        if not packet:
            return
        adopted, adopt = os.pipe()
        pids, pid_of_role = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(adopt)
            os.close(pids)
            if (pid := os.fork()) == 0:
                requests.close()
                os.close(pid_of_role)
                os.read(adopted, 1)  # the end of the pipe
                os.close(adopted)
                _run(json.loads(packet), fds)
            os.write(pid_of_role, str(pid).encode())
            os._exit(0)
        for fd in (adopted, pid_of_role, *fds):
            os.close(fd)
        os.waitpid(between, 0)
        with open(pids, "rb") as pipe:
            requests.send(pipe.read())
        os.close(adopt)


def _run(request: dict[str, Any], fds: list[int]) -> None:
    """Does what a fresh interpreter does."""
    code = 1
    try:
        _become(request, fds)
        gc.enable()
        module = request["command"][0]
        if module == _CLI:  # its end is `main()`
            sys.modules["__main__"] = sys.modules[_CLI]
            sys.modules[_CLI].__dict__["main"]()
        # As in a fresh interpreter, which runs it as `__main__`.
        is_package = hasattr(sys.modules[module], "__path__")
        sys.modules.pop(f"{module}.__main__" if is_package else module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    try:
        popen.close()
        threading._shutdown()  # pyrefly: ignore[missing-attribute]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    finally:
        os._exit(code)


def _become(request: dict[str, Any], fds: list[int]) -> None:
    numbers = request["numbers"]
    free = max(*numbers, *fds) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, free) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(0, closefd=False),
        os.fdopen(1, "w", closefd=False),
        os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False),
    )
    os.environ.clear()
    os.environ.update(_set_by_imports | request["env"])
    os.chdir(request["cwd"])
    os.sched_setaffinity(0, request["cpus"])
    if request["session"]:
        os.setsid()
    for number in popen.ENDS:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    if clock.VARIABLE in os.environ:
        clock.follow(os.environ.pop(clock.VARIABLE))
    sys.argv = [*request["command"]]
    tempfile.tempdir = None  # TMPDIR may differ
    command = [*request["command"], ""]
    if command[0] == popen.GATEWAY:
        popen.use(dict.fromkeys(("roles", "loads"), _fork_of_this()))
    elif command[0] in _PARENTS or (command[0] == "baton.cluster.cli" and command[1] in _PARENTS):
        kind = popen.kind_of(command)
        assert kind is not None
        _start_server(kind)
        if command[1] == "router":  # uvloop
            setattr(asyncio, "create_subprocess_exec", popen.AsyncProcess.start)  # noqa: B010


def _start_server(kind: str) -> None:
    kinds = ("roles", "transfers") if kind == "roles" else (kind,)
    popen.use_only(dict.fromkeys(kinds, _fork_of_this()))
    setattr(subprocess, "Popen", popen.ForkedPopen)  # noqa: B010  a type checker refuses the assignment


def _fork_of_this() -> popen.ForkServer:
    """Starts a server that has imported what this process has."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        die_with_parent(parent)
        os.setsid()  # the role's signals do not reach it
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)  # no pipe of the role stays open
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, _OPEN_FILES)
        _serve(theirs)
        os._exit(0)
    theirs.close()
    return popen.ForkServer(ours, pid)


if __name__ == "__main__":
    main()
