"""What the processes of a worker report, as routers read it."""

from functools import cache
from typing import Any

from google.protobuf.message import Message

from baton.engine import EngineStats
from baton.kv_names import Tier
from baton.kv_transfer import TransferStats
from baton.rpc import worker_pb2 as pb
from baton.worker.messages import EngineStatus


def same_names(message: type[Message], value: object) -> dict[str, Any]:
    """The fields of a message that `value` has under the same names: a dataclass with slots, or None."""
    return {name: getattr(value, name) for name in _shared(message, type(value))}


@cache
def _shared(message: type[Message], kind: type) -> list[str]:
    return [name for name in message.DESCRIPTOR.fields_by_name if hasattr(kind, name)]


def reported_step_model(stats: EngineStats) -> pb.StepModel | None:
    if (table := stats.step_table) is None:
        return None
    decode, prompt = stats.step_factors
    return pb.StepModel(decode_factor=decode, prompt_factor=prompt, **same_names(pb.StepModel, table))


def reported(engine: EngineStatus, transfer: TransferStats) -> pb.WorkerStatus:
    """The status of a worker, without what its service process alone knows."""
    stats = engine.stats
    tiers, drafts = {tier.tier: tier for tier in stats.offload}, stats.speculation
    host, disk = tiers.get(Tier.HOST), tiers.get(Tier.DISK)
    fetched = engine.counts.fetched_by_tier
    status = pb.WorkerStatus(
        transfers_open=transfer.transfers_open,
        arena_slots_free=transfer.sender_slots_free + transfer.receiver_slots_free,
        arena_slots_total=2 * transfer.slots,
        long_chunk_tokens=stats.long.tokens,
        long_chunk_seconds=stats.long.seconds,
        kv_transports=transfer.transports,
        host_tokens_per_s=host.tokens_per_s if host else 0.0,
        disk_tokens_per_s=disk.tokens_per_s if disk else 0.0,
        kv_transfers=sum(transfer.transfers.get(end, 0) for end in ("acked", "injected")),
        kv_sent=transfer.sent_to,
        kv_links=[
            pb.KvLink(incarnation=peer, bytes_per_s=rate, bytes_waiting=waiting, used=used)
            for peer, (rate, waiting, used) in transfer.links.items()
        ],
        kv_bytes=transfer.bytes_sent + transfer.bytes_received,
        prefix_fetched_tokens=sum(fetched),
        store_fetched_tokens=fetched[Tier.STORE],
        host_loaded_tokens=host.loaded_tokens if host else 0,
        disk_loaded_tokens=disk.loaded_tokens if disk else 0,
        draft_tokens=drafts.drafts if drafts else 0,
        accepted_draft_tokens=drafts.accepted if drafts else 0,
        step_model=reported_step_model(stats),
        **same_names(pb.WorkerStatus, stats),
        **same_names(pb.WorkerStatus, stats.memory),
        **same_names(pb.WorkerStatus, stats.encoder),
        **same_names(pb.WorkerStatus, engine.counts),
    )
    status.MergeFrom(engine.told)
    return status
