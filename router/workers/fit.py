"""Checks that a worker has the model and the tokenizer of the router and of the other workers. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from baton.router.workers.refusal import RefusedWorker
from baton.rpc import worker_pb2 as pb

SAME_MODEL = "Give the router and all workers the same --model and --revision."


@dataclass(frozen=True, slots=True)
class RouterModel:
    """The model of the router's tokenizer."""

    name: str
    """The name that clients use."""
    vocab_size: int
    vocabulary_fingerprint: str


def check_fit(
    described: pb.WorkerDescription, model: RouterModel, others: Mapping[str, pb.WorkerDescription]
) -> None:
    """Raises RefusedWorker if the worker does not fit. `others` are the accepted workers, by name.

    An empty vocabulary fingerprint is not compared. Workers of the wire version before do not report one, and
    a model of random weights may have no tokenizer.
    """
    if described.first_pool not in (pb.POOL_PREFILL, pb.POOL_DECODE):
        raise RefusedWorker(f"its first pool ({described.first_pool}) is unknown")
    if not described.block_size or not described.num_blocks or not described.max_model_len:
        raise RefusedWorker("its description has no block size, number of blocks or context length")
    if not described.max_num_seqs or not described.max_num_batched_tokens:
        raise RefusedWorker("its description has no seats for requests, or no tokens of a step")
    if described.first_pool == pb.POOL_PREFILL and not described.kv_address:
        raise RefusedWorker("its description has no KV address, from which other workers fetch")
    if len(described.content_root) > 64:
        raise RefusedWorker(f"its content root has {len(described.content_root)} bytes, more than 64")
    fingerprint = described.vocabulary_fingerprint
    if fingerprint and fingerprint != model.vocabulary_fingerprint:
        raise RefusedWorker(
            f"its tokenizer ({described.model}) is not the router's ({model.name})",
            f"{SAME_MODEL} Without --model a router takes the model of its workers.",
        )
    if not fingerprint and described.vocab_size and described.vocab_size < model.vocab_size:
        raise RefusedWorker(
            f"its model ({described.model}) has {described.vocab_size} tokens, the router's tokenizer "
            f"({model.name}) {model.vocab_size}",
            SAME_MODEL,
        )
    for other, theirs in others.items():
        if described.model_fingerprint != theirs.model_fingerprint:
            raise RefusedWorker(
                f"its model ({described.model}) is not that of {other} ({theirs.model})", SAME_MODEL
            )
        if described.layout_fingerprint != theirs.layout_fingerprint:
            raise RefusedWorker(
                f"its KV layout ({described.layout_fingerprint}) is not that of {other} "
                f"({theirs.layout_fingerprint})",
                SAME_MODEL,
            )
