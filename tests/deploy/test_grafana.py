"""Dashboards and rules are well-formed, current, and speak of series that the documentation names."""

import re
import subprocess

import pytest

from baton.worker.service_process.metrics import REFUSED
from tests.grafana import GRAFANA, RULES, dashboards, expressions, rules
from tests.prometheus import find

pytestmark = pytest.mark.all

ROOT = GRAFANA.parents[1]
DOCS = ROOT / "docs"
DOCUMENTED = DOCS / "reference" / "metrics.md"
ON_CALL = DOCS / "on-call.md"
OBSERVABILITY = DOCS / "observability.md"
TUNING = DOCS / "tuning.md"
AUTOSCALING = ROOT / "deploy" / "helm" / "baton" / "templates" / "autoscaling.yaml"
PROTOCOL = DOCS / "protocol.md"
SERIES = re.compile(r"(?:baton|vllm):[a-z0-9_]+")


def series(name: str) -> str:
    """As the documentation has it: without what a histogram's parts add."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def test_dashboards_link_to_each_other_and_ask_for_the_chosen_source_and_model() -> None:
    for name, dashboard in dashboards().items():
        assert (dashboard["uid"], dashboard["tags"]) == (f"baton-{name}", ["baton"])
        assert dashboard["links"][0]["tags"] == ["baton"]
        assert {variable["name"] for variable in dashboard["templating"]["list"]} == {
            "datasource",
            "model_name",
        }
        for panel in dashboard["panels"]:
            for asked in (panel, *panel["targets"]):
                assert asked["datasource"]["uid"] == "${datasource}", panel["title"]
            assert all('model_name=~"$model_name"' in target["expr"] for target in panel["targets"])


def test_the_panels_of_a_dashboard_have_ids_and_places_of_their_own() -> None:
    for dashboard in dashboards().values():
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        taken = [
            (x, y)
            for place in (panel["gridPos"] for panel in panels)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(set(taken)) == len(taken)
        assert all(x < 24 for x, _ in taken)


def test_boards_of_both_kinds_of_workers_show_the_shared_store() -> None:
    """Decode workers write answers to it, and read prompts that they compute."""
    for role in ("prefill", "decode"):
        asked = [target["expr"] for panel in dashboards()[role]["panels"] for target in panel["targets"]]
        assert any("baton:store_chunks_total" in expr and f'role="{role}"' in expr for expr in asked), role


def test_promtool_accepts_rules_and_configuration() -> None:
    for what, file in (("rules", RULES), ("config", GRAFANA / "prometheus.yaml")):
        checked = subprocess.run([find("promtool"), "check", what, str(file)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_series_is_documented() -> None:
    documented = set(re.findall(r"^\| `([^`{]+)", DOCUMENTED.read_text(), re.M))
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    read = {name for expression in expressions() for name in SERIES.findall(expression)}
    assert not {name for name in read if series(name) not in documented and name not in recorded} - {
        name.split(":p99")[0] for name in recorded
    }


def test_on_call_names_the_alerts_that_exist() -> None:
    named = set(re.findall("`(Baton[A-Z][A-Za-z]+)`", ON_CALL.read_text()))
    assert named == {rule["alert"] for rule in rules() if "alert" in rule}


def test_the_table_of_alerts_has_each_of_them() -> None:
    named = re.findall(r"^\| `(Baton\w+)` \|", OBSERVABILITY.read_text(), re.M)
    assert sorted(named) == sorted(rule["alert"] for rule in rules() if "alert" in rule)


def test_tuning_names_alerts_and_metrics_of_the_autoscaler() -> None:
    page = TUNING.read_text()
    named = set(re.findall("`(Baton[A-Z][A-Za-z]+)`", page))
    assert named
    assert named <= {rule.get("alert") for rule in rules()}
    scaling = set(re.findall("`(baton_[a-z_]+)`", page))
    assert scaling == set(re.findall(r"record: (baton_(?!encode)\w+)", AUTOSCALING.read_text()))


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert {"summary", "remedy", "runbook"} == rule["annotations"].keys()
            page, anchor = rule["annotations"]["runbook"].split("#")
            headings = re.findall(r"^## (.+)$", (ROOT / page).read_text(), re.M)
            section = {heading.lower().replace(" ", "-"): heading for heading in headings}[anchor]
            text = (ROOT / page).read_text().split(f"## {section}\n")[1].split("\n## ")[0]
            assert f"`{rule['alert']}`" in text, "the section names its alerts"
            assert rule["labels"]["severity"] in ("warning", "critical")


def test_an_alert_covers_each_lane_that_is_refused_for_a_lasting_reason() -> None:
    [rule] = [rule for rule in rules() if rule.get("alert") == "BatonPeersRefused"]
    [covered] = re.findall(r'reason=~"([a-z_|]+)"', rule["expr"])
    [row] = re.findall(r"^- \*\*A refused HELLO\*\*.*?(?=^- )", PROTOCOL.read_text(), re.M | re.S)
    passing = {"busy", "handshakes", "incarnation", "by_peer"}  # full, restarted, or in the peer's own alert
    assert set(covered.split("|")) == set(re.findall(r"\{(\w+)\}", row)) - passing | {"hello"}
    assert set(covered.split("|")) <= set(REFUSED)  # a series that begins above 0 has no increase
