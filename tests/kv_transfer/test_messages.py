"""Control messages: what is valid is read back, and nothing else is read at all."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer.layout import Piece
from baton.kv_transfer.protocol import messages as m
from baton.kv_transfer.protocol.frame import FrameType

ID = bytes(range(16))
TO_SENDER: list[m.Control] = [
    m.Fetch(ID, 7, ((0, 5), (9, 12))),
    m.Credit(9, True),
    m.Ack(),
    m.Abort("cancelled"),
]
TO_SENDER += [m.FetchContent((ID, ID), 3), m.Reach(False, "another machine"), m.Taken((3, 1))]
TO_RECEIVER = [
    m.CreditReturned(9, 4), m.Commit(m.FirstToken(5, -0.25, (5, 6), (-0.25, -2.0)), 3, 999),
    m.Aborted("gone", 2), m.Have(2),
    m.Export("shared_memory", (b"a handle",), 64, 4096, ID),
    m.Slices(((3, 9, 0, 1792, Piece(1, 0, 2, 5, 7)),
              (4, 10, 1, 64, Piece(0, 0, 2, 5, 0, 2)))),
]  # fmt: skip
BOTH = [m.Ping(12)]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_each_side_reads_its_own_messages_and_no_other(side: Any) -> None:
    mine, others = (TO_SENDER, TO_RECEIVER) if side == "sender" else (TO_RECEIVER, TO_SENDER)
    for message in mine + BOTH:
        assert m.decode(side, m.frame_type(message), memoryview(m.encode(message))) == message
    for message in others:
        if not isinstance(
            message, m.Credit | m.CreditReturned
        ):  # one frame type, a message for each direction
            with pytest.raises(m.ProtocolError, match="never sent"):
                m.decode(side, m.frame_type(message), memoryview(m.encode(message)))
    for kind in (FrameType.HELLO, FrameType.KV):
        with pytest.raises(m.ProtocolError):
            m.decode(side, kind, memoryview(b"\x90"))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (FrameType.FETCH, [ID[:15], 0, [[0, 5]]]),
        (FrameType.FETCH, [ID, 0, [[5, 5]]]),
        (FrameType.FETCH, [ID, 0, [[0, 5], [4, 9]]]),
        (FrameType.FETCH, [ID, 0, [[0, 1 << 32]]]),
        (FrameType.FETCH, [ID, 0, [[2 * i, 2 * i + 1] for i in range(1025)]]),
        (FrameType.FETCH, [ID, 0]),
        (FrameType.FETCH, [ID, 0, [[0, 5]], "more"]),
        (FrameType.FETCH, [ID, 0, [[0, 5]], [5, 5]]),
        (FrameType.FETCH, [ID, 0, [[0, 5]], [*range(1025)]]),
        (FrameType.FETCH_CONTENT, [[ID[:15]], 0]),
        (FrameType.FETCH_CONTENT, [[], 0]),
        (FrameType.FETCH_CONTENT, [[ID] * 2049, 0]),
        (FrameType.CREDIT, [-1, False]),
        (FrameType.ABORT, ["because"]),
        (FrameType.ABORT, {"reason": "gone"}),
        (FrameType.PING, [-1]),
        (FrameType.SLICES, [[]]),
        (FrameType.SLICES, [[[3, 9, 0, 1792, [1, 0, 2, 5]]]]),
        (FrameType.SLICES, [[[3, 9, 0, 1792, [1, 0, 2, 5, 7, None, 0]]]]),
        (FrameType.SLICES, [[[3, 9, 0, 1792, [1 << 16, 0, 2, 5, 7]]]]),
        (FrameType.SLICES, [[[3, 9, 0, 1792, [1, 0, 2, 5, 7]]] * 1025]),
    ],
)
def test_out_of_bounds(kind: FrameType, fields: object) -> None:
    side: m.Side = "receiver" if kind is FrameType.SLICES else "sender"
    with pytest.raises(m.ProtocolError, match=f"{kind.name}: "):
        m.decode(side, kind, memoryview(msgspec.msgpack.encode(fields)))


def test_a_first_token_needs_as_many_logprobs_as_ids() -> None:
    bad = m.encode(m.Commit(m.FirstToken(5, None, (1, 2), (-1.0,)), 0, 0))
    with pytest.raises(m.ProtocolError, match="2 top ids"):
        m.decode("receiver", FrameType.COMMIT, memoryview(bad))


@given(st.sampled_from(["sender", "receiver"]), st.sampled_from(FrameType), st.binary(max_size=200))
def test_noise_is_an_error_or_a_valid_message(side: Any, kind: FrameType, noise: bytes) -> None:
    """Whatever is accepted is a message within its bounds, as encoding it again shows."""
    try:
        message = m.decode(side, kind, memoryview(noise))
    except m.ProtocolError:
        return
    assert m.decode(side, kind, memoryview(m.encode(message))) == message


def test_the_page_lists_the_same_messages() -> None:
    page = (Path(__file__).parents[2] / "docs/protocol.md").read_text()
    rows = set(re.findall(r"^- (\d+) (\w+), (decode|prefill|both):", page, re.MULTILINE))
    expected = {(1, "HELLO", "both")}
    for kind, (to_sender, to_receiver) in m.MESSAGES.items():
        if to_sender is to_receiver:
            expected.add((kind.value, kind.name, "both"))
            continue
        expected |= {(kind.value, kind.name, "decode")} if to_sender else set()
        expected |= {(kind.value, kind.name, "prefill")} if to_receiver else set()
    assert {(int(number), name, side) for number, name, side in rows} == expected
