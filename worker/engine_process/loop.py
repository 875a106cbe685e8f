"""The loop of the engine process over one engine and two roles, until the service sends Stop.

    wait for work, messages or KV → take messages → move KV → step the engine → send tokens
    → copy blocks to the host, to the shared store and back → tick

KV is not moved while all attempts decode and nothing came for it.

The loop sleeps while the engine has nothing to do, also while a GPU computes. Messages and KV that arrive
during a step are handled before the next step.

The allocator keeps the large buffers and the grammars that steps have freed, for the next steps. When the
engine has been idle for `IDLE_TICK`, it gives them back.

The heartbeat shows that this process is alive. The engine ticks once per layer, the loop once per iteration,
and the start of the process once per stage. When idle, an iteration lasts at most `IDLE_TICK` seconds. The
loop does not tick while the device computes a step, because the device may hang. The service process reads
the counter, and so does the transfer process, which tells its peers.
"""

import gc
import math
import os
import time
from collections.abc import Sequence
from typing import Any

from baton.engine import StepResult
from baton.engine.step_loop import StepLoop
from baton.kv_transfer import TraceWriter
from baton.kv_transfer.wait import spins, wait
from baton.rpc import worker_pb2 as pb
from baton.system.memory import trim
from baton.worker import messages
from baton.worker.engine_process.attempt import AttemptTable
from baton.worker.engine_process.context import Context
from baton.worker.engine_process.offload import POLL, OffloadPump
from baton.worker.engine_process.roles import Roles
from baton.worker.engine_process.shared_store import StoreSource
from baton.worker.messages import CacheEvents

IDLE_TICK = 0.5  # seconds
_PREEMPTED = "preempted: other requests needed its blocks"


class FreedMemory:
    """What the allocator keeps. It takes milliseconds to give it back, so that is done after work only."""

    def __init__(self) -> None:
        self._worked_at = 0.0  # infinite: it was given back since

    def turn(self, *, idle: bool, now: float) -> None:
        if not idle:
            self._worked_at = now
        elif now - self._worked_at > IDLE_TICK:
            self._worked_at = math.inf
            gc.collect()  # garbage may hold grammars
            trim()


def loop(roles: Roles, context: Context, pumps: Sequence[OffloadPump | StoreSource]) -> None:
    link, steps = context.link, roles.engine.loop
    fds = [link.fileno(), steps.landings_fd, *roles.fds]
    fds += [] if context.store is None else [context.store.store.fileno()]
    freed = FreedMemory()
    while True:
        idle, now = not steps.has_work, time.monotonic()
        freed.turn(idle=idle, now=now)
        seconds = seconds_to_wait(context.attempts, steps, roles, now)
        if any(pump.copies for pump in pumps):
            seconds = min(seconds, POLL)
        readable = wait(fds, 0.0 if link.has_messages else seconds)
        if steps.landings_fd in readable:
            os.eventfd_read(steps.landings_fd)
        elif idle and seconds and not readable:
            context.trace.flush()
        for message in link.receive_all():
            if not roles.handle(message):
                link.wait_for(messages.Exit)
                roles.shutdown()
                return
        if may_move(context.attempts, roles) or any(fd in readable for fd in roles.fds):
            roles.move_kv(steps.seconds_to_step if steps.under_way else math.inf)
        if steps.has_work and not steps.seconds_to_step:
            tell(context, steps.step())
        context.attempts.flush()
        _report_cache(context)
        for pump in pumps:
            pump.pump()
        if not steps.under_way:
            context.heartbeat.tick()


def may_move(attempts: AttemptTable[Any], roles: Roles) -> bool:
    """Whether `move_kv` may have something to do though no descriptor of the roles is readable. While all
    attempts decode, no step and no deadline changes what they wait for."""
    return roles.polls or attempts.decoding < len(attempts)


def seconds_to_wait(attempts: AttemptTable[Any], steps: StepLoop, roles: Roles, now: float) -> float:
    """How long the loop may sleep until a message comes. 0: it polls."""
    longest = min(IDLE_TICK, roles.poll_within) if may_move(attempts, roles) else IDLE_TICK
    if steps.has_work:
        return min(steps.seconds_to_step, longest)
    if spins(steps.joins_at, now):  # all KV of a request has come, and its COMMIT has not
        return 0.0
    return longest


def tell(context: Context, result: StepResult) -> None:
    """Tells each attempt what a step did to it."""
    if any(output.finish_reason for output in result.outputs):
        _report_cache(context)  # before a last token: the router of the next turn must know the prefix
    if result.seconds and context.trace.enabled:
        _trace_step(context.trace, result)
    attempts = context.attempts
    find = attempts.find
    for logprobs in result.prompt_logprobs:
        attempts.scored(logprobs)
    for prefill_id, chunk in result.prompts.items():
        if (attempt := find(prefill_id)) is not None:
            attempt.computed(chunk.stop)
    for output in result.outputs:
        if (attempt := find(output.id)) is not None:
            attempt.sampled(output)
    for code, lost in (
        (pb.FAILURE_CODE_HANDED_BACK, ((attempt_id, _PREEMPTED) for attempt_id in result.preempted)),
        (pb.FAILURE_CODE_ENGINE, result.failed),
        (pb.FAILURE_CODE_INVALID, result.refused),
    ):
        for attempt_id, message in lost:
            if (attempt := find(attempt_id)) is not None:
                attempt.lost(code, message)
    for attempt in filter(None, map(find, result.ranges_launched)):
        attempt.range_launched()


def _report_cache(context: Context) -> None:
    """Tells the service process what has entered and left the prefix cache."""
    context.read_cache()
    if (changed := context.cached_chunks.take()) is not None:
        context.link.send(changed)
    if context.kv_events is not None and (batch := context.kv_events.take()) is not None:
        context.link.send(CacheEvents(batch))


def _trace_step(trace: TraceWriter, result: StepResult) -> None:
    """Writes what the step computed, and how long each prompt waited that got its first token."""
    now = time.monotonic()
    chunks = [(prompt.hex(), chunk.start, chunk.stop) for prompt, chunk in result.prompts.items()]
    trace.span("step", now - result.seconds, now, decodes=result.decodes, prompts=chunks)
    for output in result.outputs:
        if output.prefill_seconds:
            began = now - output.prefill_seconds
            trace.span("queued", began - output.queue_seconds, began, request=output.id.hex())
            trace.span("prompt", began, now, request=output.id.hex(), cached=output.cached_tokens)
