"""The handshake without sockets: which peers are let in, and what each side says to the others."""

import contextlib

import msgspec
import pytest

from baton.kv_transfer.layout import Dtypes
from baton.kv_transfer.protocol.hello import Initiator, LaneKeys, LaneRefused, Listener, why_lanes
from baton.kv_transfer.protocol.messages import HelloOpen, HelloProof, HelloReply, Identity, decode_hello

from .second_wire import mac

SECRET = b"0123456789abcdef"
PREFILL = Identity(
    "sender", "prefill 0", 7, "m", "layout a", Dtypes("bfloat16", "float32"), slot_bytes=1 << 20
)
DECODE = Identity(
    "receiver", "decode 3", 9, "m", "layout a", Dtypes("bfloat16", "float32"), slot_bytes=1 << 16
)
replace = msgspec.structs.replace


def initiator(
    identity: Identity = DECODE, secret: bytes = SECRET, incarnation: int = 7, *, encrypt: bool = False
) -> Initiator:
    return Initiator(secret, identity, b"s" * 16, 2, 4, incarnation, encrypt=encrypt)


def answer(listener: Listener, opener: Initiator) -> HelloReply:
    opened = decode_hello(memoryview(opener.open))
    assert isinstance(opened, HelloOpen)
    return listener.answer(opened, opener.open)


def test_both_sides_learn_the_identity_of_the_other() -> None:
    a, b = initiator(), Listener(SECRET, PREFILL)
    assert a.reply(answer(b, a)) == PREFILL
    assert a.proof is not None
    opened, peer = b.check(a.proof)
    assert (peer, opened.session_id, opened.lane, opened.lanes) == (DECODE, b"s" * 16, 2, 4)


@pytest.mark.parametrize(
    "other",
    [Dtypes("float8_e4m3fn", "float32"), Dtypes("bfloat16", "float16"), Dtypes("float8_e4m3fn", "bfloat16")],
)
def test_kv_in_fp8_and_plain_kv_are_converted_and_states_in_any_dtype(other: Dtypes) -> None:
    changed = {"dtypes": other}
    for ours, theirs in ((PREFILL, replace(DECODE, **changed)), (replace(PREFILL, **changed), DECODE)):
        a, b = initiator(theirs), Listener(SECRET, ours)
        assert a.reply(answer(b, a)) == ours
        assert a.proof is not None
        assert b.check(a.proof)[1] == theirs


@pytest.mark.parametrize(
    ("sender", "receiver", "why"),
    [
        ("host a", "host a", ""),
        ("nixl", "nixl", ""),
        ("host a", "host b", "another machine"),
        ("nixl", "nixl_cuda", "the sender has KV in nixl, the receiver in nixl_cuda"),
        ("host a", "nixl", "the sender has KV in host, the receiver in nixl"),
        ("", "host a", "--kv-connector tcp at the sender"),
        ("host a", "", "--kv-connector tcp at the receiver"),
        ("", "", "--kv-connector tcp at the sender"),
    ],
)
def test_hello_chooses_the_way(sender: str, receiver: str, why: str) -> None:
    assert why_lanes(sender, receiver) == why


@pytest.mark.parametrize("encrypt", [False, True])
def test_neither_accepts_another_secret(encrypt: bool) -> None:
    a = initiator(secret=b"another secret!!", encrypt=encrypt)
    b = Listener(SECRET, PREFILL, encrypt=encrypt)
    reply = answer(b, a)
    with pytest.raises(LaneRefused, match="secret"):
        a.reply(reply)
    assert a.proof is None, "nothing is proven to who proved nothing"
    with pytest.raises(LaneRefused, match="secret"):
        b.check(HelloProof(bytes(32)))


def test_a_mac_cannot_be_reflected_or_replayed() -> None:
    a, b = initiator(), Listener(SECRET, PREFILL)
    reply = answer(b, a)
    with pytest.raises(LaneRefused, match="secret"):
        b.check(HelloProof(reply.mac))  # the listener's own words sent back
    a.reply(reply)
    assert a.proof is not None
    second = Listener(SECRET, PREFILL)
    answer(second, a)  # the same opening, another nonce
    with pytest.raises(LaneRefused, match="secret"):
        second.check(a.proof)
    with pytest.raises(LaneRefused, match="secret"):
        initiator().reply(reply)


def test_every_word_is_signed() -> None:
    a, b = initiator(), Listener(SECRET, PREFILL)
    reply = answer(b, a)
    forged = msgspec.msgpack.encode(replace(PREFILL, slot_bytes=1 << 16))
    for bad in (HelloReply(bytes(32), reply.identity, reply.mac), HelloReply(reply.nonce, forged, reply.mac)):
        with pytest.raises(LaneRefused, match="secret"):
            a.reply(bad)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model_fingerprint": "n"}, "model"),
        ({"layout_fingerprint": "layout b"}, "layout"),
        ({"dtypes": Dtypes("float16", "float32")}, "dtype"),
        ({"dtypes": Dtypes("int8", "float32")}, "dtype"),
        ({"dtypes": Dtypes("bfloat16", "float8_e4m3fn")}, "dtype"),
        ({"dtypes": Dtypes("bfloat16", "int8")}, "dtype"),
        ({"dtypes": Dtypes("bfloat16")}, "dtype"),
        ({"side": "sender"}, "side"),
        ({"incarnation": 7}, "self"),
        ({"slot_bytes": 100}, "limits"),
        ({"slot_bytes": 1 << 31}, "limits"),
    ],
)
def test_mismatch_names_both_sides(changed: dict[str, object], reason: str) -> None:
    theirs = replace(DECODE, **changed)
    a, b = initiator(theirs), Listener(SECRET, PREFILL)
    with contextlib.suppress(LaneRefused):  # it may see the mismatch, too; the proof is there all the same
        a.reply(answer(b, a))
    assert a.proof is not None
    with pytest.raises(LaneRefused, match=r"decode 3|prefill 0") as refused:
        b.check(a.proof)
    assert refused.value.reason == reason
    if reason == "dtype":
        theirs_said = theirs.dtypes
        assert (
            refused.value.detail == f"prefill 0 has KV bfloat16, states float32, decode 3 has {theirs_said}"
        )
    if reason in ("model", "layout"):
        [(field, value)] = changed.items()
        ours = getattr(PREFILL, field)
        assert refused.value.detail == f"{field}: prefill 0 has {ours!r}, decode 3 has {value!r}"


def test_another_incarnation_is_not_the_one_asked_for() -> None:
    a, b = initiator(incarnation=8), Listener(SECRET, PREFILL)
    with pytest.raises(LaneRefused, match="incarnation"):
        a.reply(answer(b, a))


def test_each_lane_and_direction_has_a_key() -> None:
    found = []
    for _ in range(2):
        a, b = initiator(encrypt=True), Listener(SECRET, PREFILL, encrypt=True)
        a.reply(answer(b, a))
        assert a.proof is not None
        assert b.keys is None, "before the proof"
        b.check(a.proof)
        assert a.keys is not None
        assert b.keys == LaneKeys(a.keys.incoming, a.keys.outgoing)
        found += [a.keys.incoming.key, a.keys.outgoing.key]
    assert len({*found}) == 4


@pytest.mark.parametrize(("ours", "theirs"), [(True, False), (False, True)])
def test_a_peer_that_does_not_encrypt_and_one_that_does(ours: bool, theirs: bool) -> None:
    without = "decode 3" if ours else "prefill 0"
    with pytest.raises(LaneRefused, match=rf"encryption: {without} does not"):
        answer(Listener(SECRET, PREFILL, encrypt=ours), initiator(encrypt=theirs))


def test_an_attacker_cannot_take_the_encryption_away() -> None:
    """The listener does not encrypt, and gets an opening that seems not to, either."""
    a, b = initiator(encrypt=True), Listener(SECRET, PREFILL)
    opened = decode_hello(memoryview(a.open))
    assert isinstance(opened, HelloOpen)
    plain = HelloOpen(*(getattr(opened, field) for field in opened.__struct_fields__))
    with pytest.raises(LaneRefused, match="secret"):
        a.reply(b.answer(plain, msgspec.msgpack.encode(plain)))
    assert a.proof is None
    assert a.keys is None


def test_a_public_key_that_is_none() -> None:
    """The peer knows the cluster's secret, and breaks the protocol."""
    a = initiator(encrypt=True)
    identity = msgspec.msgpack.encode(PREFILL)
    zeros = HelloReply(bytes(32), identity, mac(SECRET, b"listener", a.open, bytes(32), identity))
    with pytest.raises(LaneRefused, match="encryption"):
        a.reply(zeros)


def test_out_of_order() -> None:
    a, b = initiator(), Listener(SECRET, PREFILL)
    with pytest.raises(LaneRefused, match="hello"):
        b.check(HelloProof(bytes(32)))
    answer(b, a)
    with pytest.raises(LaneRefused, match="hello"):
        answer(b, a)
    with pytest.raises(LaneRefused, match="hello"):
        answer(Listener(SECRET, PREFILL), Initiator(SECRET, DECODE, b"s" * 16, 4, 4, 7))
