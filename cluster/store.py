"""`baton store`: runs a master and a store process of Mooncake Store, or removes what a cluster stored.

A master knows which store process has an object. Store processes give memory. If one of them ends, the
command ends, too, and its supervisor starts it again: a store that has lost its master is empty.
"""

import asyncio
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import setproctitle

from baton.cluster.options.parameters import size_in_bytes
from baton.cluster.options.roles import StoreOptions, StoreRole
from baton.cluster.roles import supervised
from baton.kv_transfer import shared_store
from baton.kv_transfer.shared_store.chunk_object import StoreKeys
from baton.kv_transfer.shared_store.client import ClientProcess
from baton.processes.children import Child, describe_exit, report
from baton.processes.spawn import spawn
from baton.processes.tree import StopSignals
from baton.rpc.auth import load_secret
from baton.system.addresses import cannot_listen, free_port, try_port, url_host

START_WITHIN = 60.0
"""Seconds in which the processes must listen."""
GRACE = 5.0
"""Seconds that they have to end after SIGTERM."""
LOOK = 0.05  # seconds


def run(options: StoreRole) -> int:
    if options.command.action == "clear":
        return _clear(options)
    with supervised(options.process.ready_fd):
        return _serve(options)


def _clear(options: StoreRole) -> int:
    """Removes the KV of this cluster, or of one of its tenants. Raises ValueError for a user's mistake."""
    store, keys = options.store, StoreKeys(load_secret(options.secret.cluster_secret_file))
    if store.kv_store is None:
        raise ValueError("--kv-store: required, it names the store, as for workers")
    shared_store.check(store.kv_store)
    salt = None if store.tenant is None else _salt_of(store.api_key_file, store.tenant)
    client = ClientProcess(store.kv_store, "baton store clear")
    try:
        client.open(1 << 20)
        if reason := client.reason():
            raise ValueError(f"--kv-store {store.kv_store}: {reason}")
        removed = client.call(0, "clear", keys.pattern(salt=salt))
    except (shared_store.StoreGone, ImportError) as error:
        raise ValueError(f"--kv-store {store.kv_store}: {error}") from error
    finally:
        client.close()
    print(f"Removed {removed} objects.")
    return 0


def _salt_of(key_file: Path | None, name: str) -> bytes:
    """The salt of the API key of this name."""
    from baton.router.admission.keys import read_key_file

    if key_file is None:
        raise ValueError("--advanced.tenant: names an API key of --api-key-file, which is missing")
    keys = {key.name: key for key in read_key_file(str(key_file))}
    if name not in keys:
        raise ValueError(f"--advanced.tenant {name}: there is no such key; there are {', '.join(keys)}")
    if not (salt := keys[name].cache_salt):
        raise ValueError(
            f"--advanced.tenant {name}: this key has no salt, so it shares KV with all keys without one; "
            "give it a salt, or leave --advanced.tenant out"
        )
    return salt


def _serve(options: StoreRole) -> int:
    setproctitle.setproctitle(f"{options.process.title}: store {options.process.index}")
    store = options.store
    wheel = find_spec("mooncake")
    if wheel is None or not wheel.submodule_search_locations:
        shared_store.check("mooncake://localhost:1")  # says how to install it
        raise AssertionError("the package is there")
    directory, size = Path(wheel.submodule_search_locations[0]), size_in_bytes(store.size)
    master, commands, ports = f"{url_host(store.host)}:{store.port}", [], []
    if store.kv_store is None:
        try:
            try_port(store.host, store.port)
        except OSError as error:
            raise ValueError(cannot_listen("--port", store.host, store.port, error)) from error
        metrics = store.metrics_port or free_port(store.host)
        flags = [f"--rpc_address={store.host}", f"--rpc_port={store.port}"]
        flags += [f"--metrics_host={store.host}", f"--metrics_port={metrics}"]
        if store.etcd:
            flags += ["--enable_ha=true", f"--etcd_endpoints={store.etcd}", "--enable_oplog=true"]
        commands.append([f"{directory}/mooncake_master", *flags])
        ports.append(metrics if store.etcd else store.port)  # until it leads, it opens no other
    else:
        shared_store.check(store.kv_store)
    if size:
        if store.kv_store is not None or store.etcd:
            master = shared_store.master_of(store.kv_store or f"mooncake://{store.etcd}?ha=etcd")
        client_port = free_port(store.host) if store.kv_store is None else store.port
        flags = [f"--host={store.host}", f"--port={client_port}", f"--global_segment_size={size}"]
        flags += [f"--master_server_address={master}", "--metadata_server=P2PHANDSHAKE"]
        commands.append([f"{directory}/mooncake_client", *flags, f"--protocol={store.protocol}"])
        ports.append(client_port)
    if not commands:
        raise ValueError("--size 0: nothing is left to run; leave out --kv-store, or give memory")
    return asyncio.run(run_processes(commands, ports, store, options.process.ready_fd))


async def run_processes(
    commands: list[list[str]], ports: list[int], store: StoreOptions, ready_fd: int | None
) -> int:
    """Runs the commands, each after the one before listens on its port, until one ends or a signal comes."""
    signals = StopSignals()
    signals.install()
    children, ends = list[Child](), list[asyncio.Task[int]]()
    try:
        async with asyncio.timeout(START_WITHIN):
            for command, port in zip(commands, ports, strict=True):
                # Any peer may read their memory: `spawn` keeps the cluster secret from them.
                popen = spawn("-m", "baton.processes.tied", str(os.getpid()), *command, given=b"")
                children.append(Child(Path(command[0]).name, popen))
                ends.append(asyncio.create_task(children[-1].wait()))
                listening = asyncio.create_task(_listens(store.host, port))
                await signals.unless_stopped(listening, *ends)
                if not listening.done():
                    listening.cancel()
                    break
            else:
                report(ready_fd, {"ready": {"store": f"{url_host(store.host)}:{store.port}"}})
        await signals.unless_stopped(*ends)
        lost = None if signals.stop.is_set() else next(child for child in children if child.has_ended)
    except TimeoutError:
        port = ports[len(children) - 1]
        raise ValueError(f"{children[-1].name} does not listen on port {port}; see its log above") from None
    finally:
        for child in children:
            child.signal(signal.SIGTERM)
        await asyncio.gather(*(child.end(GRACE) for child in children))
    if lost is None:
        return 0
    code = await lost.wait()
    hint = " (Debian: apt install libibverbs1)" if code == 127 else ""
    print(f"{lost.name} {describe_exit(code)}{hint}", file=sys.stderr)
    return 1


async def _listens(host: str, port: int) -> None:
    """Returns when a program listens there."""
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(LOOK)
        else:
            writer.close()
            return
