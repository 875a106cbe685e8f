"""A rank dies or hangs at a state of a handover, and the request goes on as a router would arrange it."""

import asyncio
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import grpc.aio
import psutil

from baton.rpc import worker_pb2 as pb
from tests.cluster_helpers import (
    Pair,
    WorkerProcess,
    WorkerStream,
    assert_whole,
    attached,
    paired,
    request,
    sampling,
)
from tests.within import WITHIN, within

Side = Literal["prefill", "decode"]
State = Literal["queued", "streaming", "committed", "decoding"]


@dataclass(frozen=True)
class Failure:
    """What happens to a rank.

    Attributes:
        state: of the handover at that moment. committed: decode has not copied all KV.
    """

    side: Side
    rank: int
    state: State
    how: signal.Signals

    @property
    def kind(self) -> str:
        return f"rank {self.rank}" if self.rank else "engine"


def prompt_of(length: int) -> list[int]:
    return [(37 * i) % 500 + 3 for i in range(length)]


def assert_nothing_left(worker: WorkerProcess, others: list[psutil.Process]) -> None:
    """Neither a process nor a file. Shared memory has no name, so it is gone with the processes."""
    _, alive = psutil.wait_procs(others, timeout=WITHIN)
    assert alive == []
    assert list(worker.run_dir.iterdir()) == []


async def tokens_despite(
    failure: Failure, prefill: WorkerProcess, decode: WorkerProcess, spare: WorkerProcess, length: int
) -> list[int]:
    """Hands over a prompt, and lets a rank fail meanwhile. Returns the tokens of the request.

    Asserts that only the worker of the rank ends, that nothing of it is left, and that the pools of the other
    two workers are whole.
    """
    victim, survivor = (prefill, decode) if failure.side == "prefill" else (decode, prefill)
    others = victim.tree()[1:]
    rank = victim.child(failure.kind)  # before anything moves: this takes a while
    held = rank if failure.side == "decode" else decode.child("engine")
    asked = request(prompt_of(length), sampling(ignore_eos=True))
    async with paired(prefill, decode) as pair, attached(spare) as third:
        if failure.state == "queued":
            ahead = request(prompt_of(3800), sampling(max_tokens=1))
            await pair.prefill.submit_prefill(ahead, handover=False)
        if failure.state == "committed":  # decode must not have the KV before its rank is held
            await pair.prefill.stub.SetPause(pb.PauseRequest(pause=pb.PAUSE_STEPS, seconds=600))
        prefill_id = await pair.prefill.submit_prefill(asked, handover=True, report_start=True)
        decode_id = await pair.decode.reserve(asked, pair.source(prefill_id))
        emitted = await _strike(failure, pair, rank, held, (prefill_id, decode_id))
        if failure.side == "decode":
            if failure.how == signal.SIGKILL:
                await asyncio.to_thread(victim.popen.wait, WITHIN)
                await within(pair.decode.ended.wait())
            emitted += _rest(pair.decode, decode_id)
        if failure.side == "prefill":
            source = pb.PrefillSource(
                kv_address=spare.ready["kv_address"], incarnation=spare.ready["incarnation"], attempt=1
            )
            tokens = await _go_on(asked, pair.decode, decode_id, third, source)
        elif emitted:
            asked.output_ids[:] = emitted
            tokens = await _collect(third, await third.reserve(asked))
        else:
            source = pair.source(prefill_id)
            source.attempt = 1
            again = await third.reserve(asked, source)
            message = (await third.next(again)).message
            if isinstance(message, pb.TokenEvent):
                tokens = [message.token_id, *await _collect(third, again, ended=bool(message.finish_reason))]
            else:  # the rank stopped late, when decode had all KV: so there is a first token
                assert isinstance(message, pb.AttemptFailed)
                assert message.code == pb.FAILURE_CODE_KV_FAILED, message
                emitted = [(await pair.decode.token(decode_id))[0].token_id]
                emitted += _rest(pair.decode, decode_id)
                asked.output_ids[:] = emitted
                tokens = await _collect(third, await third.reserve(asked))
        if failure.how == signal.SIGSTOP:  # an idle worker notices a rank that hangs with its next step
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                stream = pair.prefill if failure.side == "prefill" else pair.decode
                await stream.submit_prefill(request([5], sampling(max_tokens=1)), handover=False)
        assert await asyncio.to_thread(victim.popen.wait, WITHIN) == 1
        await assert_whole(survivor, spare)
    assert_nothing_left(victim, others)
    return emitted + tokens


async def _strike(
    failure: Failure, pair: Pair, rank: psutil.Process, held: psutil.Process, ids: tuple[bytes, bytes]
) -> list[int]:
    """Waits for the state, and signals the rank. Returns the tokens that decode has sent before.

    `held`: a rank of decode that is stopped, so that the state stays "committed".
    """
    prefill_id, decode_id = ids
    emitted = []
    match failure.state:
        case "streaming":
            while prefill_id not in pair.prefill.started:  # a message brings the status, too
                await pair.prefill.stub.GetStatus(pb.StatusRequest())
        case "committed":
            held.suspend()
            await pair.prefill.stub.SetPause(pb.PauseRequest(pause=pb.PAUSE_NONE))
            await pair.prefill.token(prefill_id)
        case "decoding":
            emitted = [(await pair.decode.token(decode_id))[0].token_id for _ in range(3)]
    rank.send_signal(failure.how)
    if failure.state == "committed" and failure.side == "prefill":
        held.resume()
    return emitted


def _rest(stream: WorkerStream, decode_id: bytes) -> list[int]:
    """The tokens that have come and were not read."""
    events = stream.events[decode_id]
    messages = [events.get_nowait().message for _ in range(events.qsize())]
    return [message.token_id for message in messages if isinstance(message, pb.TokenEvent)]


async def _go_on(
    asked: pb.Request, decode: WorkerStream, decode_id: bytes, third: WorkerStream, source: pb.PrefillSource
) -> list[int]:
    """The tokens of a decode after its prefill worker failed, with the KV of a third worker if needed."""
    message = (await decode.next(decode_id)).message
    if isinstance(message, pb.TokenEvent):
        return [message.token_id, *await _collect(decode, decode_id, ended=bool(message.finish_reason))]
    assert isinstance(message, pb.AttemptFailed)
    assert message.code == pb.FAILURE_CODE_KV_FAILED
    source.prefill_id = await third.submit_prefill(asked, handover=True)
    await decode.send(retarget=pb.Retarget(decode_id=decode_id, source=source))
    return await _collect(decode, decode_id)


async def _collect(stream: WorkerStream, decode_id: bytes, *, ended: bool = False) -> list[int]:
    return [] if ended else [token.token_id for token, _ in await stream.tokens(decode_id)]
