"""The prefill workers that decode fetches from: connects, waits between attempts, and repeats ACKs."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.kv_transfer.config import MAX_LANES, TransferConfig
from baton.kv_transfer.process.stats import printable
from baton.kv_transfer.process.tcp_session import CROWDED, Session
from baton.kv_transfer.protocol.acks import Acks
from baton.kv_transfer.protocol.fetches import MENDABLE, PeerKey
from baton.kv_transfer.protocol.messages import Ack
from baton.system.addresses import split_addresses

log = logging.getLogger("baton.kv")


class Connect(Protocol):
    """Starts a session with a prefill worker, as `TcpConnector.connect`. `session_up` or `session_down`
    follows. OSError: the session cannot start."""

    def __call__(
        self, addresses: Sequence[tuple[str, int]], incarnation: int, lanes: int, avoid: Collection[int], /,
        *, narrow: bool,
    ) -> Session: ...  # fmt: skip


_BACKOFF = (0.05, 1.0)  # seconds before lanes reopen: first and longest
# This side ended the session, and all that was sent will arrive. Or the peer did, and had all ACKs: CROWDED.
# Any other end may have lost messages. So may the peer's end without a word: it closes in the same way when
# it drains and when it has heard nothing for too long.
_CLEAN = {"idle", "stopped", CROWDED}


@dataclass(slots=True, eq=False)
class Peer:
    """One incarnation of a prefill worker, whether or not a session with it is up.

    It has one session, also if FETCHes name it by several addresses. The sender would keep the newest session
    of this receiver alone. The older one would open again to repeat its ACKs, and end the newer one."""

    key: PeerKey
    address: str  # the one that was named last; the next session opens there
    acks: Acks
    session: Session | None = None  # up, or coming up
    up: bool = False
    retry_at: float = 0.0
    backoff: float = _BACKOFF[0]
    refused: int = 0  # attempts that could not start since a session was up
    used: float = 0.0  # when it last had a transfer
    bad: set[int] = field(default_factory=set)  # pairs of cards that carried nothing, as in `Session.ways`
    bad_at: float = 0.0  # when that was last seen
    narrow: bool = False  # a session came up, and then no frame came: the next has small packets
    mtu_told: bool = False


class Peers:
    """All peers that have a transfer, an ACK to send, or a session."""

    def __init__(self, config: TransferConfig, connect: Connect) -> None:
        self._config = config
        self._open_session = connect
        self._peers: dict[PeerKey, Peer] = {}
        self.by_session: dict[int, Peer] = {}  # up, or coming up

    def __len__(self) -> int:
        return len(self._peers)

    # ------------------------------------------------------------ what the decode side wants

    def want(self, key: PeerKey, address: str, now: float) -> None:
        """There is a transfer of this peer: connect, unless a session is there or it is too early."""
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(key, address, Acks(self._config.deadlines))
        peer.address, peer.used = address, now
        self._connect(peer, now)

    def acknowledge(self, key: PeerKey, transfer_id: bytes, now: float) -> None:
        """Sends an ACK in the session that is up, or in the next one."""
        peer = self._peers[key]
        peer.acks.injected(transfer_id, now)
        self._say_acks(peer, now)

    def tick(self, now: float, has_transfers: Callable[[PeerKey], bool]) -> None:
        """Connect again, close idle sessions, and forget peers that nothing needs."""
        for peer in list(self._peers.values()):
            transfers = has_transfers(peer.key)
            if transfers:
                peer.used = now
            peer.acks.expire(now)
            if peer.narrow and not peer.mtu_told and peer.session is not None and peer.session.kv_moved:
                peer.mtu_told = True
                log.error(
                    "KV from %s comes in small packets only, which are slow: packets of full size are lost "
                    "on the way. Use the same MTU on both hosts and between them.", printable(peer.address),
                )  # fmt: skip
            wanted = transfers or bool(peer.acks.waiting)
            if peer.session is None and wanted:
                self._connect(peer, now)
            elif peer.session is None:
                del self._peers[peer.key]
            elif not wanted and now >= (
                (peer.bad_at if peer.bad else peer.used) + self._config.deadlines.idle_close
            ):
                peer.bad = set()  # the next lanes try all cards
                peer.session.end("idle", "no transfer for a while")

    # ------------------------------------------------------------ what the connector reports

    def session_up(self, session: Session, now: float) -> Peer:
        """ACKs come first: what was sent over the session before may be lost."""
        peer = self.by_session[session.number]
        peer.up = True
        peer.backoff = _BACKOFF[0]
        if peer.refused:
            log.warning("connected to %s after %d failures", printable(peer.address), peer.refused)
            peer.refused = 0
        peer.bad -= {*session.ways}
        if bad := peer.bad | session.bad:  # and the others work, so the peer is not lost
            text = "no KV comes from %s over pairs of cards %s"
            log.warning(text, printable(peer.address), sorted(bad))
        self._say_acks(peer, now)
        return peer

    def session_down(self, session: Session, reason: str, now: float) -> Peer:
        peer = self.by_session.pop(session.number)
        peer.session = None
        if session.bad:
            tried_again = not peer.bad.isdisjoint(session.ways)  # since all were bad
            peer.bad, peer.bad_at = session.bad if tried_again else peer.bad | session.bad, now
        if peer.up:
            peer.up = False
            # Perhaps packets of full size are lost on the way, and those of the handshake are not.
            peer.narrow |= reason == "dead" and not session.kv_moved
            if reason in _CLEAN:
                peer.acks.clear()
            else:
                peer.acks.lost(now)
            peer.retry_at = now  # streams wait: the first attempt is due at once
        else:
            if reason not in MENDABLE:
                peer.acks.clear()
            self._back_off(peer, now)
        return peer

    # ------------------------------------------------------------ inside

    def _say_acks(self, peer: Peer, now: float) -> None:
        if peer.session is not None and peer.up:
            for transfer_id in peer.acks.say(now):
                peer.session.send(Ack(), transfer_id)

    def _connect(self, peer: Peer, now: float) -> None:
        if peer.session is not None or now < peer.retry_at:
            return
        wanted = self._config.lanes + bool(self._config.movers)  # lane 0 carries no KV then
        lanes = max(1, min(wanted, MAX_LANES, self._config.max_lanes // len(self._peers)))
        try:
            addresses = split_addresses(peer.address)
            peer.session = self._open_session(addresses, peer.key, lanes, peer.bad, narrow=peer.narrow)
        except (OSError, ValueError) as e:
            if not peer.refused:
                log.warning("cannot connect to %s: %s", printable(peer.address), e)
            peer.refused += 1
            self._back_off(peer, now)
        else:
            self.by_session[peer.session.number] = peer

    def _back_off(self, peer: Peer, now: float) -> None:
        peer.retry_at = now + peer.backoff
        peer.backoff = min(2 * peer.backoff, _BACKOFF[1])
