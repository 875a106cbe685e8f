"""Whether what a worker reports makes sense. Workers are authenticated, but one may be broken. Pure."""

import math

from rpc import worker_pb2 as pb

_RATES = ("prefill_tokens_per_s", "step_seconds", "chunk_seconds")


def wrong_token(event: pb.TokenEvent, vocab_size: int) -> str:
    """Why this token cannot go to a client; empty where it can. `vocab_size`: of the worker's model, 0 if a
    worker of the version before does not tell it."""
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


def forget_wrong_rates(status: pb.WorkerStatus) -> list[str]:
    """Sets the rates that no measurement yields to 0, which means unknown. Returns them, for a log."""
    wrong = [name for name in _RATES if not 0 <= getattr(status, name) < math.inf]
    said = [f"{name} {getattr(status, name)}" for name in wrong]
    for name in wrong:
        status.ClearField(name)
    return said
