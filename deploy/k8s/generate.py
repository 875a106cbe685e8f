"""Writes the overlays: what the Helm chart renders to with each file of deploy/helm/values.

Run it with `make manifests`. Git keeps the overlays of `KEPT`, which pages apply. Tests render all of them.
"""

import re
import shutil
from itertools import takewhile
from pathlib import Path

import yaml
from helm_python import Chart

DEPLOY = Path(__file__).parents[1]
HELM = DEPLOY / "helm"
NAMES = sorted(values.stem for values in (HELM / "values").glob("*.yaml"))
KEPT = "cpu-demo", "gateway", "plain"
ALERTS = Path("grafana/alerts.yaml")
"""All overlays with monitoring share it, and the dashboards beside it."""

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


def overlay(name: str) -> dict[Path, str]:
    """The files of an overlay below `deploy`, and those that it shares."""
    text, own = (HELM / "values" / f"{name}.yaml").read_text(), Path("k8s/overlays") / name
    given = (yaml.safe_load(text) or {}) | {"kustomize": True}
    with Chart.load(HELM / "baton") as chart:
        rendered = chart.render(given, name="baton", namespace="baton")
    # Kustomize makes these of files: users add settings.
    settings = yaml.safe_load(rendered.pop("baton/templates/settings.yaml"))["data"]
    for other in ("dashboards.yaml", "NOTES.txt"):  # what no object of an overlay is
        del rendered[f"baton/templates/{other}"]
    alerts = rendered.pop("baton/templates/alerts.yaml").strip()
    resources = ["../../base", *(["../../../grafana"] if alerts else []), "objects.yaml"]
    made = MADE.format(name=name)
    about = "".join(takewhile(lambda line: line.startswith("#"), text.splitlines(keepends=True)))
    found = {
        own / "kustomization.yaml": made + about + KUSTOMIZATION.format(resources=", ".join(resources)),
        own / "objects.yaml": made + "".join(documents(rendered)),
        own / "settings.env": made + "".join(f"{name}={value}\n" for name, value in settings.items()),
    }
    if alerts:
        found[ALERTS] = f"# `make manifests` writes this file: it is rules.yaml for Kubernetes.\n{alerts}\n"
    return found


def documents(rendered: dict[str, str]) -> list[str]:
    """Each object, after a line that names its template as Helm does."""
    return [
        f"---\n# Source: {path}\n{text.strip()}\n"
        for path in sorted(rendered)
        for text in re.split("^---\n", rendered[path], flags=re.MULTILINE)
        if re.search("^kind: ", text, re.MULTILINE)
    ]


def write(deploy: Path) -> None:
    """Writes all overlays, and what they share, below a folder with the rest of `deploy`."""
    shutil.rmtree(deploy / "k8s" / "overlays", ignore_errors=True)
    for name in NAMES:
        for path, text in overlay(name).items():
            (deploy / path).parent.mkdir(parents=True, exist_ok=True)
            (deploy / path).write_text(text)


if __name__ == "__main__":
    write(DEPLOY)
