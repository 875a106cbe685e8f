"""The checked-in messages match proto/, and the stubs have its methods."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.rpc.stubs import InferenceStub, WorkerStub

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path.name for path in (ROOT / "proto").glob("*.proto"))


@pytest.mark.parametrize("source", SOURCES)
def test_checked_in_messages_are_current(source, tmp_path):
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ibaton/rpc=proto"]
    command += [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out")]
    subprocess.run([*command, f"baton/rpc/{source}"], cwd=ROOT, check=True)
    generated = {path.name: path.read_text() for path in (tmp_path / "baton/rpc").iterdir()}
    assert len(generated) == 2
    for name, text in generated.items():
        assert (ROOT / "rpc" / name).read_text() == text, f"{name} is stale: run `make proto`"


@pytest.mark.parametrize("source", SOURCES)
def test_the_protobuf_that_baton_asks_for_takes_the_messages(source):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (asked,) = (need for need in project["dependencies"] if need.startswith("protobuf>="))
    generated = (ROOT / "rpc" / source.replace(".proto", "_pb2.py")).read_text()
    (version,) = re.findall(r"^# Protobuf Python Version: (.+)$", generated, re.MULTILINE)
    assert asked == f"protobuf>={version}"


@pytest.mark.parametrize("stub", [WorkerStub, InferenceStub])
def test_a_stub_says_the_types_of_every_method(stub):
    types = {name: text for name, text in stub.__annotations__.items() if name != "service"}
    assert types.keys() == {method.name for method in stub.service.methods}
    for method in stub.service.methods:
        kind = "Stream" if method.client_streaming else "Unary"
        kind += "Stream" if method.server_streaming else "Unary"
        module = method.containing_service.file.name.rpartition("/")[2].replace(".proto", "_pb2")
        messages = f"{module}.{method.input_type.name}, {module}.{method.output_type.name}"
        assert types[method.name] == f"grpc.aio.{kind}MultiCallable[{messages}]"


async def test_a_stub_makes_a_method_at_its_first_use() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        stub: Any = WorkerStub(channel)
        assert not vars(stub).keys() & {method.name for method in stub.service.methods}
        assert isinstance(stub.Attach, grpc.aio.StreamStreamMultiCallable)
        assert stub.Attach is stub.Attach
        for method in stub.service.methods:
            assert callable(getattr(stub, method.name))
        with pytest.raises(AttributeError, match=r"Worker has no method Detach"):
            _ = stub.Detach
