"""Writes components/monitoring/prometheusrule.yaml from deploy/prometheus/rules.yml, which is where rules are changed.

python deploy/kubernetes/generate.py
"""

import textwrap
from pathlib import Path

HERE = Path(__file__).parent
RULES = HERE.parent / "prometheus" / "rules.yml"
RESOURCE = HERE / "components" / "monitoring" / "prometheusrule.yaml"
HEAD = """\
# Written by deploy/kubernetes/generate.py from deploy/prometheus/rules.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: offramp
  labels: {app.kubernetes.io/name: offramp}
spec:
"""


def resource(rules: str) -> str:
    """A PrometheusRule with the groups of the rules file ``rules``, comments and all."""
    _, found, groups = rules.partition("groups:\n")
    if not found:
        raise ValueError("no line 'groups:' in the rules")
    return HEAD + textwrap.indent(f"groups:\n{groups}", "  ")


if __name__ == "__main__":
    RESOURCE.write_text(resource(RULES.read_text(encoding="utf-8")), encoding="utf-8")
