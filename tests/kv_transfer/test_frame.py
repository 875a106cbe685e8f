"""The 64-byte header, against a layout written down here a second time."""

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer.layout import Piece
from baton.kv_transfer.protocol.frame import FrameError, FrameType, Header, pack, parse
from baton.kv_transfer.slices import Slice

u16, u32 = (st.integers(0, (1 << bits) - 1) for bits in (16, 32))
ids = st.binary(min_size=16, max_size=16)
OF_TRANSFER = [
    FrameType.FETCH, FrameType.FETCH_CONTENT, FrameType.HAVE, FrameType.ACK, FrameType.ABORT,
    FrameType.ABORTED, FrameType.SLICES, FrameType.COMMIT,
]  # fmt: skip
OF_NO_TRANSFER = [
    FrameType.HELLO, FrameType.CREDIT, FrameType.PING, FrameType.EXPORT, FrameType.REACH, FrameType.TAKEN,
]  # fmt: skip
pieces = st.builds(Piece, u16, u16, u16, u32, u32, u16)
headers = st.one_of(
    st.builds(Slice, pieces, ids, u32, u32),
    st.builds(Header, st.sampled_from(OF_TRANSFER), ids, u32),
    st.builds(lambda kind, length: Header(kind, length=length), st.sampled_from(OF_NO_TRANSFER), u32),
)


def test_every_byte_is_where_the_table_says() -> None:
    s = Slice(Piece(1, 2, 3, 4, 5, 9), bytes(range(16)), 6, 7, slot=99)
    expected = (
        b"BtKV\x0c\x04\x00\x00" + bytes(range(16)) + struct.pack("<4H", 1, 9, 2, 3)
        + struct.pack("<4I", 4, 5, 6, 7) + bytes(12)
    )  # fmt: skip
    check = struct.pack("<I", xxhash.xxh3_64_intdigest(expected) & 0xFFFFFFFF)
    assert pack(s) == expected + check
    assert len(expected + check) == 64


@pytest.mark.all
@given(headers)
def test_parse_inverts_pack(header: Header | Slice) -> None:
    assert parse(pack(header)) == header


@given(headers, st.integers(0, 511))
def test_any_flipped_bit_is_seen(header: Header | Slice, bit: int) -> None:
    damaged = bytearray(pack(header))
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError, match="checksum") as error:
        parse(damaged)
    assert error.value.kind == "header"


@pytest.mark.parametrize("kind", [t for t in FrameType if t is not FrameType.KV])
def test_fields_that_a_type_does_not_use_are_zero(kind: FrameType) -> None:
    for at in range(8, 60):
        raw = bytearray(pack(Header(kind)))
        raw[at] = 1
        raw[60:] = struct.pack("<I", xxhash.xxh3_64_intdigest(bytes(raw[:60])) & 0xFFFFFFFF)
        if 44 <= at < 48 or (kind in OF_TRANSFER and at < 24):
            parse(raw)
        else:
            with pytest.raises(FrameError) as error:
                parse(raw)
            assert error.value.kind == "type"


@pytest.mark.parametrize(
    ("at", "value", "kind"),
    [
        (0, b"HTTP", "magic"),
        (4, b"\x01", "version"),
        (5, b"\x63", "type"),
        (6, b"\x01", "type"),
        (48, b"\x01", "type"),
        (59, b"\x01", "type"),
    ],
)
def test_whole_but_not_ours(at: int, value: bytes, kind: str) -> None:
    """The checksum is right, the content is not: another program, version, or a type of the future."""
    raw = bytearray(pack(Header(FrameType.PING)))
    raw[at : at + len(value)] = value
    raw[60:] = struct.pack("<I", xxhash.xxh3_64_intdigest(bytes(raw[:60])) & 0xFFFFFFFF)
    with pytest.raises(FrameError) as error:
        parse(raw)
    assert error.value.kind == kind
