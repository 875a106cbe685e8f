"""The scripts of examples/ run against a cluster and print what they promise."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path
from typing import Any

import pytest

from .serve import Serve

EXAMPLES = Path(__file__).parents[2] / "examples"


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
