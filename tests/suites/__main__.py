"""Runs the server tests of vLLM or SGLang against a cluster: `python -m tests.suites vllm DIRECTORY URL`.

DIRECTORY holds the sources of the version that docs/suites.toml names. Fetch them with
`pip download --no-binary :all: --no-deps vllm==VERSION`, or clone the repository. The cluster must serve
the names of the models in the tests (--served-model-name). A test that fails without a line in the list has
the outcome `new`.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

LIST = Path(__file__).parents[2] / "docs" / "suites.toml"


def main(name: str, directory: str, url: str) -> int:
    suite = tomllib.loads(LIST.read_text())[name]
    with tempfile.TemporaryDirectory() as made:
        outcomes = Path(made) / "outcomes"
        outcomes.touch()
        here = str(Path(__file__).parents[2])
        path = os.pathsep.join([directory, here])
        environment = os.environ | {"BATON_URL": url, "BATON_OUTCOMES": str(outcomes), "PYTHONPATH": path}
        options = ["-p", "suite_plugin", "-q", "--no-header", "-x" if "-x" in sys.argv else "--tb=line"]
        (Path(made) / "suite_plugin.py").write_text(Path(__file__).with_name("plugin.py").read_text())
        environment["PYTHONPATH"] += os.pathsep + made
        command = [sys.executable, "-m", "pytest", *options, "-c", "/dev/null", "--rootdir", directory]
        command += [
            "-o",
            "asyncio_mode=auto",
            "--timeout=120",
            "--noconftest",
            "--continue-on-collection-errors",
            "-W",
            "ignore",
            *suite["files"],
        ]
        subprocess.run(command, cwd=directory, env=environment, check=False)
        lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    known = {test: why["reason"] for why in suite["not_passed"] for test in why["tests"]}
    found = Counter[str]()
    for test, outcome, said in lines:
        kind = outcome if outcome == "passed" else known.get(test, "new")
        found[kind] += 1
        if kind == "new":
            print(f"{test}\n    {said}")
    for kind, count in found.most_common():
        print(f"{count:5} {kind}")
    return 1 if found["new"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
