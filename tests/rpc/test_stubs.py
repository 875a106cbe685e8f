"""The checked-in stubs match proto/."""

import subprocess
import sys
from pathlib import Path

import pytest

from baton.rpc import ext_proc_pb2, inference_pb2, worker_pb2

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path.name for path in (ROOT / "proto").glob("*.proto"))


@pytest.mark.parametrize("source", SOURCES)
def test_checked_in_stubs_are_current(source, tmp_path):
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ibaton/rpc=proto"]
    command += [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([*command, f"baton/rpc/{source}"], cwd=ROOT, check=True, timeout=60)
    generated = {path.name: path.read_text() for path in (tmp_path / "baton/rpc").iterdir()}
    assert len(generated) == 3
    for name, text in generated.items():
        assert (ROOT / "rpc" / name).read_text() == text, f"{name} is stale: run `make proto`"


@pytest.mark.parametrize("stubs", [worker_pb2, inference_pb2, ext_proc_pb2])
def test_the_type_stubs_have_every_method(stubs):
    [service] = stubs.DESCRIPTOR.services_by_name.values()
    types = Path(stubs.__file__.replace("_pb2.py", "_pb2_grpc.pyi")).read_text()
    for method in service.methods:
        assert f"    {method.name}: grpc.aio." in types
        assert f"def {method.name}(" in types
