"""Settings: where they come from, and what stops the start."""

from pathlib import Path

import pytest

from models.bundle import SHIPPED_BUNDLE
from server.config import Settings, StartError, load_settings, unknown_variables


def test_every_setting_says_what_it_means() -> None:
    missing = [name for name, field in Settings.model_fields.items() if not field.description]
    assert missing == []


def test_defaults_serve_the_shipped_bundle_on_port_8000() -> None:
    settings = load_settings()
    assert settings.port == 8000
    assert settings.bundle_paths == (SHIPPED_BUNDLE,)


def test_the_environment_sets_and_a_flag_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFRAMP_PORT", "9001")
    monkeypatch.setenv("OFFRAMP_DEFAULT_QUALITY", "0.97")
    settings = load_settings(port=9002, default_quality=None)
    assert (settings.port, settings.default_quality) == (9002, 0.97)


def test_bundles_in_the_environment_are_separated_like_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFRAMP_BUNDLES", "/a:/b")
    assert load_settings().bundle_paths == (Path("/a"), Path("/b"))


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFRAMP_RUNS", "")
    assert load_settings().runs is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PORT", "70000"),
        ("PORT", "eighty"),
        ("DEVICE", "gpu"),
        ("PRECISION", "int4"),
        ("DEFAULT_QUALITY", "1.5"),
        ("DEFAULT_QUALITY", "nan"),
        ("DEADLINE_MS", "0"),
        ("MAX_QUEUE", "0"),
        ("RUNS", "-1"),
        ("LOG_LEVEL", "loud"),
        ("DRAIN_SECONDS", "inf"),
    ],
)
def test_a_bad_variable_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(f"OFFRAMP_{variable}", value)
    with pytest.raises(StartError) as caught:
        load_settings()
    assert f"OFFRAMP_{variable}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_flag_is_named_as_a_flag() -> None:
    with pytest.raises(StartError, match=r"--max-body-bytes: .*1024"):
        load_settings(max_body_bytes=1)


def test_a_request_that_could_never_fit_into_the_queue_is_refused_at_start() -> None:
    with pytest.raises(StartError, match=r"max_inputs 128 exceeds max_queue 10"):
        load_settings(max_queue=10)


def test_a_port_injected_by_kubernetes_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFRAMP_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(StartError, match="enableServiceLinks"):
        load_settings()


def test_mistyped_variables_are_found() -> None:
    environment = {"OFFRAMP_PROT": "1", "OFFRAMP_PORT": "8000", "HOME": "/"}
    assert unknown_variables(environment) == ["OFFRAMP_PROT"]


def test_several_gpus_are_dealt_out_to_as_many_workers() -> None:
    settings = load_settings(device="cuda:0,cuda:3", workers=4)
    assert [settings.device_of(worker) for worker in range(4)] == ["cuda:0", "cuda:3", "cuda:0", "cuda:3"]
    assert load_settings(device="cuda", workers=2).device_of(1) == "cuda"
    assert load_settings(device="cuda:0,cuda:3").workers is None
    with pytest.raises(StartError, match=r"device names 2 GPUs for 1 workers; each needs one of its own"):
        load_settings(device="cuda:0,cuda:1", workers=1)
    for device in ("cuda:0,", "cuda:0,cpu", "auto,auto", "cuda,cuda"):
        with pytest.raises(StartError, match="--device"):
            load_settings(device=device, workers=4)
