"""Alerts fire for what they name, and for nothing else. promtool evaluates them over made series."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.router.errors import all_errors, error_code
from tests.grafana import RULES, rules
from tests.prometheus import find

from .conftest import Object
from .test_monitoring import groups

pytestmark = pytest.mark.all

A, B = (f'model_name="m",role="router",job="baton",instance="{name}"' for name in "ab")
STARTED = "baton:router_start_time_seconds{%s}"
READY = 'baton:workers{%s,pool="decode",state="ready"}'
ERRORS = 'baton:request_errors_total{%s,code="%s"}'
UP = {"job": "baton", "instance": "a", "model_name": "m", "role": "router"}
DONE = 'vllm:request_success_total{%s,finished_reason="stop"}'

# What happens, the series with their values each 15 s over 10 minutes, and the alerts that fire at the end.
CASES: list[tuple[str, dict[str, str], dict[str, dict[str, str]]]] = [
    (
        "all is well",
        {
            STARTED % A: "1x40",
            STARTED % B: "1x40",
            READY % A: "1x40",
            READY % B: "1x40",
            DONE % A: "0+150x40",
            ERRORS % (A, "invalid_value"): "0+150x40",
            ERRORS % (A, "no_worker"): "0x40",
            f"up{{{A}}}": "1x40",
            f"up{{{B}}}": "1x40",
        },
        {},
    ),
    ("no router was ever scraped", {}, {"BatonNoRouter": {}}),
    (
        "all routers of a model are gone",
        {STARTED % A: "1x20 stale", STARTED % 'model_name="n"': "1x40"},
        {"BatonNoRouter": {"model_name": "m"}},
    ),
    ("one of two routers is gone", {STARTED % A: "1x20 stale", STARTED % B: "1x40"}, {}),
    (
        "a target is down, and two that are not of Baton",
        {
            STARTED % B: "1x40",
            f"up{{{A}}}": "1x20 0x20",
            f"baton:tokens_waiting{{{A}}}": "0x20 stale",
            'up{job="another",instance="a"}': "0x40",
            'up{job="baton",instance="c"}': "0x40",
        },
        {"BatonTargetDown": UP},
    ),
    (
        "one router of two is blind",
        {STARTED % A: "1x40", READY % A: "1x40", READY % B: "1x20 0x20"},
        {"BatonRouterBlind": {"model_name": "m", "instance": "b", "pool": "decode"}},
    ),
    (
        "a pool is empty",
        {STARTED % A: "1x40", READY % A: "0x40", READY % B: "0x40"},
        {"BatonNoWorker": {"model_name": "m", "pool": "decode"}},
    ),
    (
        "requests fail before they are generations",
        {STARTED % A: "1x40", DONE % A: "0+150x40", ERRORS % (A, "no_worker"): "0+3x40"},
        {"BatonRequestsFail": {"model_name": "m"}},
    ),
    (
        "all requests fail, and none becomes a generation",
        {STARTED % A: "1x40", DONE % A: "0x40", ERRORS % (A, "internal"): "0+1x40"},
        {"BatonRequestsFail": {"model_name": "m"}},
    ),
    (
        "a queue, a store and a certificate",
        {
            STARTED % A: "1x40",
            f"baton:expected_wait_seconds{{{A}}}": "30x40",
            f"baton:store_open{{{B}}}": "1x20 0x20",
            f"baton:certificate_expiry_time_seconds{{{A}}}": "86400x40",
            f"baton:certificate_expiry_time_seconds{{{B}}}": "864000x40",
        },
        {
            "BatonQueueWait": {"model_name": "m"},
            "BatonStoreDown": {"model_name": "m", "instance": "b"},
            "BatonCertificateExpires": {"model_name": "m", "instance": "a"},
        },
    ),
]


@pytest.mark.parametrize(("series", "firing"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_alerts(series: dict[str, str], firing: dict[str, dict[str, str]], tmp_path: Path) -> None:
    given = [{"series": name, "values": values} for name, values in series.items()]
    alerts = [rule for rule in rules() if "alert" in rule]
    tests = [
        {
            "eval_time": "10m",
            "alertname": rule["alert"],
            "exp_alerts": [expected(rule, firing[rule["alert"]])],
        }
        if rule["alert"] in firing
        else {"eval_time": "10m", "alertname": rule["alert"]}
        for rule in alerts
    ]
    assert firing.keys() <= {rule["alert"] for rule in alerts}
    file = tmp_path / "test.yaml"
    test = {"interval": "15s", "input_series": given, "alert_rule_test": tests}
    file.write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [test]})
    )
    checked = subprocess.run([find("promtool"), "test", "rules", str(file)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def expected(rule: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    def filled(text: str) -> str:
        text = re.sub(
            r"{{ if \$labels\.(\w+) }}(.*?){{ end }}", lambda m: m[2] if m[1] in labels else "", text
        )
        return re.sub(r"{{ \$labels\.(\w+) }}", lambda m: labels.get(m[1], ""), text)

    annotations = {name: filled(text) for name, text in rule["annotations"].items()}
    return {"exp_labels": labels | rule["labels"], "exp_annotations": annotations}


def test_the_error_ratio_counts_each_error_of_the_server() -> None:
    [ratio] = [rule["expr"] for rule in rules() if rule.get("record") == "baton:request_error_ratio"]
    codes = {error_code(kind) for kind in all_errors() if kind.status >= 500}
    assert {frozenset(found.split("|")) for found in re.findall(r'code=~"([^"]*)"', ratio)} == {
        frozenset(codes)
    }


def test_a_full_decode_pool_grows_by_what_waits_for_room(
    overlays: dict[str, list[Object]], tmp_path: Path
) -> None:
    """A share of at most 1 would let it grow by a quarter at a time. A pause tells no use."""
    spec = {"groups": groups(overlays["plain"], "baton-autoscaling")}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    series = {
        'vllm:kv_cache_usage_perc{job="baton-decode",namespace="n",pod="a"}': "1 1",
        'vllm:kv_cache_usage_perc{job="baton-decode",namespace="n",pod="b"}': "0.5 0.5",
        'vllm:num_requests_running{job="baton-decode",namespace="n",pod="a"}': "60 60",
        'vllm:num_requests_running{job="baton-decode",namespace="n",pod="b"}': "20 20",
        'baton:requests_waiting_for_room{job="baton-router",namespace="n",pod="r"}': "120 120",
        'baton:paused{job="baton-router",namespace="n",pod="r"}': "0 2",
    }
    name = 'baton_decode_kv_usage{namespace="n",pod="%s"}'
    asked = {
        "expr": "baton_decode_kv_usage",
        "eval_time": "0s",
        "exp_samples": [{"labels": name % pod, "value": use} for pod, use in {"a": 2.5, "b": 1.25}.items()],
    }
    test = {
        "interval": "5s",
        "input_series": [{"series": name, "values": value} for name, value in series.items()],
        "promql_expr_test": [asked, {"expr": "baton_decode_kv_usage", "eval_time": "5s", "exp_samples": []}],
    }
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "5s", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    command = [find("promtool"), "test", "rules", str(tmp_path / "test.yaml")]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
