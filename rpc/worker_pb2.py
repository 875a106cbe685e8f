"""The messages of proto/worker.proto."""

from baton.rpc.descriptors import define_messages

define_messages(globals())
