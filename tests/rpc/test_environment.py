"""Environment variables that must be set before grpc is imported, in every process that starts children."""

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, os, sys


class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"), flush=True)
            os._exit(0)


sys.meta_path.insert(0, Finder())
importlib.import_module(sys.argv[1])
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "module",
    [
        "baton.router.server",
        "baton.worker.service_process.grpc_service",
        "baton.cluster.autoscaling.autoscaler",
    ],
)
def test_fork_handlers_of_grpc_are_off(module: str) -> None:
    """The handlers can crash a child between fork and exec."""
    command = [sys.executable, "-c", SCRIPT, module]
    environment = {"GRPC_ENABLE_FORK_SUPPORT": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
