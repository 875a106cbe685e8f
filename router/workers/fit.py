"""Checks that a worker has the model and the tokenizer of the router and of the other workers. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from baton.router.workers.refusal import RefusedWorker
from baton.rpc import worker_pb2 as pb

MODEL_FLAGS = "--model", "--revision"
SAME_MODEL = "Give the router and all workers the same --model and --revision."
FP8 = "float8_e4m3fn"


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
        if differing := list(_differing(described, theirs)):
            found = ", ".join(f"{name} ({ours}, there {its})" for name, ours, its, _ in differing)
            flags = " and ".join(dict.fromkeys(flag for *_, flags in differing for flag in flags))
            raise RefusedWorker(
                f"it differs from {other} in: {found}",
                f"Give all workers the same {flags}. The one accepted first may be the wrong one.",
            )


def _differing(
    ours: pb.WorkerDescription, theirs: pb.WorkerDescription
) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """What differs of that which must agree: its name, the value of each, and the flags that change it."""
    mine, its = (_parts(each.model_fingerprint) for each in (ours, theirs))
    for part in dict.fromkeys([*mine, *its]):
        if mine.get(part) == its.get(part):
            continue
        if part == "format":
            flags = "--dtype", "--quantization"
            yield "format of its weights", mine.get(part, ""), its.get(part, ""), flags
        else:
            yield part, ours.model, theirs.model, MODEL_FLAGS
    if ours.layout_fingerprint != theirs.layout_fingerprint:
        yield "KV layout", ours.layout_fingerprint, theirs.layout_fingerprint, MODEL_FLAGS
    if ours.dtype != theirs.dtype and FP8 not in (ours.dtype, theirs.dtype):  # FP8 is converted
        yield "KV dtype", ours.dtype, theirs.dtype, ("--dtype",)


def _parts(fingerprint: str) -> dict[str, str]:
    """The parts of a model's fingerprint, as `engine.loader` makes it."""
    return {name: value for name, _, value in (part.partition("=") for part in fingerprint.split("; "))}
