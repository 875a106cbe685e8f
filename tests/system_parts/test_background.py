"""What a process that gives way may and may not do."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from baton.system.background import LOWER, at_low_priority, killed_first, raise_priority


def priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_call_and_its_threads_have_a_lower_priority_and_the_caller_keeps_its_own() -> None:
    before, found = priority(), list[int]()

    def call() -> int:
        thread = threading.Thread(target=lambda: found.append(priority()))
        thread.start()
        thread.join()
        return priority()

    assert at_low_priority(call) == found[0] == min(19, before + LOWER)
    assert priority() == before


def test_an_error_of_the_call_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        at_low_priority(lambda: 1 // 0)


def test_a_process_is_killed_first_for_a_while(tmp_path: Path) -> None:
    score = tmp_path / "self" / "oom_score_adj"
    for process in ("7", "self"):
        (tmp_path / process).mkdir()
    (tmp_path / "7" / "oom_score_adj").write_text("-100\n")
    killed_first(7, first=True, proc=tmp_path)
    assert int(score.read_text()) == 400
    killed_first(7, first=False, proc=tmp_path)
    assert int(score.read_text()) == -100
    killed_first(8, first=True, proc=tmp_path)
    assert int(score.read_text()) == -100, "that process has ended"


def test_a_child_that_is_needed_may_get_the_priority_of_its_parent() -> None:
    code = "import os; os.nice(3); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        lowered = os.getpriority(os.PRIO_PROCESS, child.pid)
        raise_priority(child.pid)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) in (priority(), lowered), "few users may raise it"
        child.kill()
    raise_priority(child.pid)


def test_a_thread_that_has_ended_keeps_no_other_thread_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, raised, set_priority = subprocess.Popen([sys.executable, "-c", ""]), list[int](), os.setpriority
    ended.wait()

    def record(which: int, thread: int, value: int) -> None:
        with contextlib.suppress(PermissionError):
            set_priority(which, thread, value)
        raised.append(thread)

    monkeypatch.setattr(os, "listdir", lambda _: [str(ended.pid), str(threading.get_native_id())])
    monkeypatch.setattr(os, "setpriority", record)
    raise_priority(os.getpid())
    assert raised == [threading.get_native_id()]
