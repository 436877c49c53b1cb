"""What Dockerfile and docker-compose.yml say, held against the schema, the linter, the settings and the files."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.config import Settings, load_settings, unknown_variables

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
# `${NAME:-default}` means its default here: what a person gets who has set nothing.
COMPOSE = yaml.safe_load(re.sub(r"\$\{\w+:-(\w*)\}", r"\1", (ROOT / "docker-compose.yml").read_text(encoding="utf-8")))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = [name for name in SERVICES if name.startswith("offramp")]
PULLED = [name for name in SERVICES if name not in SERVERS]


def _image_variables() -> dict[str, str]:
    """The ``OFFRAMP_`` variables that the Dockerfile sets in every image; those of the target gpu come on top."""
    return dict(re.findall(r"(OFFRAMP_\w+)=(\S+)", DOCKERFILE))


def _binds(service: dict[str, Any]) -> dict[str, Path]:
    """What of this folder the service sees, by the path where it sees it."""
    mounts = [volume.split(":") for volume in service.get("volumes", ())]
    return {target: ROOT / source for source, target, *_ in mounts if source.startswith(".")}


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    subprocess.run([TOOLS / "hadolint", ROOT / "Dockerfile"], check=True)


def test_the_compose_file_has_the_schema_of_compose() -> None:
    schema = ["--builtin-schema", "vendor.compose-spec"]
    subprocess.run([TOOLS / "check-jsonschema", *schema, ROOT / "docker-compose.yml"], check=True)


def test_every_variable_of_the_server_is_a_setting_and_its_value_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SERVERS:
        variables = _image_variables() | {key: str(value) for key, value in SERVICES[name]["environment"].items()}
        assert unknown_variables(variables) == []
        with monkeypatch.context() as environment:
            for variable, value in variables.items():
                environment.setenv(variable, value)
            load_settings()


def test_everybody_means_the_same_port() -> None:
    port = str(Settings.model_fields["port"].default)
    assert _image_variables()["OFFRAMP_PORT"] == port
    assert re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE) == [port]
    assert [SERVICES[name]["ports"][0].rpartition(":")[2] for name in SERVERS] == [port] * len(SERVERS)
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    (scraped,) = config["scrape_configs"]
    (static,), (found,) = scraped["static_configs"], scraped["dns_sd_configs"]
    assert [*static["targets"], *(f"{name}:{found['port']}" for name in found["names"])] == [
        f"{name}:{port}" for name in SERVERS
    ]
    assert "profiles" not in SERVICES[SERVERS[0]], "a target that is always scraped must always be there"


def test_no_two_services_claim_a_port_and_only_this_machine_reaches_them() -> None:
    published = [port.rsplit(":", 1)[0] for service in SERVICES.values() for port in service["ports"]]
    assert len(set(published)) == len(published)
    assert [port for port in published if not port.startswith("127.0.0.1:")] == []


@pytest.mark.parametrize("name", SERVICES)
def test_services_cannot_write_to_their_image_or_gain_rights_and_have_their_limits(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["deploy"]["resources"]["limits"]["memory"]


@pytest.mark.parametrize("name", PULLED)
def test_images_of_others_are_pinned_and_their_health_is_asked_for(name: str) -> None:
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])
    assert SERVICES[name]["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", SERVERS)
def test_servers_are_built_from_their_target_and_are_asked_by_the_image_how_they_are(name: str) -> None:
    target = SERVICES[name]["build"]["target"]
    assert re.search(rf"^FROM server AS {target}$", DOCKERFILE, re.MULTILINE)
    assert "healthcheck" not in SERVICES[name]
    assert "\nHEALTHCHECK " in DOCKERFILE


def test_nobody_is_killed_while_draining() -> None:
    settings = Settings.model_fields
    takes = settings["shutdown_delay_seconds"].default + settings["drain_seconds"].default
    for name in SERVERS:
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= takes + 5


@pytest.mark.parametrize("name", PULLED)
def test_whatever_is_mounted_exists(name: str) -> None:
    assert _binds(SERVICES[name])
    assert [path for path in _binds(SERVICES[name]).values() if not path.exists()] == []
    named = {volume.partition(":")[0] for volume in SERVICES[name]["volumes"]} & set(COMPOSE["volumes"])
    assert named, "what it stores must outlive it"


def test_grafana_finds_its_dashboards_and_prometheus() -> None:
    grafana = SERVICES["grafana"]
    seen, environment = _binds(grafana), grafana["environment"]
    provider = yaml.safe_load((seen["/etc/grafana/provisioning"] / "dashboards" / "offramp.yaml").read_text("utf-8"))
    folder = provider["providers"][0]["options"]["path"]
    home = Path(environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (seen[folder] / home.relative_to(folder)).is_file()
    host, port = environment["PROMETHEUS_URL"].removeprefix("http://").split(":")
    assert SERVICES[host]["ports"][0].endswith(f":{port}")
    assert grafana["depends_on"][host] == {"condition": "service_healthy"}


def test_the_image_has_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f'org.opencontainers.image.version="{project["version"]}"' in DOCKERFILE
    assert f'org.opencontainers.image.licenses="{project["license"]}"' in DOCKERFILE
