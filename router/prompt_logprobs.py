"""Log probabilities of the tokens of a prompt, as workers send them. Pure."""

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.rpc import worker_pb2 as pb

_WORD = 4  # bytes of a float and of an int


class PromptLogprob(NamedTuple):
    """Of one token."""

    logprob: float
    rank: int
    """1: no token was more likely."""
    top: Sequence[tuple[int, float]]
    """The most likely tokens with their log probabilities, most likely first."""


def tokens(message: pb.PromptLogprobs) -> int:
    """Returns how many tokens the message is about."""
    return len(message.logprobs) // _WORD


def read(message: pb.PromptLogprobs) -> Iterator[PromptLogprob]:
    """Yields what the message says of each token, in order."""
    top = list(zip(_array("i", message.top_ids), _array("f", message.top_logprobs), strict=True))
    count = len(top) // tokens(message)
    each = zip(_array("f", message.logprobs), _array("i", message.ranks), strict=True)
    for i, (logprob, rank) in enumerate(each):
        yield PromptLogprob(logprob, rank, top[i * count : (i + 1) * count])


def defect(message: pb.PromptLogprobs, vocab_size: int) -> str:
    """Returns why this message cannot go to a client; empty if it can."""
    sizes = [len(field) for field in (message.logprobs, message.ranks, message.top_ids, message.top_logprobs)]
    of_tokens, of_ranks, of_ids, of_top = sizes
    if not of_tokens or of_tokens % _WORD or of_ranks != of_tokens or of_ids != of_top or of_ids % of_tokens:
        return f"log probabilities of a prompt come in arrays of {sizes} bytes"
    # A sum with NaN is NaN. Minus infinity is the log probability of a token that cannot come.
    if not all(sum(_array("f", field)) < math.inf for field in (message.logprobs, message.top_logprobs)):
        return "a log probability of a prompt is not a number, or is infinite"
    ids = _array("I", message.top_ids)
    if ids and max(ids) >= vocab_size:
        return f"token {max(ids)} is beyond the vocabulary of {vocab_size}"
    return ""


def _array(kind: str, packed: bytes) -> array:
    values = array(kind)
    values.frombytes(packed)
    return values
