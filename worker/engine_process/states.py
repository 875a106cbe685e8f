"""The states of an attempt in the engine process. Pure; it does not know the roles.

Two rules (the form is that of h11's `_state.py`):

1. An attempt goes from state to state as `TRANSITIONS` says. All else is an error that names both states.
2. An attempt that has ended is CLOSING until its last lease ends. Until then it keeps its blocks and its id.

`docs/architecture.md` has the diagram, which is made from the table.
"""

from collections.abc import Mapping
from enum import Enum, auto


class State(Enum):
    NEW = auto()
    """It has no block. The engine may be moving memory for it."""
    IMPORTING = auto()
    """The prefix cache gets the beginning of its prompt. It has no block."""
    COMPUTING = auto()
    """The engine has its prompt, queued or in steps."""
    COMPUTED = auto()
    """Its part of a split prompt is computed. KV of other workers, on which it rests, is not verified."""
    HELD = auto()
    """Its prompt is computed and its first token sent. The blocks stay for other workers, or for a decode
    here."""
    FETCHING = auto()
    """It has blocks, into which the receiver writes KV of another worker."""
    WITHOUT_KV = auto()
    """Its KV did not come. Its blocks wait for a Retarget, a cancel or the deadline."""
    TAKING = auto()
    """A prefill of this worker has its KV, or will have it. It has no block."""
    DECODING = auto()
    """It gets tokens, one or more in each step."""
    CLOSING = auto()
    """It has finished, failed or was cancelled. Its leases are about to end."""
    ENDED = auto()
    """Nothing of it is left."""


ENDS = "it has finished, failed or was cancelled"
_GOES_ON: Mapping[State, Mapping[State, str]] = {
    State.NEW: {
        State.IMPORTING: "other workers or the store have more of its prompt",
        State.COMPUTING: "the engine gets its prompt",
        State.FETCHING: "it has blocks for KV of another worker",
        State.TAKING: "its prefill is on this worker",
    },
    State.IMPORTING: {State.COMPUTING: "the prefix came, or will not come"},
    State.COMPUTING: {
        State.COMPUTED: "a part of a split prompt is computed",
        State.HELD: "a prefill has its token",
        State.DECODING: "a decode has its first token",
    },
    State.COMPUTED: {State.HELD: "all KV of other workers was right"},
    State.HELD: {},
    State.FETCHING: {
        State.DECODING: "all KV is verified",
        State.WITHOUT_KV: "the KV will not come",
    },
    State.WITHOUT_KV: {State.FETCHING: "its router names another prefill"},
    State.TAKING: {State.DECODING: "the prefill is held, and a seat is free"},
    State.DECODING: {},
}
TRANSITIONS: Mapping[State, Mapping[State, str]] = {
    **{state: {**after, State.CLOSING: ENDS} for state, after in _GOES_ON.items()},
    State.CLOSING: {State.ENDED: "its last lease has ended"},
    State.ENDED: {},
}
"""The states after each state, and why."""
