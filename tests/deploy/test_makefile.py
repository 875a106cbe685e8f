"""`make`, without running what it would run."""

import subprocess
from pathlib import Path

from .conftest import ROOT


def test_the_first_start_says_that_it_installs_and_shows_what(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "serve", f"VENV={tmp_path}"]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert steps[0].startswith('echo "Installing Baton'), "before the first download"
    installs = [step for step in steps if " pip install " in step]
    assert len(installs) == 3
    assert not [step for step in installs if "quiet" in step or "-q" in step.split()]
