"""What a process does with those below it."""

from __future__ import annotations

import subprocess

import psutil
import pytest

from baton.cluster.supervision import processes


def test_a_child_that_another_thread_has_reaped_is_no_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there when the children were listed."""
    ended = subprocess.Popen(["true"])
    child = psutil.Process(ended.pid)
    ended.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda self: [child])
    processes._reap_orphans()
