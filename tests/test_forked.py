"""Fork servers know each process that tests start in place of one of the product."""

import socket
from pathlib import Path

from tests.forked.popen import KINDS, ForkServer
from tests.forked.server import _PRELOADED

ROOT = Path(__file__).parents[1]


def test_engine_processes_of_tests_are_forks() -> None:
    """A fresh one imports torch, which takes longer than most tests."""
    found = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "tests").rglob("*.py")
        if "\n    start(EngineProcessConfig" in path.read_text()
    ]
    assert len(found) >= 5
    assert set(found) <= KINDS.keys() & set(_PRELOADED["roles"])


def test_what_torch_sets_in_a_process_makes_no_later_role_a_fresh_one() -> None:
    with socket.socket() as unused:
        server = ForkServer(unused, 0, {"TORCH_LOGS": "dynamo"})
        assert server.fits({"TORCH_LOGS": "dynamo", "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor"})
        assert not server.fits({"TORCH_LOGS": "graph"})
