"""The Helm chart, rendered by Helm's own engine (`helm-python-sdk`), and the overlays that are made of it."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest
import yaml

from deploy.k8s import generate

from .conftest import ROOT, Object, parsed
from .test_schemas import VERSIONS, validate

pytestmark = pytest.mark.all

HELM = ROOT / "deploy" / "helm"
CHART = HELM / "baton"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
FILES = sorted((HELM / "values").iterdir())


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
        ({"workload": "StatefulSet"}, "is not one of"),
        ({"decode": {"sharedMemory": "1G B"}}, "does not match"),
        ({"decode": {"image": {"name": "baton"}}}, "'name' was unexpected"),
        ({"store": {"etcd": {"address": "http://etcd:2379"}}}, "does not match"),
        ({"ray": {"head": {"args": []}}}, "'args' was unexpected"),
        ({"encode": {"dataParallelSize": 2}}, "'dataParallelSize' was unexpected"),
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
        texts = chart.render(copy.deepcopy(values), name=name, namespace="baton")
    notes = texts.pop("baton/templates/NOTES.txt")
    assert "port-forward service/" in notes
    objects = [each for text in texts.values() for each in parsed(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def test_the_overlays_of_git_are_what_the_chart_renders() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    assert "/deploy/k8s/overlays/*" in ignored
    kept = {line.rpartition("/")[2] for line in ignored if line.startswith("!/deploy/k8s/overlays/")}
    assert kept == set(generate.KEPT)
    for name in generate.KEPT:
        for path, text in generate.overlay(name).items():
            assert (generate.DEPLOY / path).read_text() == text, "run `make manifests`"


@pytest.mark.parametrize("values", FILES, ids=lambda path: path.stem)
def test_two_releases_share_a_namespace(values: Path) -> None:
    """Their objects are valid and have other names, and the selectors of one select nothing of the other."""
    given = yaml.safe_load(values.read_text()) or {}
    given["monitoring"] = given.get("monitoring", {}) | {"alerts": False}
    given["gateway"] = given.get("gateway", {}) | {"className": ""}
    first, second = rendered(given), rendered(given, "other")
    assert not first.keys() & second.keys()
    assert {name.startswith("other-baton") for _, name in second} == {True}
    text = json.dumps(list(second.values())).replace("other-baton-", "").replace('networks": "baton-kv', "")
    assert not re.search(r"\bbaton-(?!cluster|api-keys)", text)
    selectors = 0
    for each in second.values():
        validate(each, VERSIONS[1])
        for key, selector in selectors_of(each.get("spec", {})):
            labels = selector.get("matchLabels", selector)
            if key == "podSelector" and ("k8s-app" in labels or labels == {"app.kubernetes.io/name": "etcd"}):
                continue
            assert labels["app.kubernetes.io/instance"] == "other", (
                f"{each['kind']} {each['metadata']['name']}"
            )
            selectors += 1
    assert selectors > 12


def test_names_begin_with_what_values_say() -> None:
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
        "decode": {"terminationGracePeriodSeconds": 700, "maxSurge": 0},
        "gateway": {"enabled": True},
        "picker": {"env": [{"name": "BATON_DRAIN_TIMEOUT", "value": "800"}]},
        "router": {"env": [{"name": "BATON_DRAIN_TIMEOUT", "value": "700"}], "args": ["--drain-timeout=60"]},
    }
    objects = rendered(values)
    pods = {
        name: each["spec"]["template"]["spec"]
        for (kind, name), each in objects.items()
        if kind == "Deployment"
    }
    times = {name: pod["terminationGracePeriodSeconds"] for name, pod in pods.items()}
    assert times == {"baton-router": 90, "baton-prefill": 931, "baton-decode": 700, "baton-picker": 830}
    assert [pod["imagePullSecrets"] for pod in pods.values()] == [[{"name": "registry"}]] * 4
    assert objects["PersistentVolumeClaim", "baton-weights"]["spec"]["storageClassName"] == "fast"
    update = objects["Deployment", "baton-decode"]["spec"]["strategy"]["rollingUpdate"]
    assert update == {"maxSurge": 0, "maxUnavailable": 1}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "starts a new decode worker before it ends an old one. Without a free GPU it waits"),
        ({"decode": {"maxSurge": 0}}, "The decode pool may have one worker, and an upgrade ends it"),
    ],
)
def test_notes_say_what_an_upgrade_does(values: dict[str, Any], told: str) -> None:
    with helm_python.Chart.load(CHART) as chart:
        notes = chart.render(values, name="baton", namespace="baton")["baton/templates/NOTES.txt"]
    assert told in notes


def test_values_change_what_they_name() -> None:
    values: dict[str, Any] = {
        "image": {"repository": "REGISTRY/baton"},
        "settings": {"BATON_MAX_MODEL_LEN": "16384"},
        "prefill": {"replicas": 3, "args": ["--max-num-seqs=8"], "nodeSelector": {"pool": "a"}},
        "autoscaling": {"enabled": False},
        "gateway": {"enabled": True, "name": "shared", "className": ""},
        "weights": {"claim": "models", "create": False},
        "monitoring": {"labels": {"release": "prometheus"}},
    }
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
    values["prefill"] |= {"podLabels": {"team": "a: b"}, "affinity": affinity}
    objects = rendered(values)
    deployment = objects["Deployment", "baton-prefill"]["spec"]
    assert deployment["replicas"] == 3
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == "REGISTRY/baton:0.1.0-cuda"
    assert container["args"][0] == "prefill"
    assert container["args"][-1] == "--max-num-seqs=8"
    assert pod["nodeSelector"] == {"pool": "a"}
    assert pod["affinity"] == affinity
    assert deployment["template"]["metadata"]["labels"]["team"] == "a: b"
    assert "team" not in deployment["selector"]["matchLabels"]
    for monitor in ("ServiceMonitor", "PrometheusRule"):
        assert objects[monitor, "baton"]["metadata"]["labels"]["release"] == "prometheus"
    assert {"name": "weights", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in pod[
        "volumes"
    ]
    settings = objects["ConfigMap", "baton-settings"]["data"]
    assert settings == VALUES["settings"] | {"BATON_DRAIN_TIMEOUT": "600"} | values["settings"]
    assert objects["HTTPRoute", "baton"]["spec"]["parentRefs"] == [{"name": "shared"}]
    kinds = {kind for kind, _ in objects}
    assert not {"Gateway", "HorizontalPodAutoscaler", "PersistentVolumeClaim", "NetworkPolicy"} & kinds


def test_policies_are_asked_for_and_name_the_dns_of_the_cluster() -> None:
    dns = {"namespace": "dns", "pods": "app: coredns"}
    objects = rendered({"networkPolicies": {"enabled": True, "dns": dns}})
    [rule] = objects["NetworkPolicy", "baton-dns"]["spec"]["egress"]
    [pods] = rule["to"]
    assert pods["podSelector"] == {"matchLabels": {"app": "coredns"}}
    assert pods["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "dns"}}
    assert ("NetworkPolicy", "baton-default-deny") in objects


def test_a_store_is_where_its_etcd_and_the_settings_say() -> None:
    store = {"enabled": True, "size": "10GiB", "etcd": {"address": "e:99", "podLabels": {"app": "e"}}}
    objects = rendered({"store": store, "networkPolicies": {"enabled": True}})
    assert objects["ConfigMap", "baton-settings"]["data"]["BATON_KV_STORE"] == "mooncake://e:99?ha=etcd"
    [rule] = objects["NetworkPolicy", "baton-store-to-etcd"]["spec"]["egress"]
    assert rule["ports"] == [{"port": 99, "protocol": "TCP"}]
    labels = {"app.kubernetes.io/name": "etcd", "app": "e"}
    assert rule["to"] == [{"podSelector": {"matchLabels": labels}}]
    mine = {"BATON_KV_STORE": "mooncake://mine:1"}
    settings = rendered({"store": {"enabled": True}, "settings": mine})["ConfigMap", "baton-settings"]
    assert settings["data"] == VALUES["settings"] | {"BATON_DRAIN_TIMEOUT": "600"} | mine


def test_a_ray_cluster_has_the_workers_of_both_pools() -> None:
    values = {
        "workload": "RayCluster",
        "autoscaling": {"enabled": False},
        "prefill": {"replicas": 2, "image": {"tag": "other"}},
        "decode": {"replicas": 3},
        "settings": {"BATON_DRAIN_TIMEOUT": "600"},
    }
    objects = rendered(values)
    front = objects["Deployment", "baton-front"]["spec"]["template"]["spec"]
    assert "--prefill=2 --decode=3 " in front["containers"][0]["args"][0]
    assert front["terminationGracePeriodSeconds"] == 660
    [group] = objects["RayCluster", "baton"]["spec"]["workerGroupSpecs"]
    assert [group[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [5, 5, 5]
    [worker] = group["template"]["spec"]["containers"]
    assert worker["image"] == "baton:other"


@pytest.mark.parametrize("workload", ["Deployment", "RoleBasedGroup", "RayCluster"])
def test_encoders_are_workers_of_each_workload(workload: str) -> None:
    values = {
        "workload": workload,
        "encode": {"replicas": 3},
        "autoscaling": {"enabled": False},
        "monitoring": {"alerts": False},
    }
    objects = rendered(values)
    assert objects["ConfigMap", "baton-settings"]["data"]["BATON_ENCODER_POOL"] == "true"
    if workload == "RayCluster":
        front = objects["Deployment", "baton-front"]["spec"]["template"]["spec"]["containers"][0]
        assert "--prefill=1 --decode=1 --encode=3 " in front["args"][0]
        [group] = objects["RayCluster", "baton"]["spec"]["workerGroupSpecs"]
        assert [group[key] for key in ("replicas", "minReplicas", "maxReplicas")] == [5, 5, 5]
        return
    assert ("Service", "baton-encode") in objects
    assert ("PodDisruptionBudget", "baton-encode") in objects
    if workload == "Deployment":
        encoders = objects["Deployment", "baton-encode"]["spec"]
        router = objects["Deployment", "baton-router"]["spec"]["template"]
        pod = encoders["template"]
    else:
        roles = {each["name"]: each for each in objects["RoleBasedGroup", "baton"]["spec"]["roles"]}
        encoders, router = roles["encode"], roles["router"]["standalonePattern"]["template"]
        assert roles["router"]["dependencies"] == ["prefill", "decode", "encode"]
        pod = encoders["standalonePattern"]["template"]
    assert encoders["replicas"] == 3
    assert pod["spec"]["containers"][0]["args"][0] == "encode"
    assert "--kubernetes-service=baton-encode" in router["spec"]["containers"][0]["args"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workload": "RoleBasedGroup"}, "set autoscaling.enabled to false"),
        ({"workload": "RayCluster", "store": {"enabled": True}}, "no gateway and no store"),
        ({"workload": "RayCluster", "gateway": {"enabled": True}}, "no gateway and no store"),
        ({"workload": "RayCluster", "router": {"args": ["--max-wait=5"]}}, "router.args: .* into settings"),
        ({"monitoring": {"enabled": False}}, "set autoscaling.enabled to false, or monitoring.enabled"),
        ({"gateway": {"enabled": True}, "secrets": {"tls": "router-tls"}}, "an InferencePool has no TLS"),
        ({"secrets": {"hub": "hub"}}, "set settings.HF_HUB_OFFLINE to null"),
    ],
)
def test_values_that_no_workload_has_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError, match=message):
        rendered(values)


def test_helm_finds_no_mistake_and_refuses_wrong_values() -> None:
    found = helm_python.lint(CHART)
    assert [each for each in found["messages"] if each["severity"] > 1] == []
    with (
        helm_python.Chart.load(CHART) as chart,
        pytest.raises(helm_python.HelmError, match="'prefil' not allowed"),
    ):
        chart.render({"prefil": {}}, name="release", namespace="baton")


def test_the_autoscaler_and_the_ports_follow_flags() -> None:
    """One setting decides for a role and for what is around its pods, wherever it is given."""
    objects = rendered(
        {
            "settings": VALUES["settings"] | {"BATON_ITL_TARGET": "50", "BATON_DATA_PARALLEL_SIZE": "2"},
            "router": {"args": ["--ttft-target=301"]},
            "decode": {"env": [{"name": "BATON_DATA_PARALLEL_SIZE", "value": "1"}]},
        }
    )
    for role, value in (("prefill", "151m"), ("decode", "45m")):
        metrics = objects["HorizontalPodAutoscaler", f"baton-{role}"]["spec"]["metrics"]
        assert value in [each["pods"]["target"]["averageValue"] for each in metrics]
    ports = {role: objects["Service", f"baton-{role}"]["spec"]["ports"] for role in ("prefill", "decode")}
    assert {role: len(each) for role, each in ports.items()} == {"prefill": 6, "decode": 3}
