"""Whole transfers over a network that fails in every way: each ends right, and then all pools are whole.

`test_bad_network` runs these in a network namespace; named to pytest, they run without.

Right is: injected, every byte as it was at prefill; or failed, with a reason, and then it is asked for anew.
"""

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import baton.kv_transfer as kv
from tests.bad_network import BACK_FAULTS, FAULTS, BadNetwork

from .conftest import until
from .own_network import VARIABLE, link
from .second_wire import ACK, CREDIT, FETCH, HELLO, PING
from .transfer_process import deadlines

SHORT = kv.TransferDeadlines(
    handshake=2.0, fetch_wait=5.0, hold=30.0, progress=0.8, peer_dead=0.8, ping=0.1, unreachable=3.0
)
# As the defaults: a dead peer is noticed before an ACK is overdue.
BACK = msgspec.structs.replace(SHORT, progress=3.0)
TOKENS = 120  # 24 frames
ROUNDS = [pytest.param(1), pytest.param(40, marks=pytest.mark.long)]


@pytest.fixture
def network(make_pair: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Any, BadNetwork]]:
    settings = {"deadlines": SHORT, "blocks": 64} | getattr(request, "param", {})
    pair = make_pair(settings, settings)
    network = BadNetwork(pair.prefill.port)
    yield pair, network
    network.close()


def transfer(pair: Any, network: BadNetwork) -> str:
    """One prefill, fetched until it came: what its fetches ended with."""
    prefill_id = pair.prefill.hold(TOKENS)
    blocks = pair.prefill.held[prefill_id]
    ends = ""
    while not ends.endswith("injected"):
        decode_id = pair.decode.fetch(pair.prefill, prefill_id, TOKENS, kv_address=network.address)
        event = pair.until(lambda i=decode_id: pair.decode.events.get(i), "the fetch to end")
        if isinstance(event, kv.Injected):
            pair.assert_same(blocks, decode_id, 0, TOKENS)
            ends += "injected"
        else:
            assert isinstance(event, kv.FetchFailed)
            ends += f"{event.reason}, "
            network.hits = 0  # no network is bad for ever
        pair.decode.release(decode_id)
    return ends


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("network", [{"movers": 0}, {"movers": 3}], indirect=True, ids=["0", "3"])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_every_request_ends_right(network: tuple[Any, BadNetwork], rounds: int) -> None:
    pair, bad = network
    rng = random.Random(rounds)
    for _ in range(rounds):
        for fault in FAULTS:
            bad.fault, bad.hits, bad.chance = (
                fault,
                rng.choice([1, 1, 2, 5, 40]),
                rng.choice([0.05, 0.3, 1.0]),
            )
            ends = transfer(pair, bad)
            assert ends.count("injected") == 1, (fault, ends)
            bad.hits = 0
    pair.assert_whole()
    pair.until(lambda: (len(pair.prefill.free), len(pair.decode.free)) == (64, 64), "every block to be free")
    assert not any(layer.any() for layer in pair.decode.ranks.tensors), "a late byte landed in a free block"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("network", "rounds"),
    [
        pytest.param({"movers": processes, "deadlines": BACK}, rounds, marks=marks)
        for processes, rounds, marks in ((3, 1, ()), (0, 40, pytest.mark.long), (3, 40, pytest.mark.long))
    ],
    indirect=["network"],
    ids=["3-1", "0-40", "3-40"],
)
def test_what_decode_says_is_lost_or_wrong(network: tuple[Any, BadNetwork], rounds: int) -> None:
    """No prefill is held until its deadline, not even one whose ACK was lost."""
    pair, bad = network
    rng = bad.rng = random.Random(rounds)
    for _ in range(rounds):
        for fault in BACK_FAULTS:
            # A HELLO comes by when the fault of an ACK has ended the session.
            for back in (rng.choice([(ACK,), (ACK, HELLO)]), rng.choice([(FETCH,), (CREDIT,), (PING,)])):
                bad.fault, bad.back, bad.hits, before = fault, back, len(back), bad.suffered
                ends = transfer(pair, bad)
                assert ends.count("injected") == 1, (fault, back, ends)
                pair.until(lambda: not pair.prefill.held, f"the release after {fault} of {back}")
                pair.until(lambda n=before: bad.suffered > n, f"a message of {back}")
                bad.hits = 0
    assert set(pair.prefill.released.values()) == {"acked"}
    stats = pair.prefill.stats()
    assert "hold" not in stats.deadlines
    assert stats.checksum_failures.keys() == {"header", "control"}, "what was bent is seen as that"
    pair.assert_whole()
    pair.until(lambda: (len(pair.prefill.free), len(pair.decode.free)) == (64, 64), "every block to be free")
    assert not any(layer.any() for layer in pair.decode.ranks.tensors), "a late byte landed in a free block"


@pytest.mark.skipif(VARIABLE not in os.environ, reason="the link of this machine stays up")
def test_the_link_goes_down_and_comes_back(make_pair: Any) -> None:
    """For longer than the deadlines."""
    settings = {"deadlines": deadlines(peer_dead=50.0, handshake=2.0)}
    pair = make_pair(settings, settings)
    prefill_id = pair.prefill.open(200)
    blocks = pair.prefill.held[prefill_id]
    decode_id = pair.decode.fetch(pair.prefill, prefill_id, 200)
    pair.prefill.sender.ready(prefill_id, None, 0, 100)
    pair.until(lambda: pair.decode.stats().frames_received > 3, "half of it")
    link("down")
    try:
        pair.prefill.sender.ready(prefill_id, None, 100, 200)
        pair.prefill.sender.commit(prefill_id, kv.FirstToken(1))
        for worker in (pair.decode, pair.prefill):
            pair.until(
                lambda worker=worker: worker.later_until(50.0, lambda s: s.sessions == 0),
                "it to give its peer up",
            )
        assert pair.decode.stats().deadlines["peer_dead"] >= 1
        down_until = time.monotonic() + 0.3  # lanes that are opened meanwhile find no listener
        until(lambda: time.monotonic() > down_until, "the link to stay down")
    finally:
        link("up")
    event = pair.event(decode_id)
    assert isinstance(event, kv.Injected), event
    pair.assert_same(blocks, decode_id, 0, 200)
    pair.assert_whole()
