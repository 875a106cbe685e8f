"""Compiles the grammars of requests, once for each text, and keeps their memory within bounds.

    compile ─▶ queue (tenants take turns) ─▶ tried in a child ─▶ compiled ─▶ copies for requests ─▶ release

`baton.grammars.trials` tries a text before it is compiled here, so no text can end this process. Requests of
a tenant with the same text share a compiled grammar: a copy takes no memory until it is used. In llguidance
one copy computes at a time, so small grammars are compiled again for other threads.

A grammar that no request uses stays for a while, if it is small. The allocator gives back the memory of all
others.
"""

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from llguidance import LLMatcher, LLTokenizer

from baton.engine.api.sampling_params import StructuredOutput
from baton.grammars.compiler import compiled
from baton.grammars.trials import STACK_BYTES, Trials
from baton.processes.sandbox.helper import NICE
from baton.system.memory import trim
from baton.system.turns import Turns

MOST_BYTES = 1 << 30
"""Of the compiled grammars of all requests. Tenants that want more share it equally."""
_SPREAD_BYTES = 16 << 20
"""Of the grammars that one text is compiled to, for several threads."""
_IDLE_BYTES = 16 << 20
"""Of the grammars that no request uses."""
_LEAST_BYTES = 128 << 10
"""Of a grammar, beside what its trial takes: that has no tokens but bytes.
Measured: 114 KiB for a small schema."""
_TRIM_BYTES = 8 << 20
"""After so many bytes were freed, the allocator gives memory back."""

T = TypeVar("T")


class Key(NamedTuple):
    """No tenant learns from the time that a grammar takes what another one has asked for."""

    tenant: bytes
    wanted: StructuredOutput


class Shared:
    """A compiled grammar, and the requests with copies of it."""

    def __init__(
        self, key: Key, matcher: LLMatcher, size: int, release: "Callable[[Shared, LLMatcher | None], None]"
    ) -> None:
        self.key = key
        self.size = size
        self.users = 0
        self._matcher = matcher
        self._release = release

    def copy(self) -> LLMatcher:
        return self._matcher.deep_copy()

    def free(self) -> None:
        """Frees it, though a request that has ended may still be known somewhere."""
        del self._matcher

    def release(self, copy: LLMatcher | None = None) -> None:
        """One request needs it no longer. `copy`: that of the request, which the compiler's thread frees."""
        self._release(self, copy)


class Compiler(Generic[T]):
    """Owns a thread and a process. Its methods are for the engine's thread.

    Wait-for graph: a request waits for its tenant's turn. The thread waits only for the process, which
    replies or is killed.
    """

    def __init__(self, tokenizer: Callable[[], LLTokenizer], vocab_size: int, threads: int) -> None:
        """`tokenizer` is called in the compiler's thread. `threads` use the grammars."""
        self._load = tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._trials = Trials(vocab_size)
        self._threads = threads
        self._turns = Turns()
        self._executor: ThreadPoolExecutor | None = None
        self._compiling: set[Future[T]] = set()
        self._lock = threading.Lock()  # of the next
        self._asked: Counter[Key] = Counter()  # requests that wait for it
        # What follows is for the thread only, which also frees grammars: that takes time.
        self._used: dict[Key, list[Shared]] = {}
        self._idle: OrderedDict[Key, list[Shared]] = OrderedDict()  # the newest last
        self._freed = 0

    def compile(self, tenant: bytes, wanted: StructuredOutput, finish: Callable[[Shared], T]) -> Future[T]:
        """Returns what `finish` makes of the grammar, in the compiler's thread, or the text's ValueError."""
        future: Future[T] = Future()
        key = Key(tenant, wanted)

        def work() -> None:
            shared = None
            if future.set_running_or_notify_cancel():
                try:
                    shared = self._shared(key)
                    future.set_result(finish(shared))
                except BaseException as error:  # noqa: BLE001  (the engine's thread raises it)
                    if shared is not None:
                        self._released(shared, None)
                    future.set_exception(error)
            with self._lock:
                self._asked -= Counter([key])
            self._forget(_IDLE_BYTES)
            self._give_back()

        with self._lock:
            self._asked[key] += 1
        self._compiling.add(future)
        future.add_done_callback(self._compiling.discard)
        self._submit(tenant, work)
        return future

    def wait(self, seconds: float) -> None:
        """Waits until one of the grammars that are being compiled is ready, at most this long."""
        wait(list(self._compiling), seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """Ends the thread and the process. What waits is cancelled."""
        for future in list(self._compiling):
            future.cancel()
        self._trials.close()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    # ------------------------------------------------------------ thread

    def _submit(self, tenant: bytes, work: Callable[[], None]) -> None:
        if self._executor is None:
            before = threading.stack_size(STACK_BYTES)
            self._executor = ThreadPoolExecutor(1, "grammars", _yield_to_others)
            self._executor.submit(lambda: None)  # starts the thread
            threading.stack_size(before)
        self._turns.add(tenant, work)
        self._executor.submit(self._turns.serve)

    def _shared(self, key: Key) -> Shared:
        """Returns a grammar with one user more. Raises ValueError."""
        others = self._used.get(key, [])
        if (shared := self._free(key, others)) is not None:
            return self._use(shared)
        if others:
            size = others[0].size
        else:
            error, size, seconds = self._trials.try_(key.wanted.kind, key.wanted.text)
            self._turns.charge(key.tenant, seconds)
            if error:
                raise ValueError(f"structured output: {error}")
            size += _LEAST_BYTES
        self._make_room(key.tenant, size)
        if self._tokenizer is None:
            self._tokenizer = self._load()
        began = time.thread_time()
        matcher = compiled(self._tokenizer, key.wanted.kind, key.wanted.text)
        self._turns.charge(key.tenant, time.thread_time() - began)
        return self._use(Shared(key, matcher, size, self._release))

    def _release(self, shared: Shared, copy: LLMatcher | None) -> None:
        if self._executor is not None:
            self._executor.submit(self._released, shared, copy)

    def _released(self, shared: Shared, _: LLMatcher | None) -> None:
        shared.users -= 1
        if not shared.users:
            self._used[shared.key].remove(shared)
            if not self._used[shared.key]:
                del self._used[shared.key]
            self._idle.setdefault(shared.key, []).append(shared)
            self._idle.move_to_end(shared.key)
            self._forget(_IDLE_BYTES)
            if self._executor is not None:
                with suppress(RuntimeError):  # it ends
                    self._executor.submit(self._give_back)  # this call still holds what it has freed

    def _give_back(self) -> None:
        if self._freed >= _TRIM_BYTES:
            self._freed = 0
            trim()

    def _free(self, key: Key, used: Sequence[Shared]) -> Shared | None:
        """Returns a grammar for one request more. None: it must be compiled."""
        if key in self._idle:
            shared = self._idle[key].pop()
            if not self._idle[key]:
                del self._idle[key]
            return shared
        size = sum(shared.size for shared in used)
        if used and (len(used) >= self._threads or size + used[0].size > _SPREAD_BYTES):
            return min(used, key=lambda shared: shared.users)
        return None

    def _use(self, shared: Shared) -> Shared:
        if not shared.users:
            self._used.setdefault(shared.key, []).append(shared)
        shared.users += 1
        return shared

    def _forget(self, most: int) -> None:
        """Frees grammars that no request uses or waits for, the oldest ones, until they take at most so many
        bytes."""
        sizes = {key: sum(shared.size for shared in each) for key, each in self._idle.items()}
        left = sum(sizes.values())
        for key, size in sizes.items():
            if left > most and key not in self._asked:
                for shared in self._idle.pop(key):
                    shared.free()
                left -= size
                self._freed += size

    def _make_room(self, tenant: bytes, size: int) -> None:
        """Raises ValueError if the grammars that requests use leave no room for this one."""
        taken: Counter[bytes] = Counter()
        for key, each in self._used.items():
            taken[key.tenant] += sum(shared.size for shared in each)
        self._forget(max(0, MOST_BYTES - taken.total() - size))
        share = MOST_BYTES // len({*taken, tenant})
        if taken.total() + size > MOST_BYTES and taken[tenant] + size > share:
            most = f"the grammars of this client's requests take more than {share >> 20} MiB together"
            raise ValueError(f"structured output: {most}; send fewer of them at once")


def _yield_to_others() -> None:
    """Gives this thread less of a CPU than the thread of the engine has."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
