"""The Helm chart deploys what the overlays deploy. Helm's own engine (`helm-python-sdk`) renders it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml

from .conftest import ROOT, Object

HELM = ROOT / "deploy" / "helm"
CHART = HELM / "baton"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
OF_A_RELEASE = ("app.kubernetes.io/instance", "checksum/settings")
CPU_DEMO = yaml.safe_load((HELM / "values-cpu-demo.yaml").read_text())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image": {"repository": "baton"}}, "'tag' is a required property"),
        ({"prefil": {}}, "'prefil' was unexpected"),
        ({"decode": {"replicas": "2"}}, "'2' is not of type 'integer'"),
        ({"settings": VALUES["settings"] | {"BATON_NUM_BLOCKS": 512}}, "512 is not of type 'string'"),
        ({"prefill": {"args": ["max-num-seqs 8"]}}, "does not match"),
        ({"settings": VALUES["settings"] | {"BATON_DRAIN_TIMEOUT": "1m"}}, "does not match"),
        ({"router": {"terminationGracePeriodSeconds": "600"}}, "is not of type 'integer', 'null'"),
        ({"router": {"resources": {"limits": {"memory": "2 GB"}}}}, "does not match"),
    ],
)
def test_values_are_validated(wrong: dict[str, Any], message: str) -> None:
    schema = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    schema.validate(VALUES)
    [error] = schema.iter_errors(VALUES | wrong)
    assert message in error.message


def rendered(values: dict[str, Any], name: str = "baton") -> dict[tuple[str, str], Object]:
    """The objects of a release, by kind and name."""
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(copy.deepcopy(values), name=name, namespace="baton").values()
    objects = [each for text in texts for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def without_a_release(node: Any) -> Any:
    """`node` without what only the chart has: the label of the release, and the checksum of the settings."""
    if isinstance(node, dict):
        found = {key: without_a_release(each) for key, each in node.items() if key not in OF_A_RELEASE}
        return {key: each for key, each in found.items() if each or key not in ("matchLabels", "annotations")}
    return [without_a_release(each) for each in node] if isinstance(node, list) else node


def as_in_an_overlay(objects: dict[tuple[str, str], Object]) -> dict[tuple[str, str], Object]:
    """The objects of the release `baton`. In overlays policies have no prefix."""
    found = {}
    for (kind, name), each in objects.items():
        if kind == "NetworkPolicy":
            name = each["metadata"]["name"] = name.removeprefix("baton-")
        found[kind, name] = without_a_release(each)
    return found


def as_in_the_chart(overlay: list[Object]) -> dict[tuple[str, str], Object]:
    """The objects of an overlay without namespaces, and without the hash in the name of the settings."""
    text = json.dumps([each for each in overlay if each["kind"] != "Namespace"])
    for each in overlay:
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].startswith("baton-settings-"):
            text = text.replace(each["metadata"]["name"], "baton-settings")
    objects = json.loads(text)
    for each in objects:
        del each["metadata"]["namespace"]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


@pytest.mark.parametrize(
    ("name", "values"),
    [("plain", {}), ("gateway", {"gateway": {"enabled": True}}), ("cpu-demo", CPU_DEMO)],
)
def test_the_chart_renders_to_an_overlay(
    overlays: dict[str, list[Object]], name: str, values: dict[str, Any]
) -> None:
    assert as_in_an_overlay(rendered(values)) == as_in_the_chart(overlays[name])


def test_two_releases_share_a_namespace() -> None:
    """Their objects have other names, and the selectors of one select nothing of the other."""
    values = {"gateway": {"enabled": True, "className": ""}, "monitoring": {"alerts": False}}
    first, second = rendered(values), rendered(values, "other")
    assert not first.keys() & second.keys()
    assert {name.startswith("other-baton") for _, name in second} == {True}
    assert not re.search(
        r"\bbaton-(?!cluster|api-keys)", json.dumps(list(second.values())).replace("other-baton-", "")
    )
    selectors = 0
    for each in second.values():
        for key, selector in selectors_of(each.get("spec", {})):
            labels = selector.get("matchLabels", selector)
            if key == "podSelector" and "k8s-app" in labels:
                continue
            assert labels["app.kubernetes.io/instance"] == "other", (
                f"{each['kind']} {each['metadata']['name']}"
            )
            selectors += 1
    assert selectors > 30
    assert ("Service", "mine-prefill") in rendered({"fullnameOverride": "mine"})
    assert ("Service", "a-llm-prefill") in rendered({"nameOverride": "llm"}, "a")


def selectors_of(node: Any) -> Iterator[tuple[str, Object]]:
    if isinstance(node, dict):
        for key, each in node.items():
            if key in ("selector", "podSelector", "labelSelector"):
                yield key, each
            else:
                yield from selectors_of(each)
    elif isinstance(node, list):
        for each in node:
            yield from selectors_of(each)


def test_pods_have_time_to_drain_and_pull_secrets() -> None:
    values = {
        "settings": {"BATON_DRAIN_TIMEOUT": "600"},
        "imagePullSecrets": [{"name": "registry"}],
        "weights": {"storageClassName": "fast"},
        "prefill": {"args": ["--drain-timeout=900.5"]},
        "decode": {"terminationGracePeriodSeconds": 700, "maxSurge": 1},
        "gateway": {"enabled": True},
    }
    objects = rendered(values)
    pods = {
        name: each["spec"]["template"]["spec"]
        for (kind, name), each in objects.items()
        if kind == "Deployment"
    }
    times = {name: pod["terminationGracePeriodSeconds"] for name, pod in pods.items()}
    assert times == {"baton-router": 630, "baton-prefill": 931, "baton-decode": 700, "baton-picker": 630}
    assert [pod["imagePullSecrets"] for pod in pods.values()] == [[{"name": "registry"}]] * 4
    assert objects["PersistentVolumeClaim", "baton-weights"]["spec"]["storageClassName"] == "fast"
    update = objects["Deployment", "baton-decode"]["spec"]["strategy"]["rollingUpdate"]
    assert update == {"maxSurge": 1, "maxUnavailable": 0}


def test_values_change_what_they_name() -> None:
    values = {
        "image": {"repository": "REGISTRY/baton"},
        "settings": {"BATON_MAX_MODEL_LEN": "16384"},
        "prefill": {"replicas": 3, "args": ["--max-num-seqs=8"], "nodeSelector": {"pool": "a"}},
        "autoscaling": {"enabled": False},
        "gateway": {"enabled": True, "name": "shared", "className": ""},
        "weights": {"claim": "models", "create": False},
    }
    objects = rendered(values)
    deployment = objects["Deployment", "baton-prefill"]["spec"]
    assert deployment["replicas"] == 3
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "REGISTRY/baton:0.1.0-cuda"
    assert container["args"][0] == "prefill"
    assert container["args"][-1] == "--max-num-seqs=8"
    assert pod["nodeSelector"] == {"pool": "a"}
    assert {"name": "weights", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in pod[
        "volumes"
    ]
    settings = objects["ConfigMap", "baton-settings"]["data"]
    assert settings == VALUES["settings"] | values["settings"]
    assert objects["HTTPRoute", "baton"]["spec"]["parentRefs"] == [{"name": "shared"}]
    kinds = {kind for kind, _ in objects}
    assert not {"Gateway", "HorizontalPodAutoscaler", "PersistentVolumeClaim"} & kinds


def test_helm_finds_no_mistake_and_refuses_wrong_values() -> None:
    found = helm_python.lint(CHART)
    assert [each for each in found["messages"] if each["severity"] > 1] == []
    with (
        helm_python.Chart.load(CHART) as chart,
        pytest.raises(helm_python.HelmError, match="'prefil' not allowed"),
    ):
        chart.render({"prefil": {}}, name="release", namespace="baton")
