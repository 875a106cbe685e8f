"""`python -m tests.suites` fails if tests did not run."""

from pathlib import Path

import pytest

from tests.suites import __main__ as suites

pytestmark = pytest.mark.all

DIES = "#!/bin/sh\nexit 3\n"
SERVES = """#!/usr/bin/env python3
import http.server, sys

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "m"}]}')
    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""
SUITE = """
[vllm]
models = ["m"]
passed = ["tests/test_a.py::test_one"]
not_passed = []
runs = [{name = "plain", thinks = false, options = [], tests = ["tests"]}]
"""


@pytest.mark.parametrize(
    ("command", "told"),
    [(DIES, "run plain: baton serve ended with 3: "), (SERVES, "run plain: pytest ended with 4: ")],
    ids=["the cluster dies", "conftest cannot be imported"],
)
def test_a_run_that_cannot_be_made_is_a_failure(
    command: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "conftest.py").write_text("raise ImportError('a module that is not there')")
    (tmp_path / "baton").write_text(command)
    (tmp_path / "baton").chmod(0o700)
    (tmp_path / "suites.toml").write_text(SUITE)
    monkeypatch.setenv("BATON", str(tmp_path / "baton"))
    monkeypatch.setattr(suites, "LIST", tmp_path / "suites.toml")
    with pytest.raises(SystemExit, match=told):
        suites.main("vllm", str(tmp_path), "model")


def test_outcomes_are_compared_with_those_of_the_runs():
    runs = [{"name": "all", "tests": ["a", "b.py"]}, {"name": "one", "tests": ["a/t.py::x"]}]
    passed = ["a/t.py::x[1]", "a/t.py::y", "a/t.py::z", "b.py::gone"]
    races = {"reason": "a race", "tests": ["b.py::race"], "may_pass": True}
    suite = {"runs": runs, "passed": passed, "not_passed": [races, {"reason": "no", "tests": ["b.py::no"]}]}
    found = {
        "a/t.py::y": ("passed", ""),
        "a/t.py::z": ("failed", "because"),
        "b.py::race": ("passed", ""),
        "b.py::no": ("passed", ""),
        "b.py::unlisted": ("failed", "because"),
    }
    kinds = suites.compared(suite, ["all"], found)
    assert kinds == {"passed": 1, "a race": 1, "new": 3, "not found": 1}
    assert suites.compared(suite, ["all", "one"], found)["not found"] == 2
