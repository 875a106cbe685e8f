"""The checked-in messages match proto/, and the stubs have its methods."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from baton.rpc.stubs import ExternalProcessorStub, InferenceStub, WorkerStub

ROOT = Path(__file__).resolve().parents[2]


def test_checked_in_messages_are_current(tmp_path):
    sources = [f"baton/rpc/{path.name}" for path in (ROOT / "proto").glob("*.proto")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Ibaton/rpc=proto", f"--pyi_out={tmp_path}"]
    descriptors = tmp_path / "descriptors.binpb"
    subprocess.run(
        [*command, f"--descriptor_set_out={descriptors}", *sources], cwd=ROOT, check=True, timeout=60
    )
    types = list((tmp_path / "baton/rpc").iterdir())
    assert len(types) == len(sources)
    for path in types:
        assert (ROOT / "rpc" / path.name).read_text() == path.read_text(), f"{path.name}: run `make proto`"
    written, made = (
        {file.name: file for file in FileDescriptorSet.FromString(path.read_bytes()).file}
        for path in (ROOT / "rpc/descriptors.binpb", descriptors)
    )
    assert written == made, "run `make proto`"


@pytest.mark.parametrize("stub", [WorkerStub, InferenceStub, ExternalProcessorStub])
def test_a_stub_says_the_types_of_every_method(stub):
    types = {name: text for name, text in stub.__annotations__.items() if name != "service"}
    assert types.keys() == {method.name for method in stub.service.methods}
    for method in stub.service.methods:
        kind = "Stream" if method.client_streaming else "Unary"
        kind += "Stream" if method.server_streaming else "Unary"
        module = method.containing_service.file.name.rpartition("/")[2].replace(".proto", "_pb2")
        messages = f"{module}.{method.input_type.name}, {module}.{method.output_type.name}"
        assert types[method.name] == f"grpc.aio.{kind}MultiCallable[{messages}]"
