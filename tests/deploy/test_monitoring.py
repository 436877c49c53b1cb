"""Dashboards and rules, asked of a real Prometheus that scrapes a real server under real traffic."""

import importlib.util
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.peers.process import free_port
from models.bundle import Bundle
from tests.deploy.tools import tool
from tests.server.conftest import some_texts
from tests.server.process import Process, process

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def _tool(name: str) -> str:
    return tool(name, "Debian, Ubuntu: apt-get install prometheus")


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _panels() -> list[tuple[str, str]]:
    """Title and query of every query of every panel, with Grafana's variables filled in."""
    found = []
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"].replace("$__rate_interval", "1m")
                found.append((panel["title"], expr.replace("$model", ".+").replace("$instance", ".+")))
    return found


class Prometheus:
    """A running Prometheus, and questions to it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._client = httpx.Client(base_url=self.url, timeout=30)

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, f"{parameters}: {answer.text}"
        return answer.json()["data"]

    def data(self, expr: str) -> list[float]:
        return [float(series["value"][1]) for series in self.get("query", query=expr)["result"]]

    def up(self) -> bool:
        try:
            # Until then it answers queries with 503.
            if self._client.get("/-/ready").status_code != 200:
                return False
            return self.data('up{job="offramp"}') == [1]
        except httpx.TransportError:
            return False

    def silent(self, exprs: list[str]) -> list[str]:
        """Those of ``exprs`` that return nothing but NaN, after waiting for a few scrapes."""
        for _ in range(60):
            exprs = [expr for expr in exprs if all(value != value for value in self.data(expr))]
            if not exprs:
                break
            time.sleep(0.5)
        return exprs


@pytest.fixture(scope="module")
def server(tiny_bundle: Bundle) -> Iterator[Process]:
    # As by default: panels and alerts are of what several processes show together.
    with process(tiny_bundle, shadow_rate=1, workers=2) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Process, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """With the committed configuration, but for the target and shorter intervals."""
    binary = _tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = ["{}:{}".format(*server.address)]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    arguments = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        started = subprocess.Popen([binary, *arguments, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
    try:
        asked = Prometheus(port)
        for _ in range(240):
            if started.poll() is not None or asked.up():
                break
            time.sleep(0.25)
        assert asked.up(), (folder / "log").read_text(encoding="utf-8")
        _traffic(server)
        yield asked
    finally:
        started.terminate()
        started.wait(30)


def _traffic(server: Process) -> None:
    """A few seconds of requests of all kinds, so that every counter of interest moves between two scrapes."""
    wishes: list[dict[str, Any]] = [{}, {"quality": 0.97}, {"quality": 1.0}, {"threshold": 0.6}, {"max_exit": 2}]
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for seed in range(8):
            texts = [*some_texts(12, seed=seed), "film " * 200]
            for wish in wishes:
                assert client.post("/classify", json={"inputs": texts, **wish}).status_code == 200
            client.post("/predict", json={"inputs": texts[0]})
            client.post("/classify", json={"inputs": texts, "deadline_ms": 0.001})
            time.sleep(0.5)


def test_every_query_of_every_panel_returns_data(prometheus: Prometheus) -> None:
    panels = _panels()
    assert len(panels) > 25
    silent = prometheus.silent([expr for _, expr in panels])
    assert [(title, expr) for title, expr in panels if expr in silent] == []


def test_every_variable_of_the_dashboards_has_values(prometheus: Prometheus) -> None:
    for file in DASHBOARDS:
        for variable in json.loads(file.read_text(encoding="utf-8"))["templating"]["list"]:
            query = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
            if variable["type"] == "query":
                assert query, variable
                assert prometheus.get(f"label/{query[2]}/values", **{"match[]": query[1]}), variable


def test_every_recorded_series_returns_data(prometheus: Prometheus) -> None:
    recorded = [rule["record"] for rule in _rules() if "record" in rule]
    assert len(recorded) >= 8
    assert prometheus.silent(recorded) == []


def test_every_alert_is_judged_and_compares_what_is_there(prometheus: Prometheus) -> None:
    alerts = [rule for rule in _rules() if "alert" in rule]
    # A false comparison returns nothing; with `bool` it returns 0, and nothing only where one of its sides is missing.
    compared = [re.sub(r" ([<>]=?) ", r" \1 bool ", rule["expr"]) for rule in alerts]
    assert all(" bool " in expr for expr in compared)
    assert prometheus.silent(compared) == []
    judged = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in judged} == {"ok"}
    assert {rule["name"] for rule in judged if rule["type"] == "alerting"} == {rule["alert"] for rule in alerts}


def test_the_autoscaler_on_kubernetes_reads_the_requests_in_work(prometheus: Prometheus) -> None:
    values = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.values.yaml").read_text(encoding="utf-8"))
    (rule,) = values["rules"]["custom"]
    selected = rule["seriesQuery"].replace('namespace!="",pod!="",', "")
    assert prometheus.silent([selected]) == []
    series = selected.partition("{")[0]
    # As prometheus-adapter fills it in, with the labels that pods have in place of those of a machine.
    query = rule["metricsQuery"].replace("<<.Series>>", series)
    query = query.replace("<<.LabelMatchers>>", 'job="offramp"').replace("<<.GroupBy>>", "instance")
    assert prometheus.silent([query]) == []
    assert len(prometheus.data(query)) == 1


def test_work_saved_adds_up(prometheus: Prometheus) -> None:
    (share,) = prometheus.data("model:offramp_layers_saved:share_5m")
    assert 0 < share < 1
    (run,) = prometheus.data("sum(offramp_flops_run_total)")
    (saved,) = prometheus.data("sum(offramp_flops_saved_total)")
    assert run > 0
    assert saved > 0
    assert sum(prometheus.data("model_exit:offramp_exits:share_5m")) == pytest.approx(1)


def test_the_health_check_of_the_compose_file_tells_prometheus_that_answers_from_none(prometheus: Prometheus) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    kind, program, *arguments = services["prometheus"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "promtool")
    for url, healthy in ((prometheus.url, True), (f"http://127.0.0.1:{free_port()}", False)):
        asked = [argument.replace("http://localhost:9090", url) for argument in arguments]
        assert asked != arguments
        assert (subprocess.run([_tool(program), *asked], check=False).returncode == 0) is healthy


def test_promtool_finds_nothing_wrong_with_configuration_and_rules() -> None:
    config = DEPLOY / "prometheus" / "prometheus.yml"
    subprocess.run([_tool("promtool"), "check", "config", "--lint-fatal", config], check=True)


def test_alerts_fire_when_they_should_and_not_before() -> None:
    subprocess.run([_tool("promtool"), "test", "rules", "rules_test.yml"], cwd=Path(__file__).parent, check=True)


def test_every_alert_has_its_runbook() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    headings = {line.lstrip("# ").strip().lower() for line in page.splitlines() if line.startswith("#")}
    for rule in _rules():
        if "alert" in rule:
            file, _, anchor = rule["annotations"]["runbook"].partition("#")
            assert (file, anchor) == ("docs/operations.md", rule["alert"].lower())
            assert anchor in headings


def test_the_committed_dashboard_is_what_its_generator_writes() -> None:
    spec = importlib.util.spec_from_file_location("generate", DEPLOY / "grafana" / "generate.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    # Data classes look their module up there.
    sys.modules["generate"] = generator
    spec.loader.exec_module(generator)
    assert generator.TARGET.read_text(encoding="utf-8") == generator.to_json(), "run deploy/grafana/generate.py"


def test_the_dashboard_has_the_rows_and_variables_that_people_look_for() -> None:
    (file,) = DASHBOARDS
    document = json.loads(file.read_text(encoding="utf-8"))
    assert [variable["name"] for variable in document["templating"]["list"]] == ["datasource", "model", "instance"]
    rows = [panel["title"] for panel in document["panels"] if panel["type"] == "row"]
    assert rows == [
        "Traffic and latency",
        "Exits",
        "Work saved",
        "Promises",
        "Queues and batches",
        "Confidence",
        "Refused, cut, lost",
        "Process",
    ]
    numbers = [panel["id"] for panel in document["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_what_grafana_is_provisioned_with_names_one_data_source_and_the_dashboards_folder() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text("utf-8"))["datasources"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "offramp.yaml").read_text("utf-8"))["providers"]
    assert (source["type"], source["isDefault"], source["uid"]) == ("prometheus", True, "prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text("utf-8"))
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    assert (provider["type"], provider["options"]["path"]) == ("file", "/etc/grafana/dashboards")
