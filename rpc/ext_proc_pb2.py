"""The messages of proto/ext_proc.proto."""

from google.protobuf import struct_pb2 as struct_pb2  # they have fields of its types

from baton.rpc.descriptors import define_messages

define_messages(globals())
