"""Messages as dictionaries for JSON: what `/status` and `baton status` show of workers."""

from collections.abc import MutableSequence
from typing import Any

from google.protobuf.message import Message

from baton.rpc import worker_pb2 as pb
from baton.rpc.pools import POOL_NAMES


def described_as(described: pb.WorkerDescription, status: pb.WorkerStatus | None = None) -> dict[str, Any]:
    """What a worker says of itself. `status`: a newer one than that in its description."""
    status = status or described.status
    model = plain(status.step_model) if status.HasField("step_model") else None
    return {
        "role": POOL_NAMES.get(described.first_pool, "unknown"),
        "index": described.index,
        "incarnation": f"{described.incarnation:016x}",
        "description": plain(described),
        "status": {**plain(status), "step_model": model},
    }


def plain(message: Message) -> dict[str, Any]:
    """Like MessageToDict, but 64-bit numbers stay numbers and default values are included."""
    fields: dict[str, Any] = {}
    for described in message.DESCRIPTOR.fields:
        value = getattr(message, described.name)
        if isinstance(value, Message):
            continue  # `described_as` has those that are shown
        if described.enum_type is not None:
            known = described.enum_type.values_by_number.get(value)
            value = str(value) if known is None else known.name.lower()
        elif described.name == "incarnation":
            value = f"{value:016x}"  # too large for a number in JavaScript
        elif described.message_type is not None:
            is_map = described.message_type.GetOptions().map_entry
            value = dict(value) if is_map else [plain(item) for item in value]
        elif isinstance(value, MutableSequence):
            value = [item.hex() if isinstance(item, bytes) else item for item in value]
        elif isinstance(value, bytes):
            value = value.hex()
        fields[described.name] = value
    return fields
