"""Runs tests of vLLM or SGLang against clusters: `python -m tests.suites vllm DIRECTORY MODEL [RUN …]`.

DIRECTORY holds the sources of the version that docs/suites.toml names, and `tests.suites.model` makes MODEL.
Each RUN of that list, by default all, starts `baton serve` with its options and runs its tests. A test whose
outcome is not that of the list is `new`. BATON names the command, if it is not in PATH.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIST = HERE.parents[1] / "docs" / "suites.toml"
SERVE = [
    "--tool-call-parser", "llama3_json", "--generation-config", str(HERE), "--enable-per-request-metrics",
]  # fmt: skip
PYTEST = [
    "-p", "plugin", "-q", "--no-header", "--tb=line", "-c", "/dev/null", "-o", "asyncio_mode=auto",
    "--timeout=120", "--continue-on-collection-errors", "-W", "ignore",
]  # fmt: skip


@contextmanager
def cluster(run: dict[str, Any], model: str, names: list[str]) -> Iterator[str]:
    """Serves with the options of a run. Yields the URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write("{%- set thinks = true %}" if run["thinks"] else "")
        template.write((HERE / "template.jinja").read_text())
        template.flush()
        reasoning = ["--reasoning-parser", "qwen3" if run["thinks"] else "none"]
        served = [part for name in run.get("names", names) for part in ("--served-model-name", name)]
        options = ["--model", model, "--chat-template", template.name, *SERVE, *reasoning, *served]
        command = [os.environ.get("BATON", "baton"), "serve", "--port", str(port), *options, *run["options"]]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            while server.poll() is None:
                try:
                    urllib.request.urlopen(url + "/ready").close()
                    break
                except OSError:
                    time.sleep(0.5)
            yield url
        finally:
            server.terminate()
            server.wait()


def outcomes(run: dict[str, Any], url: str, directory: str, others: list[str]) -> Iterator[list[Any]]:
    """Runs the tests of a run without those of `others`, which other runs have. Yields what the plugin
    writes: the test, its outcome, whether it asked the cluster, and why it failed."""
    with tempfile.NamedTemporaryFile() as written:
        path = os.pathsep.join([directory, str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"BATON_URL": url, "BATON_OUTCOMES": written.name, "PYTHONPATH": path}
        environment["BATON_API_KEY"] = run.get("key", "-")
        without = [part for test in others for part in ("--deselect", test)]
        command = [sys.executable, "-m", "pytest", *PYTEST, "--rootdir", directory, *run["tests"], *without]
        subprocess.run(command, cwd=directory, env=environment, check=False)
        yield from map(json.loads, Path(written.name).read_text().splitlines())


def main(name: str, directory: str, model: str, *chosen: str) -> int:
    everything = tomllib.loads(LIST.read_text())
    suite, names = everything[name], everything["vllm"]["models"]
    found: dict[str, tuple[str, str]] = {}
    for i, run in enumerate(suite["runs"]):
        if chosen and run["name"] not in chosen:
            continue
        others = [test for later in suite["runs"][i + 1 :] for test in later["tests"]]
        with cluster(run, model, names) as url:
            for test, outcome, asked, said in outcomes(run, url, directory, others):
                if asked and found.get(test, ("passed",))[0] == "passed":  # a test may have parts
                    found[test] = outcome, said
    expected = dict.fromkeys(suite["passed"], "passed")
    expected |= {test: why["reason"] for why in suite["not_passed"] for test in why["tests"]}
    kinds = Counter[str]()
    for test, (outcome, said) in found.items():
        known = expected.get(test, "new")
        kind = known if (known == "passed") == (outcome == "passed") else "new"
        kinds[kind] += 1
        if kind == "new":
            print(f"{test} {outcome}, and not: {known}\n    {said}")
    for kind, count in kinds.most_common():
        print(f"{count:5} {kind}")
    return 1 if kinds["new"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
