"""The examples of docs/kubernetes.md do what the text says."""

import os
import re
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml

from .conftest import K8S, ROOT, Object, build, of_kind, pod_templates, settings_of
from .test_helm import rendered
from .test_schemas import VERSIONS, validate

pytestmark = pytest.mark.all

TEXT = (ROOT / "docs" / "kubernetes.md").read_text()
TUTORIAL = (ROOT / "docs" / "quickstart-cluster.md").read_text()
EXAMPLES = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.S)]
[VALUES] = (yaml.safe_load(block) for block in re.findall(r"```yaml values\n(.*?)```", TEXT, re.S))


@pytest.fixture(scope="module")
def customized(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    """`plain` with all the customizations of the text in one overlay."""
    directory = tmp_path_factory.mktemp("custom")
    together: dict[str, Any] = {}
    for example in EXAMPLES:
        for key in example.keys() & {"images", "patches", "configMapGenerator"}:
            together.setdefault(key, []).extend(example[key])
    together["resources"] = [os.path.relpath(K8S / "overlays" / "plain", directory)]
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(together))
    return build(directory)


def test_an_overlay_of_ones_own(customized: list[Object]) -> None:
    settings = settings_of(customized)
    assert settings["data"]["BATON_SERVED_MODEL_NAME"] == "llama-3.1-8b"
    assert settings["data"]["BATON_KV_CONNECTOR"] == "tcp", "what is not overridden stays"
    drain = int(settings["data"]["BATON_DRAIN_TIMEOUT"])
    assert drain == int(settings["data"]["BATON_REQUEST_TIMEOUT"]) == 1800
    for pod in pod_templates(customized):
        assert pod.spec["terminationGracePeriodSeconds"] == drain + 30
        [weights] = [volume for volume in pod.spec["volumes"] if volume["name"] == "weights"]
        assert weights.keys() == {"name", "image"}
        for container in pod.containers:
            assert container["image"] == "REGISTRY/baton:0.1.0-cuda"
    for each in of_kind(customized, "Deployment"):
        kubernetes_validate.validate(each, "1.35", strict=True)


def test_the_page_has_the_ports_of_units_and_chart() -> None:
    section = (ROOT / "docs" / "secure.md").read_text().partition("## Ports\n")[2].partition("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    units, chart = table[0].index("units"), table[0].index("chart")
    commands = [
        (units, re.findall(r"^ExecStart=\S+ (.*)$", unit.read_text(), re.M)[0].split())
        for unit in (ROOT / "deploy" / "systemd").glob("*.service")
    ]
    values = {"gateway": {"enabled": True, "className": "istio"}, "store": {"enabled": True}}
    for pod in pod_templates(list(rendered(values).values())):
        commands += [(chart, container["args"]) for container in pod.containers]
    assert len(commands) == 4 + 6
    for column, (role, *flags) in commands:
        owner = "worker" if role in ("prefill", "decode") else role
        for name, port in (flag.split("=") for flag in flags if re.match(r"--([\w-]+-)?port=", flag)):
            [shown] = [row[column] for row in table if owner in row[0] and re.search(rf"{name}\b", row[1])]
            assert port in re.findall(r"\d+", shown), (role, name)


def test_kv_is_encrypted_as_the_page_says() -> None:
    [value] = re.findall(r"--set-string settings.(\w+=\w+)`", (ROOT / "docs" / "secure.md").read_text())
    name, _, text = value.partition("=")
    objects = rendered({"settings": {name: text}})
    [settings] = [each for (kind, key), each in objects.items() if kind == "ConfigMap" and "settings" in key]
    assert settings["data"]["BATON_KV_ENCRYPT"] == "true"


def test_the_values_of_a_cluster_render() -> None:
    objects = list(rendered(VALUES).values())
    for each in objects:
        validate(each, VERSIONS[0])
    assert {"Ingress", "HorizontalPodAutoscaler"} <= {each["kind"] for each in objects}


def test_the_job_that_fills_the_volume(overlays: dict[str, list[Object]]) -> None:
    [job] = [example for example in EXAMPLES if example.get("kind") == "Job"]
    kubernetes_validate.validate(job, "1.32", strict=True)
    claims = {each["metadata"]["name"] for each in of_kind(overlays["plain"], "PersistentVolumeClaim")}
    [volume] = [v for v in job["spec"]["template"]["spec"]["volumes"] if v["name"] == "weights"]
    assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_every_overlay_and_every_file_that_is_named_exists(overlays: dict[str, list[Object]]) -> None:
    for path in re.findall(r"deploy/[\w./-]+\w", TEXT):
        assert (ROOT / path).exists(), path
    described = set(re.findall(r"^\| `([\w-]+)` \|", TEXT, re.M))
    assert overlays.keys() <= described


def test_the_documented_secrets_are_those_of_the_pods(overlay: list[Object]) -> None:
    made = {
        (name, key)
        for name, key in re.findall(r"create secret generic (\S+) --from-file=([\w.-]+)", TUTORIAL)
    } | {("baton", "auth_token")}  # KubeRay's own
    for pod in pod_templates(overlay):
        wanted = {
            (v["valueFrom"]["secretKeyRef"]["name"], v["valueFrom"]["secretKeyRef"]["key"])
            for container in pod.containers
            for v in container.get("env", [])
            if "secretKeyRef" in v.get("valueFrom", {})
        }
        mounted = {v["secret"]["secretName"] for v in pod.spec["volumes"] if "secret" in v}
        assert wanted <= made
        assert mounted <= {name for name, _ in made}
    assert {("baton-cluster", "secret"), ("baton-api-keys", "keys.toml")} <= made, "the files that flags name"


def test_install_hints_name_the_source_directory_and_an_extra_that_exists() -> None:
    """`pip install baton` would install another project, and Baton is not published."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    hints = 0
    folders = [
        path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "tests"
    ]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *sources]:
        text = path.read_text()
        assert not re.search(r"pip install \W*baton", text), path
        for named in re.findall(r"pip install [^`\n]*'\.\[([\w,]+)\]'", text):
            assert set(named.split(",")) <= extras.keys(), path
            hints += 1
    assert hints, "none was found"
