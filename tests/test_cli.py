"""The command line, as its users meet it: what is printed where, and the exit code."""

import json
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest

import offramp
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("idle")
    return tiny.write_with_idle_graphs(folder / "bundle", folder / "graphs").path


class Absent(MetaPathFinder):
    """Makes one module impossible to import, as if its package were not installed."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == self.name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    return text.rstrip("\n")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert offramp.run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "serve" in shown
    assert "classify" in shown
    assert "inspect" in shown


def test_no_command_shows_the_help_and_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert offramp.run([]) == 2
    assert "Usage: offramp" in capsys.readouterr().out


def test_version_is_that_of_the_installed_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offramp.metadata, "version", {"offramp": "1.2.3"}.__getitem__)
    assert offramp.run(["--version"]) == 0
    assert capsys.readouterr().out == "offramp 1.2.3\n"


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["classify", "--help"], ["serve", "--help"]])
def test_help_loads_neither_torch_nor_onnxruntime(arguments: list[str]) -> None:
    code = (
        "import sys, offramp; code = offramp.run(sys.argv[1:]);"
        "assert not {'torch', 'transformers', 'onnx', 'onnxruntime', 'scipy'} & set(sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: offramp" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["srve"], "No such command 'srve'. Did you mean 'serve'?"),
        (["inspect", "--jsn"], "No such option: --jsn"),
        (["inspect", "one", "two"], "unexpected extra argument"),
        (["serve", "--prt", "80"], "No such option: --prt"),
        (["serve", "--port"], "Option '--port' requires an argument"),
        (["serve", "--port", "99999"], "setting --port: Input should be less than or equal to 65535"),
        (["serve", "--port", "http"], "setting --port: Input should be a valid integer"),
        (["serve", "--log-level", "loud"], "setting --log-level"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offramp.run(arguments) == 2
    printed = capsys.readouterr()
    assert one_line(printed.err).startswith("offramp: error: ")
    assert message in printed.err
    assert printed.out == ""


def test_wrong_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFRAMP_PORT", "none")
    assert offramp.run(["serve"]) == 2
    assert "OFFRAMP_PORT" in one_line(capsys.readouterr().err)


def test_every_setting_of_the_server_is_an_option_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    from server.config import Settings

    assert offramp.run(["serve", "--help"]) == 0
    words = capsys.readouterr().out.split()
    options = {f"--{name.replace('_', '-')}" for name in Settings.model_fields if name != "bundles"}
    assert options <= set(words)
    assert "--port" in options


def test_inspect_shows_exits_certified_tiers_and_what_was_refused(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offramp.run(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert "tiny, version 1" in shown
    assert "every file matches its sha256" in shown
    assert "fp32, the default" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert [
        "1",
        "0",
        "peek",
        f"{tiny.exit_costs(tiny.ARCHITECTURE, tiny.MEAN_TOKENS)[0]:.2f}",
        "1.50",
        "0.7100",
    ] in rows
    assert any(row[:6] == ["0.97", "confidence", "0.9", "4", "of", "500"] for row in rows)
    assert "not certified: quality 0.999: 500 texts are too few (needs 2995 texts)" in shown


def test_inspect_as_json_holds_manifest_calibration_and_sizes(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert offramp.run(["inspect", str(bundle), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["manifest"]["name"] == "tiny"
    assert document["calibration"]["precisions"]["fp32"]["certified"][0]["quality"] == 0.97
    assert document["bytes"]["graphs"]["fp32"] == sum(file.stat().st_size for file in bundle.rglob("*.onnx"))
    assert document["bytes"]["total"] == sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())


def test_inspect_names_the_changed_file_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = tiny.write_with_idle_graphs(tmp_path / "bundle", tmp_path / "graphs").graph(2)
    changed.write_bytes(changed.read_bytes() + b"!")
    assert offramp.run(["inspect", str(tmp_path / "bundle")]) == 1
    assert "segment_2.onnx: sha256 is not the manifest's" in one_line(capsys.readouterr().err)


def test_failure_is_one_line_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert offramp.run(["inspect", str(tmp_path / "none")]) == 1
    assert one_line(capsys.readouterr().err) == f"offramp: error: {tmp_path / 'none'}: no such bundle folder"


def test_a_command_whose_packages_are_missing_says_which_extra_brings_them(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "models.describe", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent("models.describe"), *sys.meta_path])
    assert offramp.run(["inspect", str(bundle)]) == 1
    assert "models.describe is not installed: pip install 'offramp[train]'" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_lets_the_traceback_through(place: str, tmp_path: Path) -> None:
    from models.bundle import BundleError

    command = ["inspect", str(tmp_path / "none")]
    with pytest.raises(BundleError):
        offramp.run(["--debug", *command] if place == "before" else [*command, "--debug"])


def test_debug_after_two_dashes_is_a_text_like_any_other() -> None:
    assert offramp.take_debug(["classify", "--", "--debug"]) == (["classify", "--", "--debug"], False)


def test_no_runtime_names_both_choices() -> None:
    with pytest.raises(offramp.typer.TyperException, match=r"offramp\[cpu\].*offramp\[gpu\]"):
        offramp.require_one_runtime([])


def test_two_runtimes_are_refused_by_name() -> None:
    with pytest.raises(offramp.typer.TyperException, match="onnxruntime and onnxruntime-gpu are both installed"):
        offramp.require_one_runtime(["onnxruntime", "onnxruntime-gpu"])


@pytest.mark.parametrize("one", ["onnxruntime", "onnxruntime-gpu"])
def test_one_runtime_is_right(one: str) -> None:
    offramp.require_one_runtime([one])


def test_installed_runtimes_are_found_by_their_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = offramp.installed_runtimes()
    folder = tmp_path / "onnxruntime_gpu-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert set(offramp.installed_runtimes()) == {*before, "onnxruntime-gpu"}
