"""Runs tests of vLLM or SGLang against clusters: `python -m tests.suites vllm DIRECTORY MODEL [RUN …]`.

DIRECTORY holds the sources of the version that docs/suites.toml names, and `tests.suites.model` makes MODEL.
Each RUN of that list, by default all, starts `baton serve` with its options and runs its tests. A test whose
outcome is not that of the list is `new`, and one that did not run is `not found`. Both end the command with
1, and so does a run that could not be made. BATON names the command, if it is not in PATH.

All runs, typed in a checkout after `make venv`:

    source .venv/bin/activate
    pip install --no-deps tblib pillow fastapi starlette httpx httpcore openai-harmony outlines-core
    pip install --no-deps annotated-doc setuptools-rust semantic-version setuptools-scm vcs-versioning
    export VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0
    pip download --no-deps --no-build-isolation --no-binary vllm vllm==0.33.0
    tar xf vllm-0.33.0.tar.gz
    embedded=$(python -c "from baton.cluster.model import embedded_path; print(embedded_path())")
    python -m tests.suites vllm "$PWD/vllm-0.33.0" "$embedded" plain options keys
    # what wants a model that reasons, and SGLang's tests
    hf download Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF qwen2.5-coder-0.5b-instruct-q4_k_m.gguf --local-dir .
    python -m tests.suites.model qwen2.5-coder-0.5b-instruct-q4_k_m.gguf suites.gguf
    python -m tests.suites vllm "$PWD/vllm-0.33.0" "$PWD/suites.gguf" thinking
    git clone --depth 1 --branch v0.5.9 https://github.com/sgl-project/sglang
    python -m tests.suites sglang "$PWD/sglang" "$PWD/suites.gguf"
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LIST = HERE.parents[1] / "docs" / "suites.toml"
SERVE = [
    "--tool-call-parser", "llama3_json", "--advanced.generation-config", str(HERE),
    "--advanced.enable-per-request-metrics",
]  # fmt: skip
PYTEST = [
    "-p", "plugin", "-q", "--no-header", "--tb=line", "-c", "/dev/null", "-o", "asyncio_mode=auto",
    "--timeout=120", "--continue-on-collection-errors", "-W", "ignore",
]  # fmt: skip


class RunFailed(Exception):
    """A run without outcomes."""


def _ready(url: str) -> bool:
    with suppress(OSError):
        urllib.request.urlopen(url + "/ready").close()
        return True
    return False


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
            while not _ready(url):
                if server.poll() is not None:
                    raise RunFailed(f"baton serve ended with {server.returncode}: {' '.join(command)}")
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
        ended = subprocess.run(command, cwd=directory, env=environment, check=False).returncode
        if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            raise RunFailed(f"pytest ended with {ended}: {' '.join(command)}")
        yield from map(json.loads, Path(written.name).read_text().splitlines())


def owner(runs: list[dict[str, Any]], test: str) -> str:
    """The run that has this test: the last one that names it, its file or a folder of it."""
    having = [
        run["name"] for run in runs if any(re.match(re.escape(t) + r"($|[/:\[])", test) for t in run["tests"])
    ]
    return having[-1] if having else ""


def compared(suite: dict[str, Any], chosen: Sequence[str], found: dict[str, tuple[str, str]]) -> Counter[str]:
    """Counts the outcomes by kinds, and prints what is not as in the list."""
    expected = dict.fromkeys(suite["passed"], "passed")
    expected |= {test: why["reason"] for why in suite["not_passed"] for test in why["tests"]}
    either = {test for why in suite["not_passed"] if why.get("may_pass") for test in why["tests"]}
    kinds = Counter[str]()
    for test, (outcome, said) in found.items():
        known = expected.get(test, "new")
        as_listed = (known == "passed") == (outcome == "passed") or test in either
        kinds[known if as_listed else "new"] += 1
        if not as_listed or known == "new":
            print(f"{test} {outcome}, and not: {known}\n    {said}")
    for test in expected.keys() - found.keys():
        if owner(suite["runs"], test) in chosen:
            kinds["not found"] += 1
            print(f"{test} not found, and not: {expected[test]}")
    return kinds


def main(name: str, directory: str, model: str, *chosen: str) -> int:
    everything = tomllib.loads(LIST.read_text())
    suite, names = everything[name], everything["vllm"]["models"]
    runs: list[dict[str, Any]] = suite["runs"]
    chosen = chosen or tuple(run["name"] for run in runs)
    if unknown := {*chosen} - {run["name"] for run in runs}:
        raise SystemExit(f"{LIST} has no run {', '.join(sorted(unknown))} of {name}")
    found: dict[str, tuple[str, str]] = {}
    for i, run in enumerate(runs):
        if run["name"] not in chosen:
            continue
        others = [test for later in runs[i + 1 :] for test in later["tests"]]
        try:
            with cluster(run, model, names) as url:
                for test, outcome, asked, said in outcomes(run, url, directory, others):
                    if asked and found.get(test, ("passed",))[0] == "passed":  # a test may have parts
                        found[test] = outcome, said
        except RunFailed as error:
            raise SystemExit(f"run {run['name']}: {error}") from error
    kinds = compared(suite, chosen, found)
    for kind, count in kinds.most_common():
        print(f"{count:5} {kind}")
    return 1 if kinds["new"] or kinds["not found"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
