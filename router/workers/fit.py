"""Whether a worker fits a router and its other workers: the same model, the same tokenizer. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from router.workers.refusal import Refused
from rpc import worker_pb2 as pb

SAME_MODEL = "Give the router and all workers the same --model and --revision."


@dataclass(frozen=True, slots=True)
class RouterModel:
    """The model whose tokenizer a router uses."""

    name: str
    """What clients call it."""
    vocab_size: int
    vocabulary_fingerprint: str


def check_fit(
    described: pb.WorkerDescription, model: RouterModel, others: Mapping[str, pb.WorkerDescription]
) -> None:
    """Raises Refused. `others` are the workers that were accepted, by name.

    A worker of the version before says nothing of its vocabulary, and a model of random weights may come
    without a tokenizer: these are not compared.
    """
    if described.role not in (pb.ROLE_PREFILL, pb.ROLE_DECODE):
        raise Refused(f"it has no known role ({described.role})")
    if not described.block_size or not described.num_blocks or not described.max_model_len:
        raise Refused("its description has no block size, number of blocks or context length")
    if described.role == pb.ROLE_PREFILL and not described.kv_address:
        raise Refused("its description has no address of its KV lanes, without which no worker can decode")
    fingerprint = described.vocabulary_fingerprint
    if fingerprint and fingerprint != model.vocabulary_fingerprint:
        raise Refused(
            f"its tokenizer ({described.model}) is not the router's ({model.name})",
            f"{SAME_MODEL} Without --model a router takes the model of its workers.",
        )
    if not fingerprint and described.vocab_size and described.vocab_size < model.vocab_size:
        raise Refused(
            f"its model ({described.model}) has {described.vocab_size} tokens, the router's tokenizer "
            f"({model.name}) {model.vocab_size}",
            SAME_MODEL,
        )
    for other, theirs in others.items():
        if described.model_fingerprint != theirs.model_fingerprint:
            raise Refused(
                f"its model ({described.model}) is not that of {other} ({theirs.model})", SAME_MODEL
            )
        if described.layout_fingerprint != theirs.layout_fingerprint:
            raise Refused(
                f"its KV layout ({described.layout_fingerprint}) is not that of {other} "
                f"({theirs.layout_fingerprint})",
                "Give all workers the same --dtype.",
            )
