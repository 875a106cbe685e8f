"""The Dockerfile is linted, and what it installs is pinned."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from .conftest import ROOT, Object, pod_templates

pytestmark = pytest.mark.all

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
IMAGES = {"cpu", "cuda", "vllm"}


def test_hadolint_accepts_the_dockerfile() -> None:
    linted = subprocess.run(
        [Path(sys.prefix) / "bin" / "hadolint", "--failure-threshold", "style", DOCKERFILE],
        capture_output=True,
        text=True,
    )
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_bases_and_targets() -> None:
    text = DOCKERFILE.read_text()
    bases = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.M)
    stages = {stage for _, stage in bases}
    assert stages >= IMAGES
    for base, _ in bases:
        assert base in stages or re.fullmatch(r"[\w/.-]+:(\d+\.\d+\.\d+-\S+|v\${VLLM})", base), (
            f"{base} has no version"
        )
    assert re.findall(r"^USER (\S+)$", text, re.M)[-1] == "10001:10001"


def test_overlays_use_each_image(overlays: dict[str, list[Object]]) -> None:
    pods = [pod for objects in overlays.values() for pod in pod_templates(objects)]
    assert {c["image"].rpartition("-")[2] for pod in pods for c in pod.containers} == IMAGES


def test_an_image_has_all_packages() -> None:
    copied = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    packages = {path.name for path in (ROOT / "baton").iterdir() if path.is_symlink()}
    assert {f"!{name}" for name in packages} <= set(copied)


def test_the_image_of_vllm_has_a_tested_version() -> None:
    [version] = re.findall(r"^ARG VLLM=(\S+)$", DOCKERFILE.read_text(), re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert Requirement(extras["vllm"][0]).specifier.contains(version)


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str, extras: set[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """A distribution and all that it needs on Linux, by name. What is not installed here ends there."""
    if (key := (normalized(name), frozenset(extras))) in seen:
        return
    seen.add(key)
    yield key[0]
    try:
        requires = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, requires):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in {*extras, ""}):
            yield from needed(requirement.name, requirement.extras, seen)


def test_every_package_in_an_image_has_a_tested_version() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    pinned = {normalized(name) for name in pins} | {"setuptools"}
    seen: set[tuple[str, frozenset[str]]] = set()
    cpu, cuda = (set(e.split(",")) for e in re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE.read_text()))
    assert cuda == cpu | {"cuda", "nixl"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = [
        *project["dependencies"],
        *(line for extra in cuda for line in project["optional-dependencies"][extra]),
    ]
    wanted = {
        name
        for requirement in map(Requirement, [*ours, "ray[default]"])
        for name in needed(requirement.name, requirement.extras, seen)
    }
    assert {"kubernetes", "triton", "opentelemetry-sdk"} <= wanted
    of_torch = ("nvidia-", "cuda-")  # a torch for GPUs names their versions itself
    wanted = {name for name in wanted if not name.startswith(of_torch)}
    assert wanted <= pinned, f"not in constraints.txt: {sorted(wanted - pinned)}"
