"""The component that adds BatonConnector to Deployments of `vllm serve`."""

import json
import os
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from baton.rpc.auth import SECRET_VARIABLE
from baton.vllm_worker.transfer_process import Settings

from .conftest import K8S, ROOT, Object, build, of_kind, pod_templates
from .test_schemas import VERSIONS

pytestmark = pytest.mark.all

MINE: Object = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "spec": {
        "selector": {"matchLabels": {"app": "vllm"}},
        "template": {
            "metadata": {"labels": {"app": "vllm"}},
            "spec": {
                "containers": [
                    {
                        "name": "vllm",
                        "image": "vllm/vllm-openai:v0.30.0",
                        "args": ["/models/model", "--port=8000"],
                    }
                ]
            },
        },
    },
}


@pytest.fixture(scope="module")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Object]:
    """A user's Deployments, in the overlay that docs/kubernetes.md shows."""
    directory = tmp_path_factory.mktemp("mine")
    names = {"prefill": "prefill", "decode": "decode", "other": ""}
    objects = [
        MINE | {"metadata": {"name": name, "labels": {"baton/vllm": label}}} for name, label in names.items()
    ]
    (directory / "vllm.yaml").write_text(yaml.safe_dump_all(objects))
    [shown] = re.findall(
        r"```yaml\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text().split("\n## vLLM\n")[1], re.S
    )
    overlay = yaml.safe_load(shown)
    overlay["components"] = [
        os.path.relpath(K8S.parents[1] / path.removeprefix("baton/"), directory)
        for path in overlay["components"]
    ]
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return {each["metadata"]["name"]: each for each in of_kind(build(directory), "Deployment")}


@pytest.mark.parametrize(("name", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_pods_have_the_connector(deployments: dict[str, Object], name: str, role: str) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(deployments[name], version, strict=True)
    [pod] = pod_templates([deployments[name]])
    [container] = pod.containers
    assert container["image"] == "baton:0.1.0-vllm"
    *mine, added = container["args"]
    assert mine == MINE["spec"]["template"]["spec"]["containers"][0]["args"]
    flag, _, text = added.partition("=")
    config: dict[str, Any] = json.loads(text)
    assert flag == "--kv-transfer-config"
    assert config["kv_role"] == role
    module = Path(*config["kv_connector_module_path"].split(".")).with_suffix(".py")
    assert f"class {config['kv_connector']}(" in (ROOT / module).read_text()
    environment = {each["name"]: each["valueFrom"] for each in container["env"]}
    assert environment[SECRET_VARIABLE] == {"secretKeyRef": {"name": "baton-cluster", "key": "secret"}}
    settings = Settings(**config["kv_connector_extra_config"])
    assert settings.host.strip("$()") in environment
    assert {"name": "kv", "containerPort": settings.port} in container["ports"]


def test_other_pods_keep_their_options(deployments: dict[str, Object]) -> None:
    [pod] = pod_templates([deployments["other"]])
    [container] = pod.containers
    assert "env" not in container
    assert container["args"] == MINE["spec"]["template"]["spec"]["containers"][0]["args"]
