"""Runs tests of vLLM or SGLang against a cluster: `python -m tests.suites vllm DIRECTORY URL [FILE …]`.

DIRECTORY holds the sources of the version that docs/suites.toml names. Without FILEs, all files of that list
run. docs/compatibility.md says how to serve. A test whose outcome is not that of the list is `new`.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs" / "suites.toml"
OPTIONS = [
    "-p", "plugin", "-q", "--no-header", "--tb=line", "-c", "/dev/null", "-o", "asyncio_mode=auto",
    "--timeout=120", "--continue-on-collection-errors", "-W", "ignore",
]  # fmt: skip


def main(name: str, directory: str, url: str, *files: str) -> int:
    suite = tomllib.loads(LIST.read_text())[name]
    with tempfile.NamedTemporaryFile() as outcomes:
        path = os.pathsep.join([directory, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"BATON_URL": url, "BATON_OUTCOMES": outcomes.name, "PYTHONPATH": path}
        command = [
            sys.executable,
            "-m",
            "pytest",
            *OPTIONS,
            "--rootdir",
            directory,
            *(files or suite["files"]),
        ]
        subprocess.run(command, cwd=directory, env=environment, check=False)
        lines = [json.loads(line) for line in Path(outcomes.name).read_text().splitlines()]
    expected = dict.fromkeys(suite["passed"], "passed")
    expected |= {test: why["reason"] for why in suite["not_passed"] for test in why["tests"]}
    found = Counter[str]()
    silent = Counter(test.partition("::")[0] for test, _, asked, _ in lines if not asked)
    for test, outcome, asked, said in lines:
        if asked:
            known = expected.get(test, "new")
            kind = known if (known == "passed") == (outcome == "passed") else "new"
            found[kind] += 1
            if kind == "new":
                print(f"{test} {outcome}, and not: {known}\n    {said}")
    for file, count in silent.items():
        if count != (listed := suite["silent"].get(file, 0)):
            found["new"] += 1
            print(f"{file}: {count} tests ask no server, and not {listed}")
    for kind, count in found.most_common():
        print(f"{count:5} {kind}")
    return 1 if found["new"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
