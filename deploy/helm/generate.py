"""Writes the templates of the Helm chart from the manifests in deploy/k8s, so that both deploy the same.

    python deploy/helm/generate.py KUSTOMIZE

`KUSTOMIZE` is the binary. It builds the overlay `gateway`, which has all components. Each object goes into
the template of the file that it comes from, with expressions where values.yaml decides (`templated`). Objects
of a component that can be left out have a condition (`CONDITIONS`).

kustomize makes two ConfigMaps from other files, so no manifest has them: their templates, `settings.yaml` and
`dashboards.yaml`, are written by hand.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
K8S = HERE.parent / "k8s"
TEMPLATES = HERE / "baton" / "templates"
HEAD = "# Made by deploy/helm/generate.py from deploy/k8s/{source}.\n"
CONDITIONS = {
    "components/gpu": "and .Values.weights.enabled .Values.weights.create",
    "components/monitoring": ".Values.monitoring.enabled",
    "components/autoscaling": ".Values.autoscaling.enabled",
    "components/gateway": ".Values.gateway.enabled",
    "overlays/gateway": ".Values.gateway.enabled",
}
"""Folder of a manifest → when its objects are rendered."""

Object = dict[str, Any]


class Marks:
    """Stands in for template expressions, which are no YAML, while an object is written as YAML."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        """Returns a scalar that becomes `text`. `INDENT` in it becomes the indentation of a nested block.

        As the only key of a line or as an item of a list it becomes lines of their own.
        """
        self._texts.append(text)
        return f"HELM{len(self._texts) - 1}X"

    def value(self, name: str) -> str:
        return self.mark(f"{{{{ .Values.{name} }}}}")

    def block(self, name: str) -> str:
        return self.mark(f"{{{{- toYaml .Values.{name} | nindent INDENT }}}}")

    def replaced(self, text: str) -> str:
        """`text` with the expressions in the places of their marks. Other braces stay as they are."""
        lines = (self._line(line) for line in text.replace("{{", '{{ "{{" }}').splitlines())
        return "".join(f"{line}\n" for line in lines)

    def _line(self, line: str) -> str:
        indent = len(line) - len(line.lstrip(" "))
        alone = re.fullmatch(r" *(?:- )?HELM(\d+)X(?:: null)?", line)
        if alone:
            return "\n".join(" " * indent + each for each in self._texts[int(alone[1])].splitlines())
        expression = re.sub(r"HELM(\d+)X", lambda mark: self._texts[int(mark[1])], line)
        return expression.replace("INDENT", str(indent + 2))


def sources() -> dict[tuple[str, str], Path]:
    """Kind and name of an object → the manifest that has it."""
    folders = ["roles", "base", *CONDITIONS]
    return {
        (each["kind"], each["metadata"]["name"]): path.relative_to(K8S)
        for folder in folders
        for path in sorted((K8S / folder).glob("*.yaml"))
        for each in yaml.safe_load_all(path.read_text())
        if each is not None and "kind" in each and "metadata" in each
    }


def templated(each: Object, marks: Marks) -> Object:
    """The object with values from values.yaml. Names are fixed: one release for each namespace."""
    each["metadata"].pop("namespace")
    spec = each.get("spec", {})
    match each["kind"]:
        case "Deployment":
            _deployment(each["metadata"]["name"].removeprefix("baton-"), spec, marks)
        case "HorizontalPodAutoscaler":
            pool = each["metadata"]["name"].removeprefix("baton-")
            for bound in ("minReplicas", "maxReplicas"):
                spec[bound] = marks.value(f"autoscaling.{pool}.{bound}")
        case "PersistentVolumeClaim":
            each["metadata"]["name"] = marks.value("weights.claim")
            spec["resources"]["requests"]["storage"] = marks.value("weights.size")
        case "RoleBinding":
            for subject in each["subjects"]:
                subject["namespace"] = marks.mark("{{ .Release.Namespace }}")
        case "NetworkPolicy":
            for peer in _peers(spec):
                labels = peer.get("namespaceSelector", {}).get("matchLabels", {})
                if labels.get("kubernetes.io/metadata.name") == "monitoring":
                    labels["kubernetes.io/metadata.name"] = marks.value("monitoring.namespace")
        case "Gateway":
            each["metadata"]["name"] = marks.value("gateway.name")
            spec["gatewayClassName"] = marks.value("gateway.className")
        case "HTTPRoute":
            spec["parentRefs"] = [{"name": marks.value("gateway.name")}]
    return each


def _peers(policy: Object) -> Iterator[Object]:
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for rule in policy.get(direction, []):
            yield from rule.get(side, [])


def _deployment(role: str, spec: Object, marks: Marks) -> None:
    replicas = f"replicas: {{{{ .Values.{role}.replicas }}}}"
    if role in ("prefill", "decode"):  # the autoscaler sets the number
        replicas = f"{{{{- if not .Values.autoscaling.enabled }}}}\n{replicas}\n{{{{- end }}}}"
    spec.pop("replicas", None)
    spec[marks.mark(replicas)] = None
    template = spec["template"]
    checksum = marks.mark("{{ toYaml .Values.settings | sha256sum | quote }}")
    template["metadata"]["annotations"] = {"checksum/settings": checksum}  # changed settings roll the pods
    pod = template["spec"]
    pod.pop("tolerations", None)
    for key in ("nodeSelector", "tolerations"):
        pod[marks.mark(_given(f"{role}.{key}", f"{key}: {{{{- toYaml . | nindent 8 }}}}"))] = None
    [container] = pod["containers"]
    container["image"] = f"{marks.value('image.repository')}:{marks.value('image.tag')}"
    container["resources"] = marks.block(f"{role}.resources")
    container["args"].append(marks.mark(_given(f"{role}.args", "{{- toYaml . | nindent 8 }}")))
    for source in container["envFrom"]:
        source["configMapRef"]["name"] = "baton-settings"
    for parts in (container["volumeMounts"], pod["volumes"]):
        for i, part in enumerate(parts):
            if part["name"] == "weights":
                start, end = marks.mark("{{- if .Values.weights.enabled }}"), marks.mark("{{- end }}")
                parts[i : i + 1] = [start, part, end]
                if "persistentVolumeClaim" in part:
                    part["persistentVolumeClaim"]["claimName"] = marks.value("weights.claim")
                break


def _given(name: str, text: str) -> str:
    """`text` if the value is not empty. It is `.` in the text."""
    return f"{{{{- with .Values.{name} }}}}\n{text}\n{{{{- end }}}}"


def templates(objects: list[Object]) -> dict[str, str]:
    """File name → text, of all templates that are made. `objects` are those of the overlay `gateway`."""
    of_file = sources()
    texts: dict[Path, list[str]] = {}
    for each in copy.deepcopy(objects):
        if each["kind"] in ("Namespace", "ConfigMap"):
            continue
        marks = Marks()
        condition = ".Values.gateway.className" if each["kind"] == "Gateway" else None
        path = of_file[each["kind"], each["metadata"]["name"]]
        text = marks.replaced("---\n" + yaml.safe_dump(templated(each, marks), sort_keys=False, width=1000))
        texts.setdefault(path, []).append(_when(condition, text))
    written: dict[str, str] = {}
    for path, parts in texts.items():
        text = _when(CONDITIONS.get(str(path.parent)), "".join(parts))
        written[f"{path.parent.name}-{path.name}"] = HEAD.format(source=path) + text
    return written


def _when(condition: str | None, text: str) -> str:
    return text if condition is None else f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"


if __name__ == "__main__":
    command = [sys.argv[1], "build", str(K8S / "overlays" / "gateway")]
    build = subprocess.run(command, capture_output=True, text=True, check=True)
    for old in TEMPLATES.glob("*-*.yaml"):
        old.unlink()
    for name, text in templates(list(yaml.safe_load_all(build.stdout))).items():
        (TEMPLATES / name).write_text(text)
