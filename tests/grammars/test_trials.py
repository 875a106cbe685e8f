"""Grammars are compiled within limits: no text ends the process that asks, or keeps it waiting."""

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from baton.grammars.compiler import TOO_MUCH
from baton.grammars.trials import ENDED, Trials
from baton.processes.limits import raise_descriptor_limit
from baton.processes.sandbox import one_shot
from baton.system.turns import Turns
from tests.within import WITHIN

LIMITED = """
import sys
from baton.grammars import trials
trials._CPU_SECONDS = 0.06
trials.main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""


CROWDED = """
import os, sys
from baton.grammars import trials
fork, calls = os.fork, 0
def rarely():
    global calls
    calls += 1
    if calls % 3:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = rarely
trials.main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""


STUCK = """
import os, sys, time
from baton.grammars import trials
def stuck(tokenizer, kind, text):
    open(text, "x").close()
    while os.path.exists(text):
        time.sleep(0.001)
trials.error_of = stuck
trials.main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""


class Limited(Trials):
    """Texts of tests need 15 times more or less than this CPU time."""

    def arguments(self) -> list[str]:
        return ["-c", LIMITED, "300", "test"]


def chain(rules: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(rules)) + f'\nr{rules}: "x"'


@pytest.mark.all
def test_what_exceeds_a_limit_is_refused_and_the_next_text_is_tried() -> None:
    trials = Limited(300)
    array = {"type": "array", "items": {"type": "integer", "multipleOf": 99_991}}
    tried = [
        trials.try_(kind, text)
        for kind, text in (
            ("grammar", chain(3000)),  # the stack
            ("regex", "((a{1000}){1000}){1000}"),  # memory
            ("json_schema", json.dumps(array)),  # time or memory
            ("json_schema", "[" * 100_000),
            ("json_schema", '{"type": "strin"}'),
            ("grammar", "start: <[300]>"),
            ("grammar", 'start: <[299]> "a"'),
        )
    ]
    errors = [each.error for each in tried]
    assert errors[:3] == [TOO_MUCH] * 3
    assert [bool(error) for error in errors[3:]] == [True] * 3 + [False]
    process = trials._helper
    assert process is not None
    process.kill()
    assert trials.try_("regex", "a").error in ("", ENDED)
    assert trials.try_("regex", "a").error == ""
    trials.close()


class Noted(Trials):
    """Notes the processes that fork its children."""

    def __init__(self) -> None:
        super().__init__(300)
        self.started: list[subprocess.Popen[bytes]] = []

    def _start(self) -> subprocess.Popen[bytes]:
        self.started.append(super()._start())
        return self.started[-1]


class Stuck(Noted):
    """A text is a file that its child makes. The child goes on while the file is there."""

    def arguments(self) -> list[str]:
        return ["-c", STUCK, "300", "test"]


def test_a_killed_process_that_forks_is_noticed_while_its_child_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(one_shot, "HANG_SECONDS", 2 * WITHIN)
    trials, begun = Stuck(), tmp_path / "begun"
    with ThreadPoolExecutor(1) as thread:
        tried = thread.submit(trials.try_, "regex", str(begun))
        while not begun.exists():
            time.sleep(0.001)
        trials.started[-1].kill()
        try:
            assert tried.result(WITHIN) == (ENDED, 0, 0.0)  # it costs the tenant nothing
        finally:
            begun.unlink()


class Crowded(Noted):
    """On a machine that has no process left, twice at its start and twice for each text."""

    left = 2

    def _start(self) -> subprocess.Popen[bytes]:
        if self.left:
            self.left -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return super()._start()

    def arguments(self) -> list[str]:
        return ["-c", CROWDED, "300", "test"]


def test_a_text_waits_while_the_machine_has_no_process_left() -> None:
    trials = Crowded()
    assert trials.try_("regex", "a").error == ""
    assert trials.try_("regex", "b").error == ""
    assert len(trials.started) == 1
    trials.close()


def test_tenants_take_turns_by_the_time_of_their_grammars() -> None:
    turns, served = Turns(), []
    for tenant, count in ((b"dear", 9), (b"cheap", 3)):
        for i in range(count):
            turns.add(tenant, lambda tenant=tenant, i=i: served.append((tenant, i)))
    for _ in range(12):
        turns.serve()
        turns.charge(served[-1][0], 0.5 if served[-1][0] == b"dear" else 0.001)
    assert served[:4] == [(b"dear", 0), (b"cheap", 0), (b"cheap", 1), (b"cheap", 2)]


def test_a_process_with_many_descriptors_tries_texts_too() -> None:
    """select() takes none above 1,023."""
    raise_descriptor_limit()
    trials = Trials(300)
    with ExitStack() as opened:
        for _ in range(1024):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert trials.try_("regex", "a+").error == ""
    trials.close()
