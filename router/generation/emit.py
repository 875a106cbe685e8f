"""Decides which tokens from workers become output, so that each output index is emitted exactly once.

Prefill and decode both send the first token, and messages of replaced attempts may come late. So a token
counts only if it comes from the current prefill or the current decode. The first of both to send the next
output index wins.
"""

from enum import Enum, auto


class Verdict(Enum):
    EMIT = auto()  # the next token of the output
    DROP = auto()  # emitted before, or from an attempt that was replaced
    BROKEN = auto()  # the decode continues another text than the emitted one: end the attempt


class EmitOnce:
    """The output of one request so far, and the attempts that may add to it. Pure: no I/O, no clock.

    Attributes:
        output_ids: emitted tokens in order. Only this class changes it.
    """

    __slots__ = ("_base", "_decode_id", "_ended", "_prefill_id", "output_ids")

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self._prefill_id: bytes | None = None
        self._decode_id: bytes | None = None
        self._base = 0
        self._ended = False

    def begin_prefill(self, prefill_id: bytes) -> int:
        """Makes this the current prefill. Returns the output index of its token."""
        self._prefill_id = prefill_id
        self._base = len(self.output_ids)
        return self._base

    def end_prefill(self) -> None:
        self._prefill_id = None

    def begin_decode(self, decode_id: bytes) -> None:
        self._decode_id = decode_id

    def end_decode(self) -> None:
        self._decode_id = None

    def end(self) -> None:
        """Drops all tokens from now on."""
        self._ended = True

    def offer(self, attempt_id: bytes, output_index: int, token_id: int) -> Verdict:
        """Decides about one token, and records it if it is emitted."""
        if self._ended:
            return Verdict.DROP
        emitted = len(self.output_ids)
        if attempt_id == self._decode_id:
            if output_index > emitted:
                return Verdict.BROKEN
            if output_index < emitted:
                known = self.output_ids[output_index] == token_id
                return Verdict.DROP if known else Verdict.BROKEN
        elif attempt_id != self._prefill_id or output_index != self._base or output_index != emitted:
            return Verdict.DROP
        self.output_ids.append(token_id)
        return Verdict.EMIT
