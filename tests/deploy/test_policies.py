"""What a careful cluster demands of every pod, those of the RayCluster included."""

import re
from pathlib import Path

import pytest

from .conftest import Object, PodTemplate, of_kind, pod_templates, settings_of

pytestmark = pytest.mark.all

DRAIN_SECONDS = 600
"""As long as a request may take."""


def all_pods(overlays: dict[str, list[Object]]) -> list[PodTemplate]:
    return [pod for objects in overlays.values() for pod in pod_templates(objects)]


def lasting(pod: PodTemplate) -> list[Object]:
    """Its containers that run as long as the pod."""
    init = [c for c in pod.spec.get("initContainers", []) if c.get("restartPolicy") == "Always"]
    return [*init, *pod.spec["containers"]]


def test_images_have_a_version(overlay: list[Object]) -> None:
    for pod in pod_templates(overlay):
        for container in pod.containers:
            assert re.fullmatch(r"baton:\d+\.\d+\.\d+-(cpu|cuda|vllm)", container["image"]), f"{pod}"


def test_resources_are_bounded(overlay: list[Object]) -> None:
    for pod in pod_templates(overlay):
        for container in pod.containers:
            resources = container["resources"]
            assert {"cpu", "memory"} <= resources["requests"].keys(), f"{pod}"
            assert resources["limits"]["memory"] == resources["requests"]["memory"], (
                f"{pod}: never evicted first"
            )
        for volume in pod.spec["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": 0}), f"{pod}: {volume['name']}"


def test_long_running_containers_have_probes(overlay: list[Object]) -> None:
    for pod in pod_templates(overlay):
        for container in lasting(pod):
            probes = {"startupProbe", "readinessProbe", "livenessProbe"}
            assert probes <= container.keys(), f"{pod} {container['name']}"


def test_roles_are_probed_where_no_certificate_is_asked_for_and_clients_cannot_connect(
    overlay: list[Object],
) -> None:
    for pod in pod_templates(overlay):
        for container in lasting(pod):
            if container["name"] not in ("router", "worker", "serve"):
                continue
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            expected = {"httpGet": {"path": "/health", "port": ports["metrics"]}}
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if container["name"] == "router" and probe == "readinessProbe":
                    expected["httpGet"]["path"] = "/routable"  # not restarted if it reaches no worker
                assert expected.items() <= container[probe].items(), f"{pod}"


def test_a_picker_is_ready_when_it_has_found_a_router(overlays: dict[str, list[Object]]) -> None:
    [picker] = [pod for pod in pod_templates(overlays["gateway"]) if pod.owner == "Deployment baton-picker"]
    [container] = picker.containers
    services = {
        probe: container[f"{probe}Probe"]["grpc"]["service"] for probe in ("startup", "liveness", "readiness")
    }
    assert services == {"startup": "liveness", "liveness": "liveness", "readiness": "readiness"}


def test_the_pool_of_the_gateway_selects_the_routers_and_names_the_picker(
    overlays: dict[str, list[Object]],
) -> None:
    [pool] = of_kind(overlays["gateway"], "InferencePool")
    wanted = pool["spec"]["selector"]["matchLabels"].items()
    [router] = [pod for pod in pod_templates(overlays["gateway"]) if wanted <= pod.labels.items()]
    ports = {port["name"]: port["containerPort"] for c in router.containers for port in c["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    reference = pool["spec"]["endpointPickerRef"]
    [service] = [
        s for s in of_kind(overlays["gateway"], "Service") if s["metadata"]["name"] == reference["name"]
    ]
    assert [port["port"] for port in service["spec"]["ports"]] == [reference["port"]["number"]]
    [route] = of_kind(overlays["gateway"], "HTTPRoute")
    [backend] = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])


def test_routers_learn_within_a_second_that_a_worker_is_ready(overlays: dict[str, list[Object]]) -> None:
    workers = [p for p in all_pods(overlays) if p.spec["containers"][0]["name"] == "worker"]
    assert {p.spec["containers"][0]["readinessProbe"]["periodSeconds"] for p in workers} == {1}


def test_there_is_time_to_drain(overlay: list[Object]) -> None:
    settings = settings_of(overlay)
    assert settings["data"]["BATON_DRAIN_TIMEOUT"] == str(DRAIN_SECONDS)
    for pod in pod_templates(overlay):
        stops = [c["lifecycle"]["preStop"] for c in pod.containers if "lifecycle" in c]
        waited = max((stop.get("sleep", {}).get("seconds", 0) for stop in stops), default=0)
        if "head" not in pod.owner:  # Ray's head holds no stream
            assert pod.spec["terminationGracePeriodSeconds"] >= DRAIN_SECONDS + waited + 10, f"{pod}"
        for container in pod.containers:
            if container["name"] in ("router", "worker", "serve", "picker"):
                assert "preStop" in container["lifecycle"], f"{pod}"


def test_a_rollout_has_not_failed_while_a_worker_drains(overlay: list[Object]) -> None:
    """Where no GPU is free a successor waits for that of the worker."""
    for each in of_kind(overlay, "Deployment"):
        if each["metadata"].get("labels", {}).get("baton/worker") == "true":
            grace = each["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            assert each["spec"]["progressDeadlineSeconds"] == grace + 600


def test_roles_log_json(overlay: list[Object]) -> None:
    """As docs/observability.md shows, and as collectors read it."""
    assert settings_of(overlay)["data"]["BATON_LOG_FORMAT"] == "json"


def test_nothing_is_privileged(overlay: list[Object]) -> None:
    for pod in pod_templates(overlay):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys(), f"{pod}"
        assert all("hostPath" not in volume for volume in pod.spec["volumes"]), f"{pod}"
        for container in pod.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, f"{pod} {container['name']}"
            assert all("hostPort" not in port for port in container.get("ports", [])), f"{pod}"


def test_rays_autoscaler_is_as_unprivileged_and_bounded(overlays: dict[str, list[Object]]) -> None:
    [ray] = of_kind(overlays["kuberay"], "RayCluster")
    options = ray["spec"]["autoscalerOptions"]
    head = next(pod_templates([ray]))
    assert options["securityContext"] == head.spec["containers"][0]["securityContext"]
    assert options["resources"]["limits"]["memory"]


def test_containers_write_only_to_volumes(overlay: list[Object]) -> None:
    """The root is read-only: /tmp takes sockets and caches, /dev/shm is memory."""
    for pod in pod_templates(overlay):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for container in pod.containers:
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            assert "emptyDir" in mounts["/tmp"], f"{pod}"
            if container["name"] not in ("router", "picker"):
                assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory", f"{pod}"


def test_secrets_are_referred_to_never_written(overlay: list[Object]) -> None:
    assert not of_kind(overlay, "Secret")
    for pod in pod_templates(overlay):
        for container in pod.containers:
            for variable in container.get("env", []):
                if re.search("KEY|TOKEN|SECRET|PASSWORD", variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"], f"{pod} {variable['name']}"
            assert not re.search("api-key=|secret=", " ".join(container.get("args", []))), f"{pod}"
    assert not any(
        re.search("KEY|TOKEN|SECRET", key) for each in of_kind(overlay, "ConfigMap") for key in each["data"]
    )


def test_keys_of_clients_come_from_a_file_that_follows_its_secret(overlay: list[Object]) -> None:
    """A variable, or a file mounted by a subPath, would stay as it was when the pod started."""
    found = 0
    for pod in pod_templates(overlay):
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for container in pod.containers:
            named = re.search(r"--api-key-file=(\S+)/keys\.toml", " ".join(container.get("args", [])))
            assert (named is not None) == (container["name"] in ("router", "serve")), f"{pod}"
            if named:
                [mount] = [m for m in container["volumeMounts"] if m["mountPath"] == named[1]]
                assert mount.keys() == {"name", "mountPath", "readOnly"}
                assert volumes[mount["name"]]["secret"]["secretName"] == "baton-api-keys"
                found += 1
    assert found == 1


def test_only_the_router_has_a_token_and_it_may_only_look_at_endpoints(overlay: list[Object]) -> None:
    accounts = of_kind(overlay, "ServiceAccount")
    assert all(account["automountServiceAccountToken"] is False for account in accounts)
    for pod in pod_templates(overlay):
        if "head" in pod.owner:  # KubeRay makes an account for it, for Ray's autoscaler
            assert "serviceAccountName" not in pod.spec
            continue
        assert pod.spec["serviceAccountName"] in {account["metadata"]["name"] for account in accounts}
        discovers = any("--kubernetes-service" in arg for c in pod.containers for arg in c.get("args", []))
        assert pod.spec["automountServiceAccountToken"] is discovers, f"{pod}"
    assert not of_kind(overlay, "ClusterRole")
    for role in of_kind(overlay, "Role"):
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
        ]


def test_no_service_becomes_a_flag(overlay: list[Object]) -> None:
    """A Service called baton would be BATON_PORT=tcp://… in every pod."""
    for pod in pod_templates(overlay):
        assert pod.spec["enableServiceLinks"] is False, f"{pod}"


def test_pools_are_spread_and_never_lost_to_a_drained_node_at_once(overlay: list[Object]) -> None:
    for each in of_kind(overlay, "Deployment"):
        if each["metadata"]["name"] == "baton-front":
            continue
        labels = each["spec"]["selector"]["matchLabels"]
        [spread] = each["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"] == labels
        budgets = [dict(b["spec"]) for b in of_kind(overlay, "PodDisruptionBudget")]
        [budget] = [b for b in budgets if b["selector"]["matchLabels"] == labels]
        # One pod at a time, of any number: a drain neither hangs at the only pod nor takes four of five.
        assert budget.pop("selector")
        assert budget == {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow"}


def test_an_upgrade_takes_no_pools_only_worker_unsaid(made: Path, overlays: dict[str, list[Object]]) -> None:
    name = "single-gpu"
    told = (made / name / "kustomization.yaml").read_text()
    assert "an upgrade ends both workers before it starts new ones" in " ".join(told.replace("#", "").split())
    for overlay in overlays.keys() - {name}:
        for each in of_kind(overlays[overlay], "Deployment"):
            if each["metadata"].get("labels", {}).get("baton/worker") != "true":
                continue
            update = each["spec"]["strategy"]["rollingUpdate"]
            assert update == {"maxUnavailable": "25%", "maxSurge": 1}, f"{overlay}: it rounds the share down"
        for group in of_kind(overlays[overlay], "RoleBasedGroup"):
            for role in group["spec"]["roles"][:2]:
                assert role["rolloutStrategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def test_selectors_select_their_pods(overlay: list[Object]) -> None:
    pods = list(pod_templates(overlay))
    for each in of_kind(overlay, "Service"):
        wanted = each["spec"]["selector"].items()
        chosen = [pod for pod in pods if wanted <= pod.labels.items()]
        assert len(chosen) == 1, each["metadata"]["name"]
        names = {port["name"] for c in chosen[0].containers for port in c.get("ports", [])}
        assert {port["targetPort"] for port in each["spec"]["ports"]} <= names
    for each in of_kind(overlay, "HorizontalPodAutoscaler"):
        target = each["spec"]["scaleTargetRef"]["name"]
        [deployment] = [d for d in of_kind(overlay, "Deployment") if d["metadata"]["name"] == target]
        assert "replicas" not in deployment["spec"], "else every apply would undo the autoscaler"


def test_claims_and_settings_that_pods_name_exist(overlay: list[Object]) -> None:
    claims = {each["metadata"]["name"] for each in of_kind(overlay, "PersistentVolumeClaim")}
    settings = {each["metadata"]["name"] for each in of_kind(overlay, "ConfigMap")}
    for pod in pod_templates(overlay):
        for volume in pod.spec["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims, f"{pod}"
        for container in pod.containers:
            for source in container.get("envFrom", []):
                assert source["configMapRef"]["name"] in settings, f"{pod}"


@pytest.mark.parametrize(
    ("name", "resource"),
    [
        ("plain", "nvidia.com/gpu"),
        ("single-gpu", "nvidia.com/gpu.shared"),
        ("tensor-parallel", "nvidia.com/gpu"),
        ("vllm-tensor-parallel", "nvidia.com/gpu"),
        ("vllm-data-parallel", "nvidia.com/gpu"),
    ],
)
def test_every_worker_has_its_device(overlays: dict[str, list[Object]], name: str, resource: str) -> None:
    for pod in pod_templates(overlays[name]):
        [container] = pod.containers
        devices = {key for key in container["resources"]["limits"] if "/" in key}
        if container["name"] == "router":
            assert not devices
        else:
            assert devices == {resource}


@pytest.mark.parametrize(
    ("name", "workers_of_a_pod"),
    [("tensor-parallel", 1), ("vllm-tensor-parallel", 1), ("vllm-data-parallel", 2)],
)
def test_a_worker_has_a_gpu_for_each_rank(
    overlays: dict[str, list[Object]], name: str, workers_of_a_pod: int
) -> None:
    objects = overlays[name]
    settings = settings_of(objects)["data"]
    ranks = int(settings["BATON_TENSOR_PARALLEL_SIZE"])
    assert ranks > 1
    workers = ("Deployment baton-prefill", "Deployment baton-decode")
    pods = [pod for pod in pod_templates(objects) if pod.owner in workers]
    assert len(pods) == 2
    for pod in pods:
        [container] = pod.containers
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == workers_of_a_pod * ranks
        [shm] = [volume["emptyDir"] for volume in pod.spec["volumes"] if volume["name"] == "shm"]
        assert shm == {"medium": "Memory", "sizeLimit": "4Gi"}, "NCCL's, between GPUs without peer access"
