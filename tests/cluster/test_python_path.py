import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from baton.cluster.check_model import faults
from baton.cluster.model import ResolvedModel
from baton.cluster.options.engine import EngineOptions
from baton.cluster.supervision.rundir import Janitor
from baton.grammars.trials import Trials
from baton.processes.spawn import spawn
from baton.system.python_path import PACKAGES, python_path
from tests.within import WITHIN


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


@pytest.mark.all
def test_a_package_of_the_user_hides_none_of_baton(tmp_path: Path) -> None:
    for name in ("bench", "cluster", "engine", "router", "rpc", "worker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('this is not the package of Baton')")
    modules = "baton.cluster.cli, baton.router.server, baton.worker.config"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); import {modules}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN)
    assert done.returncode == 0, done.stderr


@pytest.mark.all
@pytest.mark.parametrize("start", ["transfer", "check", "grammar", "janitor"])
def test_no_process_runs_modules_of_the_working_directory(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "baton.py").write_text("from pathlib import Path\nPath(__file__).with_name('ran').touch()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    if start == "transfer":
        spawn("-m", "baton.kv_transfer.process", given=b"").wait(60)
    elif start == "check":
        found = ResolvedModel(name="a", location=str(tmp_path))
        assert "could not be checked" not in str(faults(found, EngineOptions(device="cpu")))
    elif start == "grammar":
        with closing(Trials(300)) as trials:
            assert not trials.try_("regex", "a").error
    else:
        with Janitor(tmp_path / "none", "a janitor")._process as janitor:
            assert janitor.stdin is not None
    assert not (tmp_path / "ran").exists()
