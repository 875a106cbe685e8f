"""The messages of proto/inference.proto."""

from baton.rpc.descriptors import define_messages

define_messages(globals())
