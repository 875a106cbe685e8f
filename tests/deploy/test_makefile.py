"""`make`, without running what it would run."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.pages import ROOT, Step, typed


def steps_of(command: str, venv: Path) -> list[str]:
    # `make test` runs this test: a make within a make would also print its directory.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=alone | {"MAKEFLAGS": f"--dry-run VENV={venv}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("step", [*typed("README.md"), *typed("CONTRIBUTING.md")])
def test_the_commands_of_the_pages_are_targets(step: Step, tmp_path: Path) -> None:
    for command in step.command.splitlines():
        assert command.startswith("make ")
        assert len(steps_of(command, tmp_path)) > 3


def test_the_first_start_says_that_it_installs_and_shows_what(tmp_path: Path) -> None:
    steps = steps_of("make serve", tmp_path)
    assert steps[0].startswith('echo "Installing Baton'), "before the first download"
    installs = [step for step in steps if " pip install " in step]
    assert len(installs) == 4
    assert not [step for step in installs if "quiet" in step or "-q" in step.split()]
