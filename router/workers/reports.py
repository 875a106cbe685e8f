"""Checks the values that workers report. Workers are authenticated, but one may be faulty. Pure."""

import math

from baton.rpc import worker_pb2 as pb

_RATES = (
    "prefill_tokens_per_s",
    "step_seconds",
    "decode_seconds",
    "fastest_step_seconds",
    "chunk_seconds",
    "long_chunk_seconds",
    "host_tokens_per_s",
    "disk_tokens_per_s",
)


def token_defect(event: pb.TokenEvent, vocab_size: int) -> str:
    """Returns why this token cannot go to a client; empty if it can.

    `vocab_size` is 0 for a worker of the wire version before, which does not report it.
    """
    given = event.logprobs
    if len(given.top_ids) != len(given.top_logprobs):
        return f"a token has {len(given.top_ids)} top_ids and {len(given.top_logprobs)} top_logprobs"
    # Minus infinity is the log probability of a token that a mask excludes.
    if not all(logprob < math.inf for logprob in (given.logprob, *given.top_logprobs)):
        return "a log probability is not a number, or is infinite"
    largest = max((event.token_id, *given.top_ids))
    if vocab_size and largest >= vocab_size:
        return f"token {largest} is beyond the vocabulary of {vocab_size}"
    return ""


def clear_invalid_rates(status: pb.WorkerStatus) -> list[str]:
    """Sets negative and infinite rates and NaN to 0, which means unknown. Returns them for the log."""
    invalid = [name for name in _RATES if not 0 <= getattr(status, name) < math.inf]
    described = [f"{name} {getattr(status, name)}" for name in invalid]
    for name in invalid:
        status.ClearField(name)
    valid = [link for link in status.prefix_links if _is_valid(link)]
    if len(valid) < len(status.prefix_links):
        described.append("prefix_links")
        del status.prefix_links[:]
        status.prefix_links.extend(valid)
    return described


def _is_valid(link: pb.PrefixLink) -> bool:
    return 0 <= link.wait < math.inf and 0 < link.tokens_per_s < math.inf
