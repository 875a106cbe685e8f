"""What deploy/grafana holds, for tests."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

GRAFANA = Path(__file__).parents[1] / "deploy" / "grafana"
RULES = GRAFANA / "rules.yaml"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dashboards", GRAFANA / "dashboards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def panel_queries() -> list[str]:
    """As Grafana would ask them."""
    return [
        query.replace("$__rate_interval", "10s").replace("$model_name", ".*")
        for panels in generator().DASHBOARDS.values()
        for panel in panels
        for query in panel.queries.values()
    ]


def rule_queries() -> list[str]:
    """What is recorded, and what alerts compare with their threshold."""
    return [re.sub(r" [<>] [\d.]+$", "", rule["expr"]) for rule in rules()]


def expressions() -> list[str]:
    return [*panel_queries(), *rule_queries()]
