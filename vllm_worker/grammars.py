"""Tries the grammars of requests before vLLM compiles them: no grammar may end vLLM's processes. A text in a
grammar has no special token, as in Baton's engine."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from baton.grammars.compiler import for_texts
from baton.grammars.trials import Trials
from baton.system.turns import Turns

_KINDS = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
"""By the field of vLLM's StructuredOutputsParams."""


class Gate:
    """Owns a thread and a process. Tenants take turns by the CPU time of their grammars.

    Wait-for graph: a request waits for its tenant's turn. The thread waits only for the process, which
    replies or is killed.
    """

    def __init__(self, vocab_size: int) -> None:
        self._trials = Trials(vocab_size)
        self._turns = Turns()
        self._thread = ThreadPoolExecutor(1, "grammars")

    async def check(self, tenant: bytes, structure: Mapping[str, str]) -> None:
        """`structure`: the fields of StructuredOutputsParams. Raises ValueError."""
        [(field, text)] = structure.items()
        error: Future[str] = Future()

        def work() -> None:
            if error.set_running_or_notify_cancel():
                try:
                    tried = self._trials.try_(_KINDS[field], text)
                except BaseException as failure:  # noqa: BLE001  (`check` raises it)
                    error.set_exception(failure)
                    return
                self._turns.charge(tenant, tried.seconds)
                error.set_result(tried.error)

        self._turns.add(tenant, work)
        self._thread.submit(self._turns.serve)
        if message := await asyncio.wrap_future(error):
            raise ValueError(f"structured output: {message}")

    def close(self) -> None:
        self._trials.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def find_no_special_tokens_in_texts() -> None:
    """In vLLM's process with the scheduler, before its first grammar. May be repeated."""
    from llguidance import LLTokenizer, hf

    def changed(text: str, **options: Any) -> LLTokenizer:
        return LLTokenizer(for_texts(text), **options)

    vars(hf)["LLTokenizer"] = changed
