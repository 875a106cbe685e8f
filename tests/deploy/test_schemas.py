"""API servers of the oldest and newest supported Kubernetes, and several operators, accept the manifests."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
from kubernetes_validate import utils

from .conftest import Object, of_kind, pod_templates

pytestmark = pytest.mark.all

VERSIONS = ("1.32", "1.37")
"""The oldest and the newest that docs/kubernetes.md names."""
CUSTOM = {path.stem: json.loads(path.read_text()) for path in Path(__file__).with_name("schemas").iterdir()}
EXPECTED = {
    "plain": {"Deployment": 3, "HorizontalPodAutoscaler": 2, "PodDisruptionBudget": 3, "ServiceMonitor": 1},
    "kv-network": {
        "Deployment": 3,
        "HorizontalPodAutoscaler": 2,
        "PodDisruptionBudget": 3,
        "ServiceMonitor": 1,
    },
    "rdma": {"Deployment": 3, "HorizontalPodAutoscaler": 2, "PodDisruptionBudget": 3, "ServiceMonitor": 1},
    "single-gpu": {"Deployment": 3, "PodDisruptionBudget": 3, "ServiceMonitor": 1},
    "tensor-parallel": {"Deployment": 3, "HorizontalPodAutoscaler": 0, "ServiceMonitor": 1},
    "vllm-tensor-parallel": {"Deployment": 3, "HorizontalPodAutoscaler": 0, "ServiceMonitor": 1},
    "vllm-data-parallel": {"Deployment": 3, "HorizontalPodAutoscaler": 0, "ServiceMonitor": 1},
    "vllm": {"Deployment": 3, "HorizontalPodAutoscaler": 2, "PodDisruptionBudget": 3, "ServiceMonitor": 1},
    "cpu-demo": {"Deployment": 3, "PodDisruptionBudget": 3, "PersistentVolumeClaim": 0},
    "gateway": {
        "Deployment": 4,
        "InferencePool": 1,
        "HTTPRoute": 1,
        "PodDisruptionBudget": 4,
        "ServiceMonitor": 1,
    },
    "store": {"Deployment": 3, "StatefulSet": 2, "PodDisruptionBudget": 4, "ServiceMonitor": 1},
    "store-ha": {"Deployment": 3, "StatefulSet": 2, "PodDisruptionBudget": 4, "NetworkPolicy": 10},
    "rbg": {"RoleBasedGroup": 1, "CoordinatedPolicy": 1, "StatefulSet": 2, "Deployment": 0},
    "kuberay": {"RayCluster": 1, "Deployment": 1, "ServiceMonitor": 1, "PersistentVolumeClaim": 2},
}


# kubernetes-validate would read a megabyte of definitions for each object.
utils.schema_contents = functools.cache(utils.schema_contents)


def validate(each: Object, version: str) -> None:
    """As an API server. The schemas in `schemas` are the published ones as far as the manifests use them, and
    closed: an API server drops what it does not know without a word."""
    if each["kind"] in CUSTOM:
        jsonschema.Draft202012Validator(CUSTOM[each["kind"]]["schema"]).validate(each)
    else:
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_in_every_version(overlay: list[Object], version: str) -> None:
    for each in overlay:
        validate(each, version)


# The published schema of a kind, as a function: `validate` of the npm package of them all.
_PUBLISHED = """
import { readFileSync } from "node:fs";
for (const object of JSON.parse(readFileSync(0))) {
    const models = await import(`@kubernetes-models/prometheus-operator/${object.apiVersion}/${object.kind}`);
    new models[object.kind](object).validate();
}
"""


def published(objects: list[Object]) -> subprocess.CompletedProcess[str]:
    """Of the Prometheus operator's kinds; fails at the first object that the operator's schema refuses."""
    command = ["node", "--input-type=module", "--eval", _PUBLISHED]
    given = json.dumps(objects)
    return subprocess.run(command, cwd=sys.prefix, input=given, capture_output=True, text=True)


def test_the_prometheus_operators_own_schemas_accept_what_is_for_it(
    overlays: dict[str, list[Object]],
) -> None:
    of_operator = "monitoring.coreos.com/"
    objects = [o for overlay in overlays.values() for o in overlay if o["apiVersion"].startswith(of_operator)]
    assert {each["kind"] for each in objects} == {"ServiceMonitor", "PrometheusRule", "ScrapeConfig"}
    checked = published(objects)
    assert checked.returncode == 0, checked.stderr
    monitor = next(each for each in objects if each["kind"] == "ServiceMonitor")
    wrong = monitor | {"spec": monitor["spec"] | {"endpoints": [{"port": "metrics", "interval": "often"}]}}
    assert "/spec/endpoints/0/interval" in published([wrong]).stderr


@pytest.mark.parametrize("version", VERSIONS)
def test_pod_templates_inside_custom_resources_are_valid_too(overlay: list[Object], version: str) -> None:
    for pod in pod_templates(overlay):
        wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "template": pod.template}
        kubernetes_validate.validate(wrapped, version, strict=True)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_overlay_has_its_own_objects(overlays: dict[str, list[Object]], name: str) -> None:
    for kind, count in EXPECTED[name].items():
        assert len(of_kind(overlays[name], kind)) == count, kind


def test_everything_is_in_one_namespace(overlay: list[Object]) -> None:
    assert {each["metadata"].get("namespace") for each in overlay if each["kind"] != "Namespace"} == {"baton"}
