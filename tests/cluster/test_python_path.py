import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cluster.supervision.processes import PACKAGES, python_path


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, PACKAGES), ("", PACKAGES), (f"/a{os.pathsep}/b", os.pathsep.join((PACKAGES, "/a", "/b")))],
)
def test_children_import_from_the_same_places_and_this_source_first(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONPATH", given)
    assert python_path() == {"PYTHONPATH": expected, "PYTHONSAFEPATH": "1"}


def test_a_package_of_the_user_hides_none_of_baton(tmp_path: Path) -> None:
    for name in ("bench", "cluster", "engine", "router", "rpc", "worker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('this is not the package of Baton')")
    modules = "baton.cluster.cli, baton.router.server, baton.worker.config"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); import {modules}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
