"""The messages of proto/, made from their descriptors. `make proto` writes these, and the types as `.pyi`.

Modules that protoc generates demand the major version of protobuf that protoc has.
"""

from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import Default
from google.protobuf.internal import builder


def define_messages(module: dict[str, Any]) -> None:
    """Puts the messages and enums of proto/NAME.proto into the module NAME_pb2, whose `globals` these are."""
    source = module["__name__"].replace(".", "/").removesuffix("_pb2") + ".proto"
    files = FileDescriptorSet.FromString(Path(__file__).with_name("descriptors.binpb").read_bytes()).file
    [described] = [file for file in files if file.name == source]
    module["DESCRIPTOR"] = Default().AddSerializedFile(described.SerializeToString())
    builder.BuildMessageAndEnumDescriptors(module["DESCRIPTOR"], module)
    builder.BuildTopDescriptorsAndMessages(module["DESCRIPTOR"], module["__name__"], module)
