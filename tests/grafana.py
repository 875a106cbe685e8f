"""What deploy/grafana holds, for tests."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

GRAFANA = Path(__file__).parents[1] / "deploy" / "grafana"
RULES = GRAFANA / "rules.yaml"


def dashboards() -> dict[str, dict[str, Any]]:
    """By the name of their file."""
    return {path.stem: json.loads(path.read_text()) for path in (GRAFANA / "dashboards").iterdir()}


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panel_queries() -> list[str]:
    """As Grafana would ask them."""
    return [
        target["expr"].replace("$__rate_interval", "10s").replace("$model_name", ".*")
        for dashboard in dashboards().values()
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]


def rule_queries() -> list[str]:
    """What is recorded, and what alerts compare with a threshold or with each other."""
    parts = [re.split(r" (?:and|or|unless) (?:on \([\w, ]+\) )?", rule["expr"]) for rule in rules()]
    return [re.sub(r"^absent\((.*)\)$| (?:[<>]|==) [\d.]+$", r"\1", part) for each in parts for part in each]


def expressions() -> list[str]:
    return [*panel_queries(), *rule_queries()]
