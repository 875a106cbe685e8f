"""Writes alerts.yaml: the rules of deploy/grafana as a PrometheusRule for the Prometheus operator.

kustomize cannot do this: it includes a file only as a ConfigMap, which the operator does not read.
"""

from pathlib import Path

HERE = Path(__file__).parent
RULES = HERE.parents[2] / "grafana" / "rules.yaml"
HEAD = """\
# Made by alerts.py from deploy/grafana/rules.yaml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: baton
spec:
"""


def manifest() -> str:
    """The text of alerts.yaml."""
    lines = RULES.read_text().splitlines()
    return HEAD + "".join(f"  {line}".rstrip() + "\n" for line in lines[lines.index("groups:") :])


if __name__ == "__main__":
    (HERE / "alerts.yaml").write_text(manifest())
