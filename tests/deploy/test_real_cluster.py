"""The values of a usual cluster render without an overlay: a private registry, a storage class, an ingress
with TLS, nodes of their own, two GPUs a pod, and an operator that selects monitors by labels."""

import copy
from typing import Any

import pytest

from .conftest import Object, of_kind, pod_templates
from .test_helm import rendered
from .test_schemas import VERSIONS, validate

pytestmark = pytest.mark.all

HOST = "chat.example.com"
GPU_NODES: dict[str, Any] = {
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "tolerations": [{"key": "gpu", "operator": "Equal", "value": "inference", "effect": "NoSchedule"}],
    "resources": {
        "requests": {"cpu": "16", "memory": "128Gi"},
        "limits": {"memory": "128Gi", "nvidia.com/gpu": "2"},
    },
    "sharedMemory": "4Gi",
    "runtimeClassName": "nvidia",
    "priorityClassName": "inference",
    "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "extraVolumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "100Gi"}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
}
VALUES: dict[str, Any] = {
    "image": {
        "repository": "registry.example.com/ai/baton",
        "pullPolicy": "IfNotPresent",
    },
    "imagePullSecrets": [{"name": "registry"}],
    "secrets": {"tls": "router-tls"},
    "settings": {
        "BATON_SERVED_MODEL_NAME": "llama-3.1-70b",
        "BATON_TENSOR_PARALLEL_SIZE": "2",
        "BATON_REQUEST_TIMEOUT": "1800",
    },
    "weights": {"size": "500Gi", "storageClassName": "fast-rwx"},
    "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {
            "nginx.ingress.kubernetes.io/backend-protocol": "HTTPS",
            "nginx.ingress.kubernetes.io/proxy-read-timeout": "1800",
            "nginx.ingress.kubernetes.io/upstream-hash-by": "$http_authorization",
        },
        "hosts": [{"host": HOST, "paths": [{"path": "/v1", "pathType": "Prefix"}]}],
        "tls": [{"secretName": "chat-tls", "hosts": [HOST]}],
    },
    "router": {
        "replicas": 3,
        "nodeSelector": {"pool": "cpu"},
        "env": [{"name": "BATON_ADMIN_KEY", "valueFrom": {"secretKeyRef": {"name": "admin", "key": "key"}}}],
    },
    "prefill": GPU_NODES,
    "decode": GPU_NODES,
    "monitoring": {"labels": {"release": "kube-prometheus-stack"}, "namespace": "observability"},
    "networkPolicies": {"enabled": True},
}


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return list(rendered(VALUES).values())


def named(objects: list[Object], kind: str, name: str) -> Object:
    [found] = [each for each in of_kind(objects, kind) if each["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_api_servers_accept_all_objects(objects: list[Object], version: str) -> None:
    for each in objects:
        validate(each, version)


def test_pods_are_of_the_registry_and_on_their_nodes(objects: list[Object]) -> None:
    pods = {each.owner.removeprefix("Deployment baton-"): each for each in pod_templates(objects)}
    assert pods.keys() == {"router", "prefill", "decode"}
    for name, pod in pods.items():
        [container] = pod.containers
        assert pod.spec["imagePullSecrets"] == [{"name": "registry"}]
        assert container["image"] == "registry.example.com/ai/baton:0.1.0-cuda"
        assert container["imagePullPolicy"] == "IfNotPresent"
        assert pod.spec["terminationGracePeriodSeconds"] == 1830
        if name == "router":
            assert pod.spec["nodeSelector"] == {"pool": "cpu"}
            assert container["env"][-1]["name"] == "BATON_ADMIN_KEY"
            continue
        assert pod.spec["nodeSelector"] == GPU_NODES["nodeSelector"]
        assert pod.spec["tolerations"] == GPU_NODES["tolerations"]
        assert (pod.spec["runtimeClassName"], pod.spec["priorityClassName"]) == ("nvidia", "inference")
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
        assert [each["name"] for each in container["env"]] == ["POD_IP", "NCCL_DEBUG"]
        assert GPU_NODES["extraVolumes"][0] in pod.spec["volumes"]
        assert GPU_NODES["extraVolumeMounts"][0] in container["volumeMounts"]


def test_clients_come_by_the_ingress_and_the_service_with_tls(objects: list[Object]) -> None:
    ingress = named(objects, "Ingress", "baton")
    assert ingress["metadata"]["annotations"] == VALUES["ingress"]["annotations"]
    assert ingress["spec"]["ingressClassName"] == "nginx"
    assert ingress["spec"]["tls"] == VALUES["ingress"]["tls"]
    [rule] = ingress["spec"]["rules"]
    backend = {"service": {"name": "baton", "port": {"name": "http"}}}
    assert rule["host"] == HOST
    assert rule["http"]["paths"] == [{"path": "/v1", "pathType": "Prefix", "backend": backend}]
    service = named(objects, "Service", "baton")
    assert service["metadata"]["annotations"] == {"example.com/internal": "true"}
    assert service["spec"]["type"] == "LoadBalancer"
    assert {port["name"]: port["appProtocol"] for port in service["spec"]["ports"]} == {
        "http": "https",
        "grpc": "https",
    }
    [router] = [pod for pod in pod_templates(objects) if pod.owner == "Deployment baton-router"]
    [container] = router.containers
    files = {"--ssl-certfile=/etc/baton/tls/tls.crt", "--ssl-keyfile=/etc/baton/tls/tls.key"}
    assert files <= set(container["args"])
    [mount] = [each for each in container["volumeMounts"] if each["mountPath"] == "/etc/baton/tls"]
    [volume] = [each for each in router.spec["volumes"] if each["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == "router-tls"
    assert "tls" not in {volume["name"] for pod in pod_templates(objects) for volume in pod.spec["volumes"]
                         if pod is not router and pod.owner != router.owner}  # fmt: skip


def test_the_operator_selects_all_that_is_for_it(objects: list[Object]) -> None:
    """An operator leaves out rules without its labels, and then autoscalers have no metrics."""
    of_operator = [each for each in objects if each["apiVersion"].startswith("monitoring.coreos.com/")]
    assert {(each["kind"], each["metadata"]["name"]) for each in of_operator} == {
        ("ServiceMonitor", "baton"),
        ("PrometheusRule", "baton"),
        ("PrometheusRule", "baton-autoscaling"),
    }
    for each in of_operator:
        assert each["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    assert len(of_kind(objects, "HorizontalPodAutoscaler")) == 2
    claim = named(objects, "PersistentVolumeClaim", "baton-weights")
    assert claim["spec"]["storageClassName"] == "fast-rwx"
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_a_private_model_comes_from_its_hub() -> None:
    worker = {
        "env": [{"name": "HF_HUB_CACHE", "value": "/scratch"}],
        "extraVolumes": GPU_NODES["extraVolumes"],
        "extraVolumeMounts": GPU_NODES["extraVolumeMounts"],
    }
    values = {
        "settings": {"BATON_MODEL": "meta-llama/Llama-3.1-8B-Instruct", "HF_HUB_OFFLINE": None},
        "secrets": {"hub": "hub"},
        "weights": {"enabled": False, "create": False},
        "prefill": worker,
        "decode": worker,
        "networkPolicies": {"enabled": True},
    }
    objects = list(rendered(values).values())
    for each in objects:
        validate(each, VERSIONS[0])
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    for pod in pod_templates(objects):
        [container] = pod.containers
        assert token in container["env"], f"{pod}: a router reads the tokenizer"
    assert "HF_HUB_OFFLINE" not in named(objects, "ConfigMap", "baton-settings")["data"]
    hub = named(objects, "NetworkPolicy", "baton-hub")["spec"]["egress"]
    assert hub == [{"ports": [{"port": 443, "protocol": "TCP"}]}]


def test_a_ray_cluster_takes_them_too() -> None:
    values = copy.deepcopy(VALUES) | {
        "workload": "RayCluster",
        "secrets": {"tls": "router-tls", "hub": "hub"},
    }
    values["settings"]["HF_HUB_OFFLINE"] = None
    values["ray"] = {
        "front": {"env": [{"name": "A", "value": "b"}]},
        "head": {"env": [{"name": "C", "value": "d"}]},
    }
    objects = list(rendered(values).values())
    for each in objects:
        validate(each, VERSIONS[1])
    front, head, worker = pod_templates(objects)
    for container in front.containers:
        names = [each["name"] for each in container["env"]]
        assert {"HF_TOKEN", "A"} <= set(names)
        assert "HF_HUB_OFFLINE" not in names
    assert "--ssl-certfile=/etc/baton/tls/tls.crt" in front.spec["containers"][0]["args"][0]
    assert "C" in {each["name"] for each in head.containers[0]["env"]}
    assert {"HF_TOKEN", "NCCL_DEBUG", "RAY_worker_niceness"} <= {
        each["name"] for each in worker.containers[0]["env"]
    }
    assert worker.spec["runtimeClassName"] == "nvidia"
    assert {c["imagePullPolicy"] for pod in (front, head, worker) for c in pod.containers} == {"IfNotPresent"}
    config = named(objects, "ScrapeConfig", "baton-workers")
    assert config["metadata"]["labels"]["release"] == "kube-prometheus-stack"


@pytest.mark.parametrize(
    ("values", "drain", "grace", "route"),
    [
        ({}, "600", 630, "610s"),
        ({"settings": {"BATON_REQUEST_TIMEOUT": "1200.5"}}, "1201", 1231, "1211s"),
        ({"router": {"args": ["--request-timeout=60"]}}, "60", 90, "70s"),
        ({"settings": {"BATON_REQUEST_TIMEOUT": "200000"}}, "86400", 86430, "3334m"),
        ({"settings": {"BATON_REQUEST_TIMEOUT": "1200", "BATON_DRAIN_TIMEOUT": "90"}}, "90", 120, "1210s"),
    ],
)
def test_drains_graces_and_the_gateway_follow_the_longest_request(
    values: dict[str, Any], drain: str, grace: int, route: str
) -> None:
    objects = list(rendered(values | {"gateway": {"enabled": True}}).values())
    assert named(objects, "ConfigMap", "baton-settings")["data"]["BATON_DRAIN_TIMEOUT"] == drain
    graces = {pod.spec["terminationGracePeriodSeconds"] for pod in pod_templates(objects)}
    assert graces == {grace}
    [rule] = named(objects, "HTTPRoute", "baton")["spec"]["rules"]
    assert rule["timeouts"] == {"request": route}


def test_clients_stay_with_the_router_that_has_their_responses_and_reach_no_admin_port() -> None:
    objects = list(rendered({}).values())
    clients, inside = named(objects, "Service", "baton"), named(objects, "Service", "baton-router")
    assert clients["spec"]["sessionAffinity"] == "ClientIP"
    assert {port["port"] for port in clients["spec"]["ports"]} == {8000, 8001}
    assert {port["port"] for port in inside["spec"]["ports"]} == {8002}
    without = named(list(rendered({"service": {"sessionAffinity": "None"}}).values()), "Service", "baton")
    assert "sessionAffinity" not in without["spec"]
