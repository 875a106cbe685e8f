"""The Helm chart deploys what the overlays deploy. Helm's own engine (`helm-python-sdk`) renders it."""

from __future__ import annotations

import copy
import json
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml

from .conftest import ROOT, Object

HELM = ROOT / "deploy" / "helm"
CHART = HELM / "baton"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
CPU_DEMO = yaml.safe_load((HELM / "values-cpu-demo.yaml").read_text())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image": {"repository": "baton"}}, "'tag' is a required property"),
        ({"prefil": {}}, "'prefil' was unexpected"),
        ({"decode": {"replicas": "2"}}, "'2' is not of type 'integer'"),
        ({"settings": VALUES["settings"] | {"BATON_NUM_BLOCKS": 512}}, "512 is not of type 'string'"),
        ({"prefill": {"args": ["max-num-seqs 8"]}}, "does not match"),
        ({"router": {"resources": {"limits": {"memory": "2 GB"}}}}, "does not match"),
    ],
)
def test_values_are_validated(wrong: dict[str, Any], message: str) -> None:
    schema = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
    schema.validate(VALUES)
    [error] = schema.iter_errors(VALUES | wrong)
    assert message in error.message


def rendered(values: dict[str, Any]) -> dict[tuple[str, str], Object]:
    """The objects of the chart, by kind and name. The annotation that only the chart has is left out."""
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values, name="release", namespace="baton").values()
    objects = [each for text in texts for each in yaml.safe_load_all(text) if each]
    for each in objects:
        if each["kind"] == "Deployment":
            assert each["spec"]["template"]["metadata"].pop("annotations").keys() == {"checksum/settings"}
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


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
    assert rendered(copy.deepcopy(values)) == as_in_the_chart(overlays[name])


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
