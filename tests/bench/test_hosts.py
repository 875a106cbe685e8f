"""What a machine lacks to make hosts is said before anything is made."""

import os
import shutil

import pytest

from baton.bench.lab.harness.hosts import Hosts, NoHosts
from baton.bench.lab.kv.__main__ import BENCH


def test_a_machine_without_root_or_tools_is_told_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoHosts, match="need root"):
        Hosts(2)
    with pytest.raises(SystemExit) as ended:
        BENCH.main(["--only", "link"])
    assert ended.value.code == 2
    assert "need root" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(NoHosts, match=r"need tc \(iproute2\)"):
        Hosts(2)
