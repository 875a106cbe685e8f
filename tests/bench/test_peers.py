"""`bench.peers` without peers; with some it is run by hand, they are none of our dependencies."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("given", "said"), [([], "no peer is given"), (["--peer", "smg=/no/such/smg"], "smg (/no/such/smg)")]
)
def test_it_cannot_measure_without_a_peer(given: list[str], said: str):
    command = [sys.executable, "-m", "bench.peers", *given]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "pip install" in ended.stderr
