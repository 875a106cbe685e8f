"""A worker dies, hangs or comes back. No KV is wrong, no block is lost."""

import signal
from typing import Any

import pytest

import baton.kv_transfer as kv
from tests.kv_transfer.conftest import Pair, until
from tests.kv_transfer.transfer_process import deadlines

from .conftest import EVERY_KIND, TCP, Kind

TOKENS = 64


def on(cases: list[Any], names: str = "transport") -> pytest.MarkDecorator:
    return pytest.mark.parametrize(names, cases, indirect=["transport"], ids=str)


def each(*more: Any) -> list[tuple[Kind, Any]]:
    """Every transport with each of these."""
    return [(kind, other) for kind in EVERY_KIND for other in more]


# Before a slice is on its way, transports differ in nothing.
ASKED = (TCP, "asked")
KILLED = (("receiving", (1, 1)), ("receiving", (2, 4)), ("committed", (1, 1)))


def bring(pair: Pair, state: str) -> tuple[bytes, bytes]:
    """A prefill, and a fetch of it in this state."""
    prefill, decode = pair.prefill, pair.decode
    prefill_id = prefill.open(TOKENS)
    decode_id = decode.fetch(prefill, prefill_id, TOKENS)
    until(lambda: prefill.sender.has_fetch(prefill_id), "the FETCH", prefill.sender)
    if state == "receiving":
        prefill.sender.ready(prefill_id, None, 0, TOKENS // 2)
        pair.until(lambda: decode.stats().frames_received >= 3, "frames")
    elif state == "committed":  # and the engine of decode does not look
        compute(pair, prefill_id)
        until(lambda: (stats := decode.stats()).receiver_slots_free < stats.slots, "frames")
    return prefill_id, decode_id


def compute(pair: Pair, prefill_id: bytes, start: int = 0) -> None:
    pair.prefill.sender.ready(prefill_id, None, start, TOKENS)
    pair.prefill.sender.commit(prefill_id, kv.FirstToken(1))


def fetched(pair: Pair, prefill_id: bytes) -> None:
    """A fetch of a prefill that is computed and held, bit for bit."""
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, TOKENS)
    assert isinstance(pair.event(decode_id), kv.Injected)
    pair.assert_same(blocks, decode_id, 0, TOKENS)
    pair.assert_whole()


@pytest.mark.all
@on([(*ASKED, (2, 4)), *((kind, *what) for kind, what in each(*KILLED))], "transport, state, ranks")
def test_decode_is_killed(make_prefill: Any, make_decode: Any, state: str, ranks: tuple[int, int]) -> None:
    """The prefill is held, and another decode worker fetches it."""
    prefill, second = make_prefill(ranks=ranks[0]), make_decode(name="decode 1")
    first = make_decode(name="decode 0", ranks=ranks[1])
    prefill_id, _ = bring(Pair(prefill, first), state)
    first.process.kill()
    if state != "committed":
        compute(Pair(prefill, second), prefill_id, TOKENS // 2 if state == "receiving" else 0)
    fetched(Pair(prefill, second), prefill_id)


@pytest.mark.all
@on([ASKED, *each("receiving", "committed")], "transport, state")
def test_prefill_is_killed_and_comes_back_under_its_address(
    make_prefill: Any, make_decode: Any, state: str
) -> None:
    """The fetch fails. The new incarnation serves, and nothing of the old one is taken for its KV."""
    prefill, decode = make_prefill(), make_decode(slots=8)  # not all frames fit
    prefill_id, decode_id = bring(Pair(prefill, decode), state)
    port, old = prefill.port, prefill.incarnation
    prefill.process.kill()
    prefill.process.wait()
    again = Pair(make_prefill(port=port), decode)
    event = until(lambda: decode.poll() or decode.events.get(decode_id), "the fetch to end", decode.receiver)
    assert isinstance(event, kv.FetchFailed)
    assert event.reason in ("incarnation", "unreachable", "lost")
    decode.release(decode_id)
    stale = decode.fetch(again.prefill, prefill_id, TOKENS, incarnation=old)
    assert again.event(stale) == kv.FetchFailed(stale, "incarnation")
    fetched(again, again.prefill.hold(TOKENS))


@pytest.mark.all
@on(each("prefill", "decode"), "transport, hangs")
def test_a_transfer_process_hangs_and_goes_on(make_pair: Any, hangs: str) -> None:
    pair = make_pair(*({"deadlines": deadlines(peer_dead=50.0)} for _ in range(2)))
    prefill_id, decode_id = bring(pair, "receiving")
    process, peer = (pair.prefill, pair.decode) if hangs == "prefill" else (pair.decode, pair.prefill)
    process.process.send_signal(signal.SIGSTOP)
    until(lambda: peer.later_until(50.0, lambda s: s.deadlines.get("peer_dead")), "its peer to notice")
    process.process.send_signal(signal.SIGCONT)
    compute(pair, prefill_id, TOKENS // 2)
    assert pair.until(lambda: pair.decode.events.get(decode_id), "the fetch to end")
    if isinstance(pair.decode.events[decode_id], kv.FetchFailed):
        fetched(pair, prefill_id)
    pair.assert_whole()


@on([(TCP, "prefill"), (TCP, "decode")], "transport, hangs")
def test_an_engine_that_hangs_is_told_to_its_peer(make_pair: Any, hangs: str) -> None:
    """Its own transfer process is well, and says so in PING; the other side ends the session."""
    pair = make_pair(*({"deadlines": deadlines(engine_dead=50.0)} for _ in range(2)))
    worker, peer = getattr(pair, hangs), pair.decode if hangs == "prefill" else pair.prefill
    worker.heartbeat.tick()  # and never again
    prefill_id = pair.prefill.open(20)
    pair.decode.fetch(pair.prefill, prefill_id, 20)
    pair.until(lambda: worker.stats().sessions and peer.stats().sessions, "their session")
    worker.later(60.0)  # once: while it closes lanes, more of it would be the time of a mover that hangs
    pair.until(lambda: peer.stats().deadlines.get("engine_dead"), "its peer to notice")
    assert worker.stats().deadlines == {}


@on([TCP])
def test_no_listener(make_pair: Any) -> None:
    pair = make_pair(decode={"deadlines": deadlines(unreachable=50.0)}, connected=False)
    decode_id = pair.decode.fetch(pair.prefill, bytes(16), 10, kv_address="127.0.0.1:1")
    pair.until(lambda: pair.decode.later(20.0) or pair.decode.events, "the fetch to end")
    assert pair.event(decode_id) == kv.FetchFailed(decode_id, "unreachable")
