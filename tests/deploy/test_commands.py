"""Every command line in the manifests is one that the program it names would take."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from baton.cluster.cli import app
from baton.cluster.options.parameters import ENV_PREFIX, KNOWN
from tests.within import WITHIN

from .conftest import Object, PodTemplate, of_kind, pod_templates, settings_of

pytestmark = pytest.mark.all

# What an image sets as its entry point; a container's `args` follow it.
ENTRYPOINT = ["baton"]


def command_lines(container: Object) -> Iterator[list[str]]:
    """What a container runs: its own command, lines of its script, and its hooks."""
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    if hook:
        yield hook
    command = container.get("command", ENTRYPOINT)
    if command[:2] != ["/bin/bash", "-c"]:
        if {"command", "args"} & container.keys():  # KubeRay writes those of its own nodes
            yield [*command, *container.get("args", [])]
        return
    [script] = container["args"]
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] in ("baton", "ray"):
            yield words[: words.index("||")] if "||" in words else words


def environment(overlay: list[Object], container: Object) -> dict[str, str]:
    """The variables that are known before a pod runs."""
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(overlay, "ConfigMap")}
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]
    return found | {v["name"]: v.get("value", "from elsewhere") for v in container.get("env", [])}


def here(text: str, container: Object, root: Path) -> str:
    """`text` with the mounts of a container moved to files and directories that exist."""
    mounts = "|".join(re.escape(mount["mountPath"]) for mount in container["volumeMounts"])
    text = re.sub(rf"(^|=)({mounts})/", rf"\1{root}\2/", text)
    moved = re.search(rf"{re.escape(str(root))}/\S*", text)
    if moved:
        Path(moved[0]).parent.mkdir(parents=True, exist_ok=True)
        Path(moved[0]).touch()
    return text.replace("$(POD_IP)", "10.0.0.1")


@cache
def group() -> TyperGroup:
    made = typer.main.get_command(app)
    assert isinstance(made, TyperGroup)
    return made


def parse(words: list[str]) -> None:
    program, command, *arguments = words
    assert program == "baton", words
    group().commands[command].make_context(command, arguments)


def test_baton_takes_every_flag_and_variable(
    overlay: list[Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = 0
    for pod in pod_templates(overlay):
        for container in pod.containers:
            with monkeypatch.context() as patched:
                for name, value in environment(overlay, container).items():
                    if name.startswith(ENV_PREFIX):
                        assert name.removeprefix(ENV_PREFIX).lower() in KNOWN, f"{pod}: {name}"
                    patched.setenv(name, here(value, container, tmp_path))
                for words in command_lines(container):
                    if words[0] == "baton":
                        lines += 1
                        parse([here(word, container, tmp_path) for word in words])
    assert lines >= 3


@pytest.mark.parametrize(
    ("codes", "ran", "ends"),
    [
        ("0", ["serve"], 0),
        ("1", ["serve"], 1),
        ("2", ["serve"], 2),
        ("3 0", ["serve", "stop", "serve"], 0),
        ("3 2", ["serve", "stop", "serve"], 2),
    ],
)
def test_the_front_of_kuberay_stops_only_a_cluster_with_other_settings(
    overlays: dict[str, list[Object]], tmp_path: Path, codes: str, ran: list[str], ends: int
) -> None:
    [front] = [pod for pod in pod_templates(overlays["kuberay"]) if pod.owner == "Deployment baton-front"]
    [serve] = front.spec["containers"]
    (tmp_path / "codes").write_text(codes)
    told = "{ read -r code rest <codes; echo $rest >codes; return $code; }"
    baton = f"baton() {{ echo $1 >>ran; [ $1 = stop ] || {told}; }}"
    script = f"{baton}\n{serve['args'][0].replace('sleep infinity & wait', 'exit 0')}"
    done = subprocess.run(
        [*serve["command"], script], cwd=tmp_path, capture_output=True, timeout=WITHIN, check=False
    )
    assert (tmp_path / "ran").read_text().split() == ran
    assert done.returncode == ends, done.stderr


def test_ray_takes_every_flag(overlays: dict[str, list[Object]]) -> None:
    from ray.scripts.scripts import start

    [ray] = of_kind(overlays["kuberay"], "RayCluster")
    known = {name for parameter in start.params for name in parameter.opts}
    groups = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
    for group in groups:
        assert {f"--{name}" for name in group["rayStartParams"]} <= known
    nodes = [
        words
        for pod in pod_templates(overlays["kuberay"])
        for container in pod.containers
        for words in command_lines(container)
        if words[0] == "ray"
    ]
    assert [words[:2] for words in nodes] == [["ray", "start"]]
    for words in nodes:
        start.make_context("start", words[2:])


def test_ports_are_those_that_are_declared(overlays: dict[str, list[Object]]) -> None:
    for container in (c for pod in pods_of_roles(overlays) for c in pod.containers):
        of_groups = re.compile(r".*-\d+")  # of the other workers of a group, from the first one on
        declared = {
            port["name"]: port["containerPort"]
            for port in container["ports"]
            if not of_groups.fullmatch(port["name"])
        }
        for words in command_lines(container):
            given = dict(re.findall(r"--(\S*)port=(\d+)", " ".join(words)))
            role = words[1]
            names = {
                "": "grpc" if role != "router" else "http",
                "grpc-": "grpc",
                "kv-": "kv",
                "metrics-": "metrics",
                "admin-": "metrics",
            }
            assert {names[flag]: int(port) for flag, port in given.items()} == declared


@pytest.mark.parametrize("name", ["store", "store-ha", "rbg"])
def test_stores_and_workers_use_one_store(overlays: dict[str, list[Object]], name: str) -> None:
    [store] = [pod for pod in pod_templates(overlays[name]) if pod.owner == "StatefulSet baton-store"]
    flags = [flag.partition("=") for flag in store.containers[0]["args"] if "=" in flag]
    given = {flag: value for flag, _, value in flags}
    assert len(given) == len(flags), "each once"
    assert given["--kv-store"] == settings_of(overlays[name])["data"]["BATON_KV_STORE"]
    assert given["--size"] == "60GiB", "within the memory of the pod"


def pods_of_roles(overlays: dict[str, list[Object]]) -> list[PodTemplate]:
    names = ("plain", "rdma", "tensor-parallel", "vllm", "cpu-demo")
    return [pod for name in names for pod in pod_templates(overlays[name])]
