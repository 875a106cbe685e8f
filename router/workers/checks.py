"""What the router believes of a worker: it may be of another model or version, or faulty.

1. `check_fit` refuses a worker with another model or tokenizer than the router and the other workers.
2. `explain` words the reason and the remedy if a call to a worker fails.
3. `token_defect` and `clear_invalid_rates` check the values that workers report. Workers are authenticated,
   but one may be faulty.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter, le, lt

import grpc

from baton.rpc import worker_pb2 as pb
from baton.steps.step_model import LARGEST_FACTOR, StepModel

MODEL_FLAGS = "--model", "--revision"
SAME_MODEL = "Give the router and all workers the same --model and --revision."
VERSION = "version of its weights"
NEW_WEIGHTS = (
    "Run `baton weights` with the newest checkpoint: a worker that starts again has the weights of --model."
)
LAYOUT = "KV layout"
_TILE = re.compile(r"%\d+")
"""Where in a layout it says at which positions that of a window may begin (`kv_names.cache_kinds`)."""
_LAYERS = re.compile(r"\blayers=\d+")
SAME_DRAFTS = "Give all workers the same --speculative-config: the layers of its drafts keep KV, too."
SAME_ENGINE = (
    "Give all workers the same --engine: Baton's and vLLM's keep {} of this model in other units "
    "(docs/run.md, vLLM workers)."
)
LOAD_ADAPTERS = "Put the adapter's files on its host, or unload the adapter (/v1/unload_lora_adapter)."
WAIT_FOR_WEIGHTS = "Wait: the router accepts it when it has them."
FP8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True)
class RouterModel:
    """The model of the router's tokenizer."""

    name: str
    """The name that clients use."""
    vocab_size: int
    vocabulary_fingerprint: str


def check_fit(
    described: pb.WorkerDescription, model: RouterModel, accepted_workers: Mapping[str, pb.WorkerDescription]
) -> None:
    """Raises RefusedWorker if the worker has another model or tokenizer.

    `accepted_workers`: by name, one for each other value of `must_agree`. An empty vocabulary
    fingerprint is not compared: a model of random weights may have no tokenizer.
    """
    if described.first_pool not in (pb.POOL_PREFILL, pb.POOL_DECODE):
        raise RefusedWorker(f"its first pool ({described.first_pool}) is unknown")
    if not described.block_size or not described.num_blocks or not described.max_model_len:
        raise RefusedWorker("its description has no block size, number of blocks or context length")
    if not described.max_num_seqs or not described.max_num_batched_tokens:
        raise RefusedWorker("its description has no seats for requests, or no tokens of a step")
    if not described.kv_address:
        raise RefusedWorker("its description has no KV address, from which other workers fetch")
    if len(described.content_root) > 64:
        raise RefusedWorker(f"its content root has {len(described.content_root)} bytes, more than 64")
    fingerprint = described.vocabulary_fingerprint
    if fingerprint and fingerprint != model.vocabulary_fingerprint:
        raise RefusedWorker(
            f"its tokenizer ({described.model}) is not the router's ({model.name})",
            f"{SAME_MODEL} Without --model a router takes the model of its workers.",
        )
    if not fingerprint and described.vocab_size < model.vocab_size:
        raise RefusedWorker(
            f"its model ({described.model}) has {described.vocab_size} tokens, the router's tokenizer "
            f"({model.name}) {model.vocab_size}",
            SAME_MODEL,
        )
    for other, accepted in accepted_workers.items():
        if differing := list(_differing(described, accepted)):
            parts = ", ".join(f"{name} ({value}, there {agreed})" for name, value, agreed, _ in differing)
            flags = " and ".join(dict.fromkeys(flag for *_, flags in differing for flag in flags))
            remedy = f"Give all workers the same {flags}. The one accepted first may be the wrong one."
            if any(name == VERSION for name, *_ in differing):
                remedy = NEW_WEIGHTS
            elif [name for name, *_ in differing][:1] == [LAYOUT]:  # the models agree
                remedy = _same_layout(described.layout_fingerprint, accepted.layout_fingerprint)
            raise RefusedWorker(f"it differs from {other} in: {parts}", remedy)


def _same_layout(*layouts: str) -> str:
    """The remedy for two KV layouts of one model."""
    if len({tuple(_LAYERS.findall(layout)) for layout in layouts}) > 1:
        return SAME_DRAFTS
    return SAME_ENGINE.format("windows" if len({_TILE.sub("", each) for each in layouts}) == 1 else "caches")


def must_agree(described: pb.WorkerDescription) -> tuple[str, ...]:
    """What `check_fit` compares with other workers."""
    return described.model_fingerprint, described.layout_fingerprint, described.dtype


def lacks_weights(described: pb.WorkerDescription, accepted: pb.WorkerDescription) -> bool:
    """Whether the accepted one has newer weights of the same model."""
    differing = {name for name, *_ in _differing(described, accepted)}
    is_older = described.weights.named_at < accepted.weights.named_at
    return is_older and VERSION in differing and differing <= {VERSION, "weights", "drafts"}


def _differing(
    described: pb.WorkerDescription, accepted: pb.WorkerDescription
) -> Iterator[tuple[str, str, str, tuple[str, ...]]]:
    """What differs of that which must agree: its name, the value of each, and the flags that change it."""
    parts, accepted_parts = (_parts(each.model_fingerprint) for each in (described, accepted))
    for part in dict.fromkeys([*parts, *accepted_parts]):
        if parts.get(part) == accepted_parts.get(part):
            continue
        if part == "format":
            flags = "--dtype", "--quantization"
            yield "format of its weights", parts.get(part, ""), accepted_parts.get(part, ""), flags
        elif part == "version":
            yield VERSION, parts.get(part, "of --model"), accepted_parts.get(part, "of --model"), MODEL_FLAGS
        else:
            yield part, described.model, accepted.model, MODEL_FLAGS
    if described.layout_fingerprint != accepted.layout_fingerprint:
        yield LAYOUT, described.layout_fingerprint, accepted.layout_fingerprint, MODEL_FLAGS
    if described.dtype != accepted.dtype and FP8 not in (described.dtype, accepted.dtype):  # FP8 is converted
        yield "KV dtype", described.dtype, accepted.dtype, ("--dtype",)


def _parts(fingerprint: str) -> dict[str, str]:
    """The parts of a model's fingerprint, as `engine.loader` makes it."""
    return {name: value for name, _, value in (part.partition("=") for part in fingerprint.split("; "))}


SEE_WORKER_LOG = "Look at the worker's log."
SECRET = "Give the router and all workers the same --cluster-secret-file or BATON_CLUSTER_SECRET."
PORT = "Give the router the worker's gRPC port, --port; --kv-port and --metrics-port are others."
TLS = "Give all of them or none --cluster-ssl-certfile, --cluster-ssl-keyfile and --cluster-ssl-ca-certs."
CERTIFICATE = (
    "Issue the worker's certificate for the DNS name baton-worker, by an authority of --cluster-ssl-ca-certs."
)
WAIT = "Wait until the worker is ready: its log says how far it is. If it is ready, correct the port."
DRAINED = "Start it again, or take its address off the router's list."
START = "Start the worker, or correct its address: host and --port."

_CAUSES = (
    # Text in gRPC's error, in lower case; its meaning; the remedy.
    ("wrong_version_number", "another service answers at this address, without TLS", PORT),
    ("hostname verification", "the worker's certificate is for another name", CERTIFICATE),
    ("unauthenticated", "the worker has another cluster secret", SECRET),
    (
        "handshake read failed (endpoint closing)",
        "the worker is still starting, or another service listens there",
        WAIT,
    ),
    ("connection refused", "nothing listens at this address", START),
    ("errors resolving", "the host name is unknown", START),
)
_CLOSED_AT_ONCE = "failed to connect", "socket closed"


class RefusedWorker(Exception):
    """A worker cannot be part of the pool. The message is the reason."""

    def __init__(self, reason: str, remedy: str = SEE_WORKER_LOG) -> None:
        super().__init__(reason)
        self.remedy = remedy


def explain(error: grpc.aio.AioRpcError, *, files: bool) -> tuple[str, str]:
    """Returns the reason and the remedy for a failed call to a worker. `files`: the router has
    --cluster-ssl-certfile."""
    details = error.details() or ""
    text = f"{error.code().name}: {details}".lower()
    for words, reason, remedy in _CAUSES:
        if words in text:
            return f"{reason} ({details})", remedy
    if "certificate_verify_failed" in text:
        if files:
            return f"the worker's certificate is not trusted ({details})", f"{CERTIFICATE} {TLS}"
        return f"the worker does not prove the cluster secret ({details})", f"{SECRET} {TLS}"
    if files and all(words in text for words in _CLOSED_AT_ONCE):
        reason = "the worker closed the connection: it may not trust the router's certificate"
        return f"{reason} ({details})", TLS
    remedy = "Look at the worker's log, at its address, and at firewalls between the router and the worker."
    return f"{error.code().name.lower()}: {details}", remedy


_STATUS = pb.WorkerStatus.DESCRIPTOR.fields
_RATES = [field.name for field in _STATUS if field.type == field.TYPE_DOUBLE]
_rates = attrgetter(*_RATES)


def token_defect(event: pb.TokenEvent, vocab_size: int) -> str:
    """Returns why this token cannot go to a client; empty if it can."""
    if not event.HasField("logprobs"):
        valid = event.token_id < vocab_size
        return "" if valid else f"token {event.token_id} is beyond the vocabulary of {vocab_size}"
    logprobs = event.logprobs
    if len(logprobs.top_ids) != len(logprobs.top_logprobs):
        return f"a token has {len(logprobs.top_ids)} top_ids and {len(logprobs.top_logprobs)} top_logprobs"
    # Minus infinity is the log probability of a token that a mask excludes.
    if not all(logprob < math.inf for logprob in (logprobs.logprob, *logprobs.top_logprobs)):
        return "a log probability is not a number, or is infinite"
    largest = max((event.token_id, *logprobs.top_ids))
    if largest >= vocab_size:
        return f"token {largest} is beyond the vocabulary of {vocab_size}"
    return ""


MOST_SIZES = 64
"""Of a table of steps: its sizes double, so 20 reach a million."""


def step_model(report: pb.StepModel, before: StepModel | None = None) -> StepModel | None:
    """What the steps of a worker cost now, with its factors. None: the report is nonsense.

    `before`: of the last report. The factors change with most reports and the table does not, so the model
    keeps the table, of which plans know more."""
    tables = (report.rows, report.decode_seconds), (report.tokens, report.prompt_seconds)
    for sizes, seconds in tables:
        if not 0 < len(sizes) == len(seconds) <= MOST_SIZES or sizes[0] < 1:
            return None
        if not all(map(lt, sizes, sizes[1:])) or not all(map(le, seconds, seconds[1:])):
            return None
    # Sorted, so only the ends can be out of range; comparisons with NaN are false.
    costs = (
        *(end for _, seconds in tables for end in (seconds[0], seconds[-1])),
        report.context_seconds,
        report.pair_seconds,
    )
    if not all(0 <= cost < math.inf for cost in costs) or not 0 <= report.overlap <= 1:
        return None
    if not all(
        1 <= LARGEST_FACTOR * factor <= LARGEST_FACTOR**2
        for factor in (report.decode_factor, report.prompt_factor)
    ):
        return None
    table = StepModel(
        tuple(report.rows),
        tuple(report.decode_seconds),
        report.context_seconds,
        tuple(report.tokens),
        tuple(report.prompt_seconds),
        report.pair_seconds,
        report.overlap,
    )
    if before is not None and before.table is not None and before.table == table:
        table = before.table
    return table.corrected(report.decode_factor, report.prompt_factor)


def clear_invalid_rates(status: pb.WorkerStatus) -> list[str]:
    """Sets negative and infinite rates and NaN to 0, which means unknown. Returns them for the log."""
    rates = zip(_RATES, _rates(status), strict=True)
    invalid = [name for name, rate in rates if not 0 <= rate < math.inf]
    described = [f"{name} {getattr(status, name)}" for name in invalid]
    for name in invalid:
        status.ClearField(name)
    measured = {
        "prefix_links": [
            x for x in status.prefix_links if 0 <= x.wait < math.inf and 0 < x.tokens_per_s < math.inf
        ],
        "kv_links": [x for x in status.kv_links if 0 < x.bytes_per_s < math.inf and 0 <= x.used <= 1],
    }
    for name, valid in measured.items():
        links = getattr(status, name)
        if len(valid) < len(links):
            described.append(name)
            del links[:]
            links.extend(valid)
    return described
