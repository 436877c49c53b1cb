"""The manifests as kustomize builds them, against the schemas of Kubernetes and against the server that they run."""

import importlib.util
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml

from models.bundle import Bundle
from server.config import Settings, load_settings, unknown_variables
from tests.deploy.tools import tool
from tests.server.conftest import serving

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
BUILDS = ("base", "overlays/cpu", "overlays/gpu")
# Resources of the Prometheus operator, which has its own schemas.
OPERATOR = "monitoring.coreos.com/v1"

Manifest = dict[str, Any]


class Build:
    """The manifests that ``kubectl apply -k`` would apply."""

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests

    def one(self, kind: str) -> Manifest:
        (found,) = [manifest for manifest in self.manifests if manifest["kind"] == kind]
        return found

    @property
    def pod(self) -> Manifest:
        return self.one("Deployment")["spec"]["template"]

    @property
    def container(self) -> Manifest:
        (container,) = self.pod["spec"]["containers"]
        return container

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def environment(self) -> dict[str, str]:
        config = self.one("ConfigMap")
        assert self.container["envFrom"] == [{"configMapRef": {"name": config["metadata"]["name"]}}]
        return config["data"]

    def settings(self, monkeypatch: pytest.MonkeyPatch) -> Settings:
        """What the server makes of its environment."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        return load_settings()


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest) -> Build:
    kubectl = tool("kubectl", "kustomize is part of it from 1.27 on: https://kubernetes.io/docs/tasks/tools/")
    command = [kubectl, "kustomize", KUBERNETES / request.param]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return Build(list(yaml.safe_load_all(done.stdout)))


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_rule", KUBERNETES / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_manifest_is_what_the_latest_kubernetes_takes(build: Build) -> None:
    latest = kubernetes_validate.latest_version()
    checked = set()
    for manifest in build.manifests:
        if manifest["apiVersion"] != OPERATOR:
            kubernetes_validate.validate(manifest, latest, strict=True)
            checked.add(manifest["kind"])
    assert checked == {
        "ConfigMap",
        "Deployment",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
    }


def test_the_schemas_would_find_a_mistake(build: Build) -> None:
    deployment = build.one("Deployment")
    wrong = {**deployment, "spec": {**deployment["spec"], "replicaz": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_whoever_selects_pods_selects_ours(build: Build) -> None:
    labels = build.pod["metadata"]["labels"].items()
    selectors = [
        build.one("Deployment")["spec"]["selector"]["matchLabels"],
        build.one("Service")["spec"]["selector"],
        build.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        build.one("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(one["labelSelector"]["matchLabels"] for one in build.pod["spec"]["topologySpreadConstraints"]),
    ]
    assert all(selector and selector.items() <= labels for selector in selectors)
    target = build.one("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", build.one("Deployment")["metadata"]["name"])


def test_the_server_takes_its_environment_and_listens_where_the_pod_says(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unknown_variables(build.environment) == []
    settings = build.settings(monkeypatch)
    assert settings.host == "0.0.0.0"
    assert build.ports == {"http": settings.port, "metrics": settings.metrics_port}
    targets = {port["name"]: port["targetPort"] for port in build.one("Service")["spec"]["ports"]}
    assert targets == {"http": "http", "metrics": "metrics"}
    # Else a Service named offramp sets OFFRAMP_PORT.
    assert build.pod["spec"]["enableServiceLinks"] is False


def test_a_pod_has_time_for_its_whole_drain(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = build.settings(monkeypatch)
    before = build.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = before + settings.shutdown_delay_seconds + settings.drain_seconds
    assert before > 0
    assert settings.shutdown_delay_seconds > 0
    assert build.pod["spec"]["terminationGracePeriodSeconds"] >= drain + 10


@pytest.mark.anyio
async def test_probes_ask_routes_that_answer_without_a_key(build: Build, tiny_bundle: Bundle) -> None:
    probes = [build.container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")]
    assert [(probe["path"], probe["port"]) for probe in probes] == [
        ("/livez", "http"),
        ("/livez", "http"),
        ("/readyz", "http"),
    ]
    async with serving(tiny_bundle, api_key=("key",)) as served:
        for probe in probes:
            assert (await served.client.get(probe["path"])).status_code == 200


def test_a_pod_may_do_nothing_that_it_does_not_need(build: Build) -> None:
    pod = build.pod["spec"]["securityContext"]
    # The user of the image.
    assert (pod["runAsNonRoot"], pod["runAsUser"], pod["runAsGroup"]) == (True, 10001, 10001)
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    container = build.container["securityContext"]
    assert container == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert build.pod["spec"]["automountServiceAccountToken"] is False
    assert build.one("ServiceAccount")["automountServiceAccountToken"] is False


def test_keys_come_from_a_secret_that_is_not_in_the_repository(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [manifest for manifest in build.manifests if manifest["kind"] == "Secret"]
    (volume,) = [volume for volume in build.pod["spec"]["volumes"] if "secret" in volume]
    (mount,) = [mount for mount in build.container["volumeMounts"] if mount["name"] == volume["name"]]
    assert "optional" not in volume["secret"]
    assert build.settings(monkeypatch).api_key_file == Path(mount["mountPath"]) / "keys.txt"


def test_an_update_never_takes_a_pod_away_before_its_successor_is_ready(build: Build) -> None:
    deployment = build.one("Deployment")["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert "replicas" not in deployment
    assert build.one("HorizontalPodAutoscaler")["spec"]["minReplicas"] >= 2


def test_the_cpu_limit_is_whole_and_is_what_is_requested(build: Build) -> None:
    resources = build.container["resources"]
    # The server fits its threads to the limit, rounded up.
    assert resources["limits"]["cpu"] == resources["requests"]["cpu"]
    assert int(resources["limits"]["cpu"]) >= 1


def test_all_bodies_that_are_taken_at_once_fit_into_the_memory(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = build.settings(monkeypatch)
    limit = build.container["resources"]["limits"]["memory"]
    assert limit.endswith("Gi")
    assert settings.max_concurrent_requests * settings.max_body_bytes <= int(limit.removesuffix("Gi")) * 2**30 / 2


def test_images_have_a_version(build: Build) -> None:
    _, _, tag = build.container["image"].rpartition(":")
    assert tag.startswith(_version())


def test_only_the_namespace_of_the_monitoring_reaches_the_metrics(build: Build) -> None:
    policy = build.one("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in policy
    clients, scrapers = policy["ingress"]
    assert (clients["ports"], scrapers["ports"]) == ([{"port": "http"}], [{"port": "metrics"}])
    assert [list(one) for one in scrapers["from"]] == [["namespaceSelector"]]


@pytest.mark.parametrize("build", ["overlays/cpu", "overlays/gpu"], indirect=True)
def test_the_operator_scrapes_the_services_metrics_port(build: Build) -> None:
    monitor, service = build.one("ServiceMonitor"), build.one("Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    # Alerts ask for up{job="offramp"}.
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "offramp"


@pytest.mark.parametrize("build", ["overlays/cpu", "overlays/gpu"], indirect=True)
def test_the_autoscaler_asks_for_the_metric_that_the_adapter_offers(build: Build) -> None:
    metrics = build.one("HorizontalPodAutoscaler")["spec"]["metrics"]
    (asked,) = [metric["pods"]["metric"]["name"] for metric in metrics if metric["type"] == "Pods"]
    values = yaml.safe_load((KUBERNETES / "prometheus-adapter.values.yaml").read_text(encoding="utf-8"))
    assert [rule["name"]["as"] for rule in values["rules"]["custom"]] == [asked]


@pytest.mark.parametrize("build", ["base"], indirect=True)
def test_the_base_needs_neither_the_operator_nor_an_adapter(build: Build) -> None:
    assert OPERATOR not in {manifest["apiVersion"] for manifest in build.manifests}
    assert [metric["type"] for metric in build.one("HorizontalPodAutoscaler")["spec"]["metrics"]] == ["Resource"]


@pytest.mark.parametrize("build", ["overlays/gpu"], indirect=True)
def test_the_gpu_overlay_asks_for_a_gpu_and_insists_on_it(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert build.settings(monkeypatch).device == "cuda"
    assert build.container["image"].endswith("-gpu")


def test_the_rule_of_the_operator_is_the_rules_file_and_current() -> None:
    generator = _generator()
    rules = generator.RULES.read_text(encoding="utf-8")
    committed = generator.RESOURCE.read_text(encoding="utf-8")
    assert committed == generator.resource(rules), "run deploy/kubernetes/generate.py"
    assert yaml.safe_load(committed)["spec"] == yaml.safe_load(rules)


def test_rules_without_groups_are_no_rule() -> None:
    with pytest.raises(ValueError, match="no line 'groups:'"):
        _generator().resource("rules: []\n")


def _version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
