"""The engine process of a prefill worker, as far as its prefill role: the engine, sender, receiver and tables
are real, and the test plays the service process and the transfer process."""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from baton.engine import EngineConfig, StepResult
from baton.kv_transfer import Arena, ArenaEnd, Heartbeat, TraceWriter, channel_pair
from baton.kv_transfer.channel import Channel
from baton.kv_transfer.endpoint import Transport
from baton.kv_transfer.protocol import local_messages as local
from baton.kv_transfer.slices import Slice
from baton.kv_transfer.wait import wait
from baton.prefill_worker.role import PrefillRole, SenderSink
from baton.rpc import worker_pb2 as pb
from baton.worker import messages
from baton.worker.engine_process.attempt import Attempt, AttemptTable
from baton.worker.engine_process.context import Context
from baton.worker.engine_process.engine_attempt import EngineAttempt
from baton.worker.engine_process.engine_protocol import Live
from baton.worker.engine_process.loop import may_move, tell
from baton.worker.engine_process.paged_kv import kv_layout
from baton.worker.engine_process.prefix_fetches import PrefixFetches, Workers
from baton.worker.engine_process.roles import Roles
from baton.worker.engine_process.start import EngineProcessConfig
from baton.worker.ipc import ServiceLink
from baton.worker.messages import Origin
from tests.cluster_helpers import tiny_model
from tests.router_messages import cancel, failures_told, submit_prefill, tokens_told, work
from tests.stand_in import stand_in
from tests.within import WITHIN

M = TypeVar("M")
SLOTS, SLOT_BYTES = 16, 64 << 10
STREAM = 7
FINISH = ("", "stop", "length")
CREDIT = 1 << 20  # frames, of all transfers together
TURN = 0.001
"""Seconds of a turn that hears nothing: no descriptor says that the sender's thread has nothing to do."""


class Worker:
    """
    Attributes:
        outgoing, incoming: the transfer process's ends of the channels of the sender and of the receiver.
    """

    def __init__(self, model: Path, incarnation: int = 1, **options: Any) -> None:
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "float32",
            "device": "cpu",
            "num_blocks": 40,
            "block_size": 4,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 8,
            "enable_prefix_caching": False,
        }
        config = EngineConfig(str(model), **(settings | options))
        self.incarnation = incarnation
        self._sent: list[messages.FromEngine] = []
        self.answers: list[messages.FromEngine] = []  # and what the caches report
        self.arena, self.landing = (Arena.create(SLOTS, SLOT_BYTES) for _ in range(2))
        self._landed = itertools.cycle(range(SLOTS))
        (sending, outgoing), (receiving, incoming) = channel_pair(), channel_pair()
        self.outgoing = Channel(outgoing, local.FromSender)
        self.incoming = Channel(incoming, local.FromReceiver)
        trace, attempts = TraceWriter(None, ""), AttemptTable[EngineAttempt](self._sent.append)
        self._inbox: list[Any] = []
        self._slices: list[tuple[Slice, bytes]] = []
        self.context = Context(
            stand_in(
                EngineProcessConfig,
                engine=config,
                files=None,
                incarnation=incarnation,
                kept_files=(),
                standby=False,
            ),
            stand_in(ServiceLink, send=self.answers.append),
            Heartbeat.create(),
            Transport(ArenaEnd(sending, self.arena), ArenaEnd(receiving, self.landing), trace),
            trace,
            attempts,
        )
        sink = SenderSink(trace)
        self.engine = self.context.start_engine(sink.prefill_started, sink.layer_done)
        self.shared = self.context.resources(self.engine, lambda: sink.layers_ready)
        self.receiver = self.shared.receiver
        self.fetches = PrefixFetches(self.engine, attempts.counts, trace)
        links = self.context.links
        self.fetches.sources.append(Workers(self.receiver, incarnation, links))
        self.role = PrefillRole(self.shared, sink.attach(self.shared), self.fetches)
        self.roles = Roles(self.context, self.shared, [self.role])

    # Of the service process

    def prefill(
        self,
        prefill_id: bytes,
        tokens: int,
        *,
        stream: int = STREAM,
        max_tokens: int = 8,
        handover: bool = True,
        **how: Any,
    ) -> None:
        asked = work(prefill_id, tokens, max_tokens)
        self.roles.handle(submit_prefill(stream, asked, handover, **how))

    def has(self, prefill_id: bytes) -> bool:
        return self.context.attempts.find(prefill_id) is not None

    def blocks_of(self, prefill_id: bytes) -> list[int]:
        """Of a prefill that has not ended on this worker."""
        attempt = self.context.attempts.find(prefill_id)
        return [] if attempt is None or attempt.live is None else list(attempt.live.blocks)

    def take(self, prefill_id: bytes, decode: Attempt) -> Live | bool | None:
        """A decode here asks for the blocks of a prefill."""
        prefill = self.context.attempts.find(prefill_id)
        return None if prefill is None else prefill.take(decode)

    def let_go(self, prefill_id: bytes, decode: Attempt, *, resumed: bool) -> None:
        prefill = self.context.attempts.find(prefill_id)
        assert prefill is not None
        prefill.let_go(decode, resumed=resumed)

    def cancel(self, prefill_id: bytes) -> None:
        self.roles.handle(cancel(STREAM, prefill_id))

    @property
    def sent(self) -> list[messages.FromEngine]:
        """To the service process."""
        self.context.attempts.flush()
        return self._sent

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.sent if isinstance(message, kind)]

    @property
    def tokens(self) -> list[tuple[bytes, int, str]]:
        said = tokens_told(self.sent)
        return [(token.attempt_id, token.output_index, FINISH[token.finish_reason]) for token in said]

    @property
    def failures(self) -> list[pb.FailureCode]:
        return [failure.code for failure in failures_told(self.sent)]

    # Of the loop

    def step(self) -> StepResult:
        result = self.engine.loop.step()
        tell(self.context, result)
        self.context.attempts.flush()
        return result

    def compute(self) -> None:
        """Steps until there is nothing to compute."""
        while self.engine.loop.has_work:
            self.step()

    def move(self) -> None:
        """Waits for a report of the sender."""
        assert wait([self.shared.sender.fileno()], 10.0), "the sender reports nothing"
        self.roles.move_kv(math.inf)

    def move_if_due(self) -> None:
        if wait(self.roles.fds, 0.0) or may_move(self.context.attempts, self.roles):
            self.roles.move_kv(math.inf)

    def take_in(self, *kinds: type) -> None:
        """Handles events of these kinds from the receiver, as the decode role does."""
        left = [*kinds]
        while left:
            within = self.receiver.poll_within
            assert wait([self.receiver.fileno()], within or 10.0) or within, f"no {left}"
            for event in self.receiver.poll():
                assert isinstance(event, left.pop(0))
                event.owner.handle(event)

    @property
    def idle(self) -> bool:
        return self.roles.idle

    # Of the transfer process

    def told(self, kind: type[M]) -> M:
        """The next message of this kind from the sender. Those of other kinds are dropped."""
        while True:
            while self._inbox:
                if isinstance(message := self._inbox.pop(0), kind):
                    return message
            assert self.hear(10.0), f"no {kind.__name__}"

    def slices(self, count: int) -> list[tuple[Slice, bytes]]:
        """That many slices that the sender has handed over."""
        while len(self._slices) < count:
            assert self.hear(10.0), f"{len(self._slices)} slices"
        return [self._slices.pop(0) for _ in range(count)]

    def slices_of(self, size: int) -> list[tuple[Slice, bytes]]:
        """Slices of so many bytes that the sender has handed over."""
        found: list[tuple[Slice, bytes]] = []
        while (left := size - sum(s.size for s, _ in found)) > 0:
            found += self.slices(1)
        assert not left
        return found

    def hear(self, within: float) -> bool:
        """Takes what the sender says, and gives it back its slots."""
        if not wait([self.outgoing.fileno()], within):
            return False
        for message in self.outgoing.receive():
            if isinstance(message, local.SlicesOut):
                for s in message.slices:
                    self._slices.append((s, bytes(self.arena.slot(s.slot)[: s.size])))
                    self.outgoing.send(local.SlotFree(s.slot, unsent=False))
            else:
                self._inbox.append(message)
        return True

    def forget(self) -> None:
        """Drops what the worker has said so far."""
        while self.hear(0.0):
            pass
        for said in (self._sent, self._inbox, self._slices):
            said.clear()

    def asks(self) -> local.FetchIn:
        """The next fetch of the receiver."""
        while True:
            assert wait([self.incoming.fileno()], 10.0), "no FetchIn"
            for message in self.incoming.receive():
                if isinstance(message, local.FetchIn):
                    return message

    def arrive(self, slices: Sequence[tuple[Slice, bytes]]) -> None:
        """These slices of another worker have come."""
        for s, data in slices:
            s.slot, s.dtype = next(self._landed), "float32"
            self.landing.slot(s.slot)[: len(data)] = data
            self.incoming.send(local.Arrived(s))

    def complete(self, commit: local.CommitOut) -> None:
        """So has its COMMIT."""
        came = local.Arrival(commit.size, 0, commit.frames, 0.5, 1.0, 2.0, 2.5)
        self.incoming.send(local.Complete(commit.transfer_id, commit.first_token, came))

    def settle(self) -> None:
        """Goes on, as the loop does, until nothing is in use."""
        until = time.monotonic() + WITHIN
        while not self.idle:
            assert time.monotonic() < until, f"left behind: {[*self.context.attempts]}"
            if self.engine.loop.has_work:
                self.step()
            self.hear(TURN)
            self.move_if_due()
            for event in self.receiver.poll():
                event.owner.handle(event)
        self.engine.assert_whole()

    def released(self, prefill_id: bytes, reason: str) -> None:
        self.outgoing.send(local.ReleasedOut(prefill_id, reason))
        self.move()

    def fetched(
        self,
        prefill_id: bytes,
        transfer_id: bytes,
        *ranges: tuple[int, int],
        next_positions: tuple[int, ...] = (),
    ) -> None:
        """Another worker asks for these positions, to go on from `next_positions`."""
        self.outgoing.send(
            local.StartOut(
                prefill_id,
                transfer_id,
                1,
                SLOT_BYTES,
                SLOTS,
                kv_layout(self.engine).dtypes,
                ranges,
                next_positions,
            ),
            local.Granted(1, CREDIT, False),
        )

    def close(self) -> None:
        self.shared.sender.shutdown()
        self.receiver.shutdown()
        self.engine.close()
        for channel in (self.outgoing, self.incoming):
            channel.sock.close()


def decode_here(name: bytes) -> Attempt:
    return Attempt(stream=STREAM, origin=Origin(name, "r", "", 0.0), tokens=1)


@contextmanager
def workers(model: Path, count: int = 1, **options: Any) -> Iterator[Sequence[Worker]]:
    """With incarnations from 1 on. All of them must be idle at the end."""
    made = [Worker(model, number + 1, **options) for number in range(count)]
    try:
        yield made
        for worker in made:
            worker.settle()
    finally:
        for worker in made:
            worker.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("prefill_worker"))


@pytest.fixture
def worker(model: Path) -> Iterator[Worker]:
    with workers(model) as [made]:
        yield made
