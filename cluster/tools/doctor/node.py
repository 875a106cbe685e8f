"""Checks this machine: versions, GPUs, memory, network cards, system limits, secret, model."""

import importlib.metadata
import importlib.util
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from baton.cluster import check_model, model
from baton.cluster.gpus import nvidia_smi
from baton.cluster.options.clients import DoctorOptions
from baton.cluster.options.engine import EngineOptions
from baton.cluster.tools.doctor.finding import Finding, bad, good, note, warning
from baton.processes import spawn
from baton.system import available_memory, cpu_engines, usable_cpus
from baton.system.words import counted

PACKAGES = ("torch", "triton", "ray", "grpcio", "pyzmq", "msgspec", "xxhash", "aiohttp")
MIN_FILES = 8192
"""Open files. Each lane, client and gRPC stream needs one."""
MIN_SOCKET_BUFFER = 4 << 20
"""Bytes. The kernel's buffers of a lane should hold a slice of KV."""
MIN_BACKLOG = 1024
ENGINE_BYTES = 2 << 30
"""Least bytes of free memory for a worker."""

REMEDIES = {
    "weights": "Download the model again, or use another --model.",
    "ranks": "Choose another --tensor-parallel-size.",
    "tokenizer": "Routers need the tokenizer: put it beside the weights.",
}
"""By the kind of a `check_model.Fault`."""


ROOT = Path("/")
"""The directory that contains /proc and /sys."""


def node(options: DoctorOptions) -> Iterator[Finding]:
    """All checks of this machine."""
    yield from versions()
    yield from gpus()
    yield from memory(ROOT)
    yield from engines()
    yield from cards(ROOT)
    yield from limits(ROOT)
    yield from secret(options)
    yield from the_model(options)


def versions() -> Iterator[Finding]:
    versions_of = {"python": platform.python_version()}
    for package in PACKAGES:
        if importlib.util.find_spec({"grpcio": "grpc", "pyzmq": "zmq"}.get(package, package)) is not None:
            versions_of[package] = importlib.metadata.version(package)
    yield note("versions", ", ".join(f"{name} {version}" for name, version in versions_of.items()))
    if "torch" not in versions_of:
        yield bad(
            "torch",
            "not installed",
            "Run `pip install -e .` in Baton's source directory, or run only `baton router` here.",
        )


def gpus() -> Iterator[Finding]:
    """Lists the GPUs with nvidia-smi, which works without torch. Then checks whether torch sees them all."""
    listed = nvidia_smi("--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader")
    if listed is None:
        yield note("GPU", "no NVIDIA driver: workers run on the CPU")
        return
    for number, line in enumerate(listed):
        name, driver, total, used = (part.strip() for part in line.split(","))
        yield good(f"GPU {number}", f"{name}, driver {driver}, {total}")
        if int(used.split()[0]) > 1024:
            yield warning(
                f"GPU {number} memory", f"{used} in use already",
                "Stop the processes that use it, or lower --gpu-memory-utilization.",
            )  # fmt: skip
    count = spawn.run("-c", "import torch; print(torch.cuda.device_count())").stdout.strip()
    if count != str(len(listed)):
        yield bad(
            "torch and the GPUs", f"nvidia-smi shows {len(listed)}, torch {count or 'fails'}",
            "Install a torch build for this driver, and check CUDA_VISIBLE_DEVICES.",
        )  # fmt: skip
    if importlib.util.find_spec("triton") is None:
        yield bad(
            "triton",
            "not installed",
            "Run `pip install -e '.[cuda]'` in Baton's source directory: the GPU kernels need it.",
        )
    if len(listed) > 1:
        links = nvidia_smi("nvlink", "--status") or []
        active = sum("GB/s" in line for line in links)
        yield good("NVLink", f"{active} links") if active else note("NVLink", "none between these GPUs")


def memory(root: Path) -> Iterator[Finding]:
    free = available_memory(root)
    text = f"{free / 2**30:.1f} GiB free, {counted(usable_cpus(root), 'CPU')}"
    if free < ENGINE_BYTES:
        yield bad("memory", text, f"A worker needs at least {ENGINE_BYTES >> 30} GiB; stop other processes.")
    else:
        yield good("memory", text)


def engines() -> Iterator[Finding]:
    running = cpu_engines.other_engines()
    if advice := cpu_engines.remedy(running):
        yield warning("engines on CPUs", cpu_engines.shown(running), f"{advice[0].upper()}{advice[1:]}.")
    elif running:
        yield good("engines on CPUs", cpu_engines.shown(running))


def cards(root: Path) -> Iterator[Finding]:
    for card in sorted((root / "sys/class/net").glob("*")):
        if card.name == "lo" or _read(card / "operstate") != "up":
            continue
        speed = _read(card / "speed")
        if speed is None or int(speed) <= 0:
            yield note(f"network {card.name}", "speed unknown (virtual): measure it, as with iperf3")
        elif int(speed) < 10_000:
            yield warning(
                f"network {card.name}", f"{int(speed) / 1000:g} Gbit/s",
                "KV of an 8B model is 0.125 MiB a token: use at least 10 Gbit/s between workers.",
            )  # fmt: skip
        else:
            yield good(f"network {card.name}", f"{int(speed) / 1000:g} Gbit/s")
    devices = sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))
    yield note("RDMA", f"{', '.join(devices) or 'no device'} (KV travels over TCP)")


def limits(root: Path) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files < MIN_FILES:
        yield warning(
            "open files", f"{files}", f"Run `ulimit -n {MIN_FILES}`, or set LimitNOFILE= in the systemd unit."
        )
    else:
        yield good("open files", f"{files}")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    yield note("locked memory", "unlimited" if unlimited else f"{locked >> 10} KiB (RDMA needs unlimited)")
    for name, minimum in (
        ("net/core/rmem_max", MIN_SOCKET_BUFFER),
        ("net/core/wmem_max", MIN_SOCKET_BUFFER),
        ("net/core/somaxconn", MIN_BACKLOG),
    ):
        value = _read(root / "proc/sys" / name)
        key = name.replace("/", ".")
        if value is None:
            yield note(key, "not visible in this container; check it on the host")
        elif int(value) < minimum:
            yield warning(key, value, f"Run `sysctl -w {key}={minimum}`.")
        else:
            yield good(key, value)


def secret(options: DoctorOptions) -> Iterator[Finding]:
    from baton.rpc.auth import load_secret

    path = options.cluster_secret_file
    if path is None and "BATON_CLUSTER_SECRET" not in os.environ:
        yield note("cluster secret", "none given: `baton serve` makes one; roles run alone need one")
        return
    try:
        load_secret(path)
    except ValueError as error:
        yield bad(
            "cluster secret", str(error), "Make one with `openssl rand -hex 32` and give it to every role."
        )
        return
    if path is not None and path.stat().st_mode & 0o077:
        yield warning("cluster secret", f"other users can read {path}", f"Run `chmod 600 {path}`.")
    else:
        yield good("cluster secret", "given, and long enough")


def the_model(options: DoctorOptions) -> Iterator[Finding]:
    try:
        resolved = model.resolve(options.model)
        model.reach_hub(resolved.location)
    except ValueError as error:
        yield bad("model", str(error), "Correct --model, or install the model.")
        return
    faults = check_model.faults(resolved, EngineOptions(tensor_parallel_size=options.tensor_parallel_size))
    if not Path(resolved.location).exists():
        yield note("model", f"{resolved.location} is on the hub: workers check its files when they start")
    elif all(fault.what == "tokenizer" for fault in faults):
        yield good("model", resolved.location)
    for fault in faults:
        yield bad("tokenizer" if fault.what == "tokenizer" else "model", fault.message, REMEDIES[fault.what])


def _read(path: Path) -> str | None:
    """The text of a file; None if it cannot be read (the speed of a virtual card gives EINVAL)."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
