"""Control messages: what is valid is read back, and nothing else is read at all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.protocol import messages as m
from kv_transfer.protocol.frame import FrameType

ID = bytes(range(16))
TO_PREFILL = [m.Fetch(ID, ((0, 5), (9, 12)), 0, 0, 3), m.Credit(9, True), m.Ack(), m.Abort("cancelled")]
TO_DECODE = [
    m.CreditReturned(9, 4), m.Commit(m.FirstToken(5, -0.25, (5, 6), (-0.25, -2.0)), 3, 999),
    m.Aborted("gone", 2),
]  # fmt: skip
BOTH = [m.Ping((1 << 64) - 1, 12)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_each_role_reads_its_own_messages_and_no_other(role: Any) -> None:
    mine, others = (TO_PREFILL, TO_DECODE) if role == "prefill" else (TO_DECODE, TO_PREFILL)
    for message in mine + BOTH:
        assert m.decode(role, m.frame_type(message), memoryview(m.encode(message))) == message
    for message in others:
        if not isinstance(
            message, m.Credit | m.CreditReturned
        ):  # one frame type, a message for each direction
            with pytest.raises(m.MessageError, match="never sent"):
                m.decode(role, m.frame_type(message), memoryview(m.encode(message)))
    for kind in (FrameType.HELLO, FrameType.KV):
        with pytest.raises(m.MessageError):
            m.decode(role, kind, memoryview(b"\x90"))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (FrameType.FETCH, [ID[:15], [[0, 5]], 0, 0, 3]),
        (FrameType.FETCH, [ID, [[5, 5]], 0, 0, 3]),
        (FrameType.FETCH, [ID, [[0, 5], [4, 9]], 0, 0, 3]),
        (FrameType.FETCH, [ID, [[0, 1 << 32]], 0, 0, 3]),
        (FrameType.FETCH, [ID, [[2 * i, 2 * i + 1] for i in range(1025)], 0, 0, 3]),
        (FrameType.FETCH, [ID, [[0, 5]], 0, 0, 0]),
        (FrameType.FETCH, [ID, [[0, 5]], 0, 0]),
        (FrameType.FETCH, [ID, [[0, 5]], 0, 0, 3, "more"]),
        (FrameType.CREDIT, [-1, False]),
        (FrameType.ABORT, ["because"]),
        (FrameType.ABORT, {"reason": "gone"}),
        (FrameType.PING, [1 << 63, -1]),
    ],
)
def test_out_of_bounds(kind: FrameType, fields: object) -> None:
    with pytest.raises(m.MessageError, match=kind.name):
        m.decode("prefill", kind, memoryview(msgspec.msgpack.encode(fields)))


def test_a_first_token_needs_as_many_logprobs_as_ids() -> None:
    bad = m.encode(m.Commit(m.FirstToken(5, None, (1, 2), (-1.0,)), 0, 0))
    with pytest.raises(m.MessageError, match="2 top ids"):
        m.decode("decode", FrameType.COMMIT, memoryview(bad))


@given(st.sampled_from(["prefill", "decode"]), st.sampled_from(FrameType), st.binary(max_size=200))
def test_noise_is_an_error_or_a_valid_message(role: Any, kind: FrameType, noise: bytes) -> None:
    """Whatever is accepted is a message within its bounds, as encoding it again shows."""
    try:
        message = m.decode(role, kind, memoryview(noise))
    except m.MessageError:
        return
    assert m.decode(role, kind, memoryview(m.encode(message))) == message
