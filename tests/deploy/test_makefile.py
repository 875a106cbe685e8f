"""`make`, without running what it would run."""

import os
import subprocess
from pathlib import Path

from .conftest import ROOT


def test_the_first_start_says_that_it_installs_and_shows_what(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "serve", f"VENV={tmp_path}"]
    # `make test` runs this test: a make within a make would also print its directory.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    steps = done.stdout.splitlines()
    assert steps[0].startswith('echo "Installing Baton'), "before the first download"
    installs = [step for step in steps if " pip install " in step]
    assert len(installs) == 3
    assert not [step for step in installs if "quiet" in step or "-q" in step.split()]
