"""`make`, without running what it would run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from helm_python import Chart

from deploy.k8s import generate
from tests.pages import ROOT, Step, typed

pytestmark = pytest.mark.all


def steps_of(command: str, venv: Path) -> list[str]:
    """In the environment `venv`."""
    # `make test` runs this test: a make within a make would also print its directory.
    alone = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ARGS", "MAKE", "PYTHON", "VENV"))
    }
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
    assert len(installs) == 4, "pip, our dependencies, torch, Baton"
    assert not [step for step in installs if "quiet" in step or "-q" in step.split()]


@pytest.mark.parametrize(
    ("configured", "flags", "expected"),
    [
        ("", [], ["cpu"]),
        ("global.index-url='https://packages.example'", [], [None]),
        (":env:.find-links='/wheels'", [], [None]),
        ("", ["TORCH_INDEX="], [None]),
        ("", ["TORCH_INDEX=https://down.example"], ["down.example", None]),
    ],
    ids=["without a GPU", "an index of its own", "wheels of its own", "as pip", "another index that is down"],
)
def test_torch_for_cpus_unless_pip_is_told_where_to_look(
    tmp_path: Path, configured: str, flags: list[str], expected: list[str | None]
) -> None:
    """Each expected install of torch names an index with this end, or none."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    python, log = tmp_path / "venv/bin/python", tmp_path / "log"
    python.write_text(
        f"""#!/bin/sh
[ "$3" != config ] || echo "{configured}"
echo "$@" >> {log}
case "$*" in *down.example*) exit 1;; esac
"""
    )
    python.chmod(0o755)
    (python.parent / "pip").symlink_to("python")
    no_gpu = "HAS_GPU=false"  # this machine may have one
    alone = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ARGS", "MAKE", "PYTHON", "VENV"))
    }
    subprocess.run(
        ["make", "install", f"VENV={tmp_path / 'venv'}", no_gpu, *flags],
        cwd=ROOT,
        env=alone,
        check=True,
    )
    installs = [line.split() for line in log.read_text().splitlines() if line.endswith(" torch")]
    indices = [line[line.index("--index-url") + 1] if "--index-url" in line else None for line in installs]
    assert [
        index and index[-len(end or "") :] for index, end in zip(indices, expected, strict=True)
    ] == expected


def test_a_release_has_the_chart_and_every_overlay(tmp_path: Path) -> None:
    *before, pack = steps_of("make release", tmp_path)
    assert before[-1].endswith("-m deploy.k8s.generate"), "git keeps three overlays only"
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy", symlinks=True)
    generate.write(tmp_path / "deploy")
    (tmp_path / "dist").mkdir()
    subprocess.run(["bash", "-c", pack], cwd=tmp_path, check=True)
    [archive] = (tmp_path / "dist").iterdir()
    got = tmp_path / "got"
    shutil.unpack_archive(archive, got, filter="data")
    for name in generate.NAMES:
        overlay = got / "deploy/k8s/overlays" / name
        kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text())
        assert all((overlay / resource).exists() for resource in kustomization["resources"])
    with Chart.load(got / "deploy/helm/baton") as chart:
        assert chart.render({}, name="baton", namespace="baton")
