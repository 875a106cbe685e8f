"""Rules, alerts and autoscalers use series that exist."""

import re
from dataclasses import fields
from typing import Any

import pytest
import yaml

from baton.engine import EngineStats, ExpertStats, OffloadStats, SpeculationStats
from baton.engine.api.stats import EncoderStats, MemoryStats
from baton.kv_names import Tier
from baton.rpc import worker_pb2 as pb
from baton.worker.messages import EngineStatus
from baton.worker.service_process.metrics import Metrics
from baton.worker.stats import RequestCounts

from .conftest import ROOT, Object, of_kind

pytestmark = pytest.mark.all

GRAFANA = ROOT / "deploy" / "grafana"
DOCUMENTED = ROOT / "docs" / "reference" / "metrics.md"
ADAPTER = ROOT / "deploy" / "helm" / "prometheus-adapter.yaml"


def exported(role: str) -> set[str]:
    """The series of a worker's engine."""
    values: dict[str, Any] = {field.name: 1 for field in fields(EngineStats)}
    values["experts"] = ExpertStats([1], 1.0, 1.0)
    values["offload"] = [OffloadStats(Tier.HOST, 1, 1, 1, 1, 1, 1, 1, 1)]
    values["memory"] = MemoryStats(1, 1, 1, 1, 1, 1.0)
    values["speculation"] = SpeculationStats(1, 1, 1)
    values["encoder"] = EncoderStats(1, 1, 1.0, 1, 1, 1, 1.0, 1.0)
    stats = EngineStats(**values)
    counts = RequestCounts()
    metrics = Metrics(role, "model")
    metrics.engine_status = EngineStatus(question=1, stats=stats, counts=counts, told=pb.WorkerStatus())
    return {sample.name for family in metrics.registry.collect() for sample in family.samples}


def groups(objects: list[Object], name: str) -> list[Object]:
    found = {each["metadata"]["name"]: each["spec"]["groups"] for each in of_kind(objects, "PrometheusRule")}
    return found[name]


def rules(objects: list[Object]) -> dict[str, str]:
    """What the autoscaler is given: expressions by what they record."""
    return {r["record"]: r["expr"] for group in groups(objects, "baton-autoscaling") for r in group["rules"]}


@pytest.mark.parametrize("overlay", ["plain", "encoders"], indirect=True)
def test_rules_read_what_services_are_scraped_for(overlay: list[Object]) -> None:
    services = {service["metadata"]["name"] for service in of_kind(overlay, "Service")}
    for name, expression in rules(overlay).items():
        read = re.findall(r'([a-z_]+:[a-z_]+){job="([a-z-]+)"}', expression)
        assert read, name
        assert len(read) == len(re.findall(r"[a-z_]+:[a-z_]+", expression)), f"{name}: each of one job"
        for series, job in read:
            assert job in services, name
            if job == "baton-router":
                assert f"`{series}`" in DOCUMENTED.read_text(), name
            else:
                assert series in exported(job.removeprefix("baton-")), name


@pytest.mark.parametrize("overlay", ["plain", "encoders"], indirect=True)
def test_autoscalers_read_what_rules_record_and_the_adapter_offers(overlay: list[Object]) -> None:
    values = yaml.safe_load(ADAPTER.read_text())
    [rule] = values["rules"]["custom"]
    pattern = re.search(r'__name__=~"([^"]*)"', rule["seriesQuery"])
    assert pattern
    recorded = rules(overlay)
    read = set()
    for scaler in of_kind(overlay, "HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            name = metric["pods"]["metric"]["name"]
            read.add(name)
            assert f'job="{scaler["metadata"]["name"]}"' in recorded[name]
    assert read == recorded.keys()
    assert all(re.fullmatch(pattern[1], name) for name in read)


def test_what_is_scraped_is_a_port_of_the_services(overlay: list[Object]) -> None:
    for monitor in of_kind(overlay, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        services = [s for s in of_kind(overlay, "Service") if wanted <= s["metadata"]["labels"].items()]
        assert services
        ports = [{port["name"] for port in service["spec"]["ports"]} for service in services]
        scraped = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
        assert all(scraped & each for each in ports)
        assert scraped == {name for each in ports for name in each if name.startswith("metrics")}


@pytest.mark.parametrize("name", ["plain", "kuberay", "kv-network", "single-gpu"])
def test_alerts_and_dashboards_are_those_of_grafana(overlays: dict[str, list[Object]], name: str) -> None:
    wanted = yaml.safe_load((GRAFANA / "rules.yaml").read_text())
    assert groups(overlays[name], "baton") == wanted["groups"]
    [shown] = [m for m in of_kind(overlays[name], "ConfigMap") if m["metadata"]["name"] == "baton-dashboards"]
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert shown["data"].keys() == {path.name for path in (GRAFANA / "dashboards").iterdir()}


def test_actors_are_scraped_where_the_router_says(overlays: dict[str, list[Object]]) -> None:
    [config] = of_kind(overlays["kuberay"], "ScrapeConfig")
    [source] = config["spec"]["httpSDConfigs"]
    ports = [
        (each["metadata"]["name"], each["metadata"]["namespace"], port["port"])
        for each in of_kind(overlays["kuberay"], "Service")
        for port in each["spec"]["ports"]
        if port["name"] == "metrics"
    ]
    [(name, namespace, port)] = ports
    assert source["url"] == f"http://{name}.{namespace}.svc:{port}/metrics/targets"
