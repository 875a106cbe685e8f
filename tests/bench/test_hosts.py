"""Benches of links: what a machine lacks for them, and how long they take."""

import os
import random
import shutil

import pytest

from baton.bench.lab.harness.hosts import Hosts, NoHosts
from baton.bench.lab.kv.__main__ import BENCH
from baton.bench.lab.link import starts_of


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


@pytest.mark.parametrize("rate", [0.01, 0.4, 1.0, 50.0])
def test_a_round_takes_its_seconds_at_each_rate(rate: float) -> None:
    starts = starts_of(random.Random(1), rate, 50.0)
    assert starts == sorted(starts)
    assert starts[-1] < 50.0
    assert 0.7 * 50 * rate <= len(starts) <= 1.3 * 50 * rate + 1
