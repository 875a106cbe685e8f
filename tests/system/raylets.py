"""A Ray of several nodes on this machine, whose raylets and GCS a test may kill.

Ray's own `cluster_utils` runs in a process of its own, which does what it is told line by line: so Ray's
settings and processes stay out of the test's, and nothing outlives it. GCS persists to RocksDB, as a cluster
that wants to survive its head's restart has to be told (`RAY_gcs_storage`).
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from baton.system.python_path import PACKAGES

_CONTROL = """
import json, os, secrets, sys, threading
from pathlib import Path
from baton.processes.children import adopt_orphans
from baton.system.python_path import PACKAGES
from baton.processes.tree import end_descendants

directory = Path(sys.argv[1])
adopt_orphans()
token = directory / "token"
token.touch(mode=0o600)
token.write_text(secrets.token_hex(32))
(directory / "gcs").mkdir()
(directory / "ray").mkdir()
os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN_PATH=str(token),
    RAY_worker_niceness="0",  # Ray's default is 15, which roles inherit
    RAY_memory_monitor_refresh_ms="0",  # a full machine must not cost a worker
    RAY_enable_metrics_collection="0",
    RAY_USAGE_STATS_ENABLED="0",
    PYTHONPATH=os.pathsep.join(filter(None, (PACKAGES, os.environ.get("PYTHONPATH")))),
    PYTHONSAFEPATH="1",
    RAY_TMPDIR=str(directory),  # where it notes the address of the current cluster, for other commands
    RAY_gcs_storage="rocksdb",
    RAY_gcs_storage_path=str(directory / "gcs"),
    # A node whose raylet has ended is given up after 1.5 s, by default after 15: tests wait for it. One that
    # is slow has a minute.
    RAY_health_check_initial_delay_ms="0",
    RAY_health_check_period_ms="500",
    RAY_health_check_timeout_ms="20000",
    RAY_health_check_failure_threshold="3",
)
from ray._private import ray_constants
from ray.cluster_utils import Cluster

common = {
    "object_store_memory": 80 * 1024 * 1024, "plasma_directory": str(directory),
    "include_dashboard": False, "include_log_monitor": False,
}
cluster = Cluster(shutdown_at_exit=False)

def add(cpus, labels):
    node = cluster.add_node(num_cpus=cpus, labels=labels, temp_dir=str(directory), **common)
    return node.node_id

def kill(node_id):
    [node] = [node for node in cluster.list_all_nodes() if node.node_id == node_id]
    [raylet] = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET]
    raylet.process.kill()
    cluster.remove_node(node, allow_graceful=False)

def gcs(up):
    node = cluster.head_node
    if up:
        node.start_gcs_server()
    else:
        node.kill_gcs_server()

def address():
    return cluster.address

try:
    for line in sys.stdin:
        name, *args = json.loads(line)
        print(json.dumps(globals()[name](*args)), flush=True)
    cluster.shutdown()
finally:
    end_descendants(15, threading.Event())
"""


class Raylets:
    """Owns that process. The first node added is the head."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        directory.mkdir(mode=0o700)
        self.log = directory.with_suffix(".log")
        self.token = directory / "token"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _CONTROL, str(directory)],
                env=environment | {"PYTHONPATH": PACKAGES},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _tell(self, *words: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()
        return json.loads(answer)

    def add(self, cpus: int, **labels: str) -> str:
        """One more node; its id."""
        return self._tell("add", cpus, labels)

    def kill(self, node_id: str) -> None:
        """Kills a raylet, and takes its node's other processes away."""
        self._tell("kill", node_id)

    def gcs(self, up: bool) -> None:
        self._tell("gcs", up)

    @property
    def address(self) -> str:
        return self._tell("address")

    def close(self) -> None:
        """Ends all of it, gracefully. Nothing may be left."""
        self.process.communicate()
        assert self.process.returncode == 0, self.log.read_text()
