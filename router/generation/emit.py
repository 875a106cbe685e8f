"""Emit once: which of the tokens that workers send become part of a request's output.

Prefill and decode both send the first token, attempts are replaced while their messages are still on the
way, and a lost attempt may speak again. So: a token counts only if it comes from the one live prefill or the
one live decode, and each output index is emitted exactly once, in order, from whichever brings it first.
"""

from enum import Enum, auto


class Verdict(Enum):
    EMIT = auto()  # the request's next token
    DROP = auto()  # known already, or from an attempt that counts no more
    BROKEN = auto()  # this decode continues another text than the client's: end the attempt


class EmitOnce:
    """One request's output so far, and the attempts that may add to it. No I/O, no clock.

    Attributes:
        output_ids: what was emitted, in order. Owned here; read it, do not change it.
    """

    __slots__ = ("_base", "_decode_id", "_ended", "_prefill_id", "output_ids")

    def __init__(self) -> None:
        self.output_ids: list[int] = []
        self._prefill_id: bytes | None = None
        self._decode_id: bytes | None = None
        self._base = 0
        self._ended = False

    def begin_prefill(self, prefill_id: bytes) -> int:
        """Makes it the live one, in place of any other. Returns the output index that its token will have."""
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
        """The request is over: nothing is emitted any more."""
        self._ended = True

    def offer(self, attempt_id: bytes, output_index: int, token_id: int) -> Verdict:
        """Decides about one token, and records it when it is to be emitted."""
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
