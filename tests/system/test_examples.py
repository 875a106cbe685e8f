"""The scripts of examples/ and the commands of docs/quickstart.md print what they promise."""

from __future__ import annotations

import asyncio
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pages import ROOT, Step, typed

from .serve import Serve

EXAMPLES = ROOT / "examples"


def main_of(script: str) -> Any:
    return runpy.run_path(str(EXAMPLES / script))["main"]


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("chat_stream.py", "The capital of France is Paris.\n"),
        ("http_stream.py", " Paris"),
        ("logprobs.py", "' Paris'"),
        ("structured_output.py", "'country': 'France'"),
    ],
)
def test_an_example(server: Serve, capsys: pytest.CaptureFixture[str], script: str, printed: str) -> None:
    main_of(script)(server.url)
    assert printed in capsys.readouterr().out


def test_the_grpc_example(server: Serve, grpc_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(main_of("grpc_stream.py")(grpc_address))
    assert capsys.readouterr().out == "The capital of France is Paris.\n8 tokens\n"


def test_every_example_is_run() -> None:
    text = Path(__file__).read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if path.name not in text] == []


@pytest.mark.parametrize("step", typed("docs/quickstart.md"), ids=lambda step: step.command.split("\n")[0])
def test_the_quick_start(server: Serve, step: Step) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", step.command.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")],
        env=server.machine.environment | {"PATH": path, "BATON_URL": server.url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert step.missing(done.stdout) == [], done.stdout
