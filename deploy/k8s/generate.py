"""Writes the overlays: what the Helm chart renders to with each file of deploy/helm/values.

Run it with `make manifests`. A test compares the overlays with `overlays()`.
"""

import re
import shutil
from itertools import takewhile
from pathlib import Path

import yaml
from helm_python import Chart

OVERLAYS = Path(__file__).parent / "overlays"
HELM = Path(__file__).parents[1] / "helm"

MADE = "# `make manifests` writes this file: it is deploy/helm/baton with deploy/helm/values/{name}.yaml.\n"
KUSTOMIZATION = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: baton
labels:
  - pairs:
      app.kubernetes.io/part-of: baton
resources: [{resources}]
# A changed setting changes the name of the ConfigMap, so that pods roll.
configMapGenerator:
  - name: baton-settings
    envs: [settings.env]
"""


def overlay(values: Path) -> dict[str, str]:
    """The files of the overlay that these values make, by name."""
    text = values.read_text()
    given = (yaml.safe_load(text) or {}) | {"kustomize": True}
    with Chart.load(HELM / "baton") as chart:
        rendered = chart.render(given, name="baton", namespace="baton")
    # These two are kustomize's: users add settings, and all overlays share the files of the dashboards.
    settings = yaml.safe_load(rendered.pop("baton/templates/settings.yaml"))["data"]
    dashboards = rendered.pop("baton/templates/dashboards.yaml").strip()
    resources = ["../../base", *(["../../../grafana"] if dashboards else []), "objects.yaml"]
    made = MADE.format(name=values.stem)
    about = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    return {
        "kustomization.yaml": made + about + KUSTOMIZATION.format(resources=", ".join(resources)),
        "objects.yaml": made + "".join(documents(rendered)),
        "settings.env": made + "".join(f"{name}={value}\n" for name, value in settings.items()),
    }


def documents(rendered: dict[str, str]) -> list[str]:
    """Each object, after a line that names its template as Helm does."""
    return [
        f"---\n# Source: {path}\n{text.strip()}\n"
        for path in sorted(rendered)
        for text in re.split("^---\n", rendered[path], flags=re.MULTILINE)
        if re.search("^kind: ", text, re.MULTILINE)
    ]


def overlays() -> dict[Path, str]:
    """All files below `OVERLAYS`."""
    files = {values.stem: overlay(values) for values in sorted((HELM / "values").glob("*.yaml"))}
    return {OVERLAYS / name / file: text for name, made in files.items() for file, text in made.items()}


if __name__ == "__main__":
    shutil.rmtree(OVERLAYS, ignore_errors=True)
    for path, text in overlays().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
