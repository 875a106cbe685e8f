"""One engine process of a worker with its transfer process, as calls see them.

    begins ─▶ hears, and answers questions ─▶ ends: what waits for an answer learns why

An engine process that has ended hears nothing and answers nothing. So no call asks whether it is replaced: a
call waits for the next one (`Backend.serving`), or is answered from the last reports.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from baton.kv_transfer import TransferStats
from baton.worker import messages
from baton.worker.messages import EngineStatus, ToEngine
from baton.worker.processes import TreeError, dismiss
from baton.worker.service_process.counts import added
from baton.worker.service_process.tree import WorkerTree

STILL_CHECK = 0.002
"""Seconds between two questions whether a step is over."""

LONG_LIFE = 60.0
"""Seconds after which the end of an engine process has other causes than its start."""

Reports = tuple[EngineStatus, TransferStats]


class LiveEngine:
    """An engine process that is ready.

    Attributes:
        answers: that a call waits for, by question.
        has_computed: it has computed a token.
        has_ended: it hears and answers nothing.
        tree: the processes.
    """

    def __init__(self, tree: WorkerTree, before: Reports | None) -> None:
        """`before`: the last reports of processes that this one follows. Their counts go on."""
        self._began_at = time.monotonic()
        self.has_computed = self.has_ended = False
        self.tree = tree
        self._before = before
        self._why = ""
        self._questions = count()
        self.answers: dict[int, asyncio.Future[Any]] = {}

    @property
    def is_proven(self) -> bool:
        """Whether another one is likely to live longer than it did, if it has ended now."""
        return self.has_computed or time.monotonic() - self._began_at > LONG_LIFE

    async def send(self, message: ToEngine) -> None:
        """Sends, in order. Waits while the engine process reads too slowly."""
        if not self.has_ended:
            await self.tree.engine_link.send(message)

    async def ask(self, question: Callable[[int], ToEngine]) -> Any:
        """Returns the answer to a message with this number. Raises TreeError if the process ends before."""
        if self.has_ended:
            raise TreeError(self._why)
        number = next(self._questions)
        answer = self.answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self.send(question(number))
            return await answer
        finally:
            del self.answers[number]
            dismiss(answer)

    def answered(self, answer: messages.Answer) -> None:
        waiting = self.answers.get(answer.question)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def status(self) -> EngineStatus:
        """Of this process alone. Raises TreeError."""
        return await self.ask(messages.AskStatus)

    async def reports(self) -> Reports:
        """What both processes report, with the counts of those before. Raises TreeError."""
        engine, transfer = await asyncio.gather(self.status(), self.tree.transfer.stats())
        if self.has_ended:  # it has answered before
            raise TreeError(self._why)
        if self._before is None:
            return engine, transfer
        return added(self._before[0], engine), added(self._before[1], transfer)

    async def freeze(self, *, frozen: bool, abort: str = "") -> messages.Paused:
        """It launches no step, or goes on. With `abort` it ends all attempts for that reason. Raises
        TreeError."""
        return await self.ask(lambda number: messages.Pause(number, frozen, abort))

    async def stop_between_steps(self) -> None:
        """Returns when it computes nothing, and launches no step any more. Raises TreeError."""
        while True:
            paused = await self.freeze(frozen=True)
            if not paused.computing:
                return
            await asyncio.sleep(STILL_CHECK)

    def end(self, why: str) -> None:
        """The process has ended, or shall end."""
        self.has_ended, self._why = True, f"the engine process has ended: {why}"
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(TreeError(self._why))
