"""The newest version of each client does its task: long, since npm and pip install it first."""

from pathlib import Path

import pytest

from tests.clients.__main__ import tried
from tests.clients.catalog import CLIENTS
from tests.clients.installed import node_path

pytestmark = pytest.mark.all


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> str:
    return node_path(tmp_path_factory.mktemp("node"))


@pytest.mark.long
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_does_its_task(name: str, tools: str, tmp_path: Path) -> None:
    """`-s` shows what changed since the recording."""
    assert tried(name, tools, tmp_path / "client") == []
