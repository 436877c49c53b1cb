"""The command line, as its users meet it: what is printed where, and the exit code."""

import json
import shutil
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
import typer
from starlette.testclient import TestClient

import offramp
from models.bundle import Bundle, BundleError
from server.app import create_app
from server.config import Settings, load_settings

ROOT = Path(__file__).resolve().parent.parent


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


def classify_stdin(bundle: Bundle, lines: bytes) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "offramp", "classify", "--bundle", str(bundle.path), "-"]
    return subprocess.run(command, cwd=ROOT, input=lines, capture_output=True, check=False)


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
        (["serve", "--api-key", "one", "--api-key", "two words"], "setting --api-key or OFFRAMP_API_KEY"),
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
    assert offramp.run(["serve", "--help"]) == 0
    words = capsys.readouterr().out.split()
    options = {f"--{name.replace('_', '-')}" for name in Settings.model_fields if name != "bundles"}
    assert options <= set(words)
    assert "--port" in options


def test_inspect_shows_exits_certified_tiers_and_what_was_refused(
    tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offramp.run(["inspect", str(tiny_bundle.path)]) == 0
    shown = capsys.readouterr().out
    assert "tiny, version 1" in shown
    assert "every file matches its sha256" in shown
    assert "fp32, the default" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["1", "0", "peek", f"{tiny_bundle.manifest.exit_costs[0]:.2f}", "1.50", "0.75"] in rows
    assert ["0.97", "confidence", "0.9", "3", "of", "2000", "2.22", "1.80"] in rows
    assert "not certified: quality 0.995: too few calibration texts (needs 4000 texts)" in shown


def test_inspect_as_json_holds_manifest_calibration_and_sizes(
    tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offramp.run(["inspect", str(tiny_bundle.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    files = [file for file in tiny_bundle.path.rglob("*") if file.is_file()]
    assert document["manifest"]["name"] == "tiny"
    assert document["calibration"]["precisions"]["fp32"]["certified"][0]["quality"] == 0.99
    assert document["bytes"]["graphs"]["fp32"] == sum(file.stat().st_size for file in files if file.suffix == ".onnx")
    assert document["bytes"]["total"] == sum(file.stat().st_size for file in files)


def test_inspect_names_the_changed_file_and_fails(
    tiny_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(tiny_bundle.path, tmp_path / "copy")
    changed = copy / tiny_bundle.graph(2).relative_to(tiny_bundle.path)
    changed.write_bytes(changed.read_bytes() + b"!")
    assert offramp.run(["inspect", str(copy)]) == 1
    assert "segment_2.onnx: sha256 is not the manifest's" in one_line(capsys.readouterr().err)


def test_classify_gives_the_result_that_the_server_gives(
    tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["the film was good", "two hours of nothing", "a slow and moving story but not very long"]
    body = {"inputs": texts, "criterion": "confidence", "threshold": 0.7, "explain": True}
    with TestClient(create_app(load_settings(bundles=(tiny_bundle.path,)), [tiny_bundle])) as client:
        expected = client.post("/classify", json=body).json()["results"]
    options = ["--criterion", "confidence", "--threshold", "0.7", "--explain", "--json"]
    assert offramp.run(["classify", "--bundle", str(tiny_bundle.path), *options, *texts]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["exit"]["number"] for result in found] == [result["exit"]["number"] for result in expected]
    assert [result["label"] for result in found] == [result["label"] for result in expected]
    assert [result["exits"][0]["score"] for result in found] == pytest.approx(
        [result["exits"][0]["score"] for result in expected], abs=1e-4
    )
    assert found[0].keys() == expected[0].keys()


def test_classify_tells_a_person_label_score_way_and_promise(
    tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offramp.run(["classify", "--bundle", str(tiny_bundle.path), "--quality", "1", "good film"]) == 0
    line = one_line(capsys.readouterr().out)
    assert line.startswith(("negative  0.", "positive  0."))
    assert "(exit 4 after 4 of 4 layers, cost " in line
    assert line.endswith(", final, promised 1)  good film")


def test_classify_reads_stdin_line_by_line_and_answers_in_order(tiny_bundle: Bundle) -> None:
    lines = [f"{word} film number {number}" for number in range(40) for word in ("good", "dull")]
    done = classify_stdin(tiny_bundle, "\r\n".join(lines).encode() + b"\n")
    assert done.returncode == 0, done.stderr
    assert [line.split(")  ")[1] for line in done.stdout.decode().splitlines()] == lines


def test_classify_of_no_lines_is_no_answer(tiny_bundle: Bundle) -> None:
    done = classify_stdin(tiny_bundle, b"")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"good film\n\xff\xfe\n", "line 2: not UTF-8"),
        (b"good film\nbad film\n   \n", "line 3: the text is empty or blank"),
        (b"good\n" * 33 + b"poison\n", "line 34: the model's scores for this text are not finite"),
        (b"x" * 100_001, "line 1: 100001 characters"),
    ],
)
def test_classify_names_the_line_that_cannot_be_classified(lines: bytes, message: str, tiny_bundle: Bundle) -> None:
    done = classify_stdin(tiny_bundle, lines)
    assert done.returncode == 1
    assert one_line(done.stderr.decode()).startswith(f"offramp: error: {message}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quality", "0.99", "--speed", "2"], "at most one way to choose the depth, but quality and speed are given"),
        (["--quality", "1.5"], "quality: must be less than or equal to 1"),
        (["--quality", "nan"], "quality: must be a finite number"),
        (["--criterion", "entropy", "--threshold", "7"], "threshold: threshold of entropy must lie between 0 and 1"),
        (["--criterion", "sureness"], "Invalid value for '--criterion'"),
        (["--quality", "0.999"], "quality: 0.999 cannot be promised by this model: certified are 0.99, 0.97, 0.95"),
        (["--max-exit", "9"], "max_exit: 9 is deeper than the model's last exit, 4"),
        (["--speed", "fast"], "Invalid value for '--speed'"),
    ],
)
def test_classify_refuses_a_wish_that_cannot_be_as_wrong_usage(
    options: list[str], message: str, tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offramp.run(["classify", "--bundle", str(tiny_bundle.path), *options, "good film"]) == 2
    assert message in one_line(capsys.readouterr().err)


def test_classify_takes_the_two_texts_of_a_pair_around_a_tab(
    pair_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offramp.run(["classify", "--bundle", str(pair_bundle.path), "a man plays\tsomeone plays music"]) == 0
    assert one_line(capsys.readouterr().out).startswith(pair_bundle.manifest.labels)
    assert offramp.run(["classify", "--bundle", str(pair_bundle.path), "a man plays"]) == 1
    assert "text 1: this model classifies pairs: a tab must separate" in one_line(capsys.readouterr().err)


def test_classify_with_two_runtimes_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(offramp, "installed_runtimes", lambda: ["onnxruntime", "onnxruntime-gpu"])
    assert offramp.run(["classify", "good film"]) == 1
    assert "are both installed" in one_line(capsys.readouterr().err)


def test_failure_is_one_line_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert offramp.run(["inspect", str(tmp_path / "none")]) == 1
    assert one_line(capsys.readouterr().err) == f"offramp: error: {tmp_path / 'none'}: no such bundle folder"


def test_a_command_whose_packages_are_missing_says_which_extra_brings_them(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "models.describe", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent("models.describe"), *sys.meta_path])
    assert offramp.run(["inspect", str(tiny_bundle.path)]) == 1
    assert "models.describe is not installed: pip install 'offramp[train]'" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_lets_the_traceback_through(place: str, tmp_path: Path) -> None:
    command = ["inspect", str(tmp_path / "none")]
    with pytest.raises(BundleError):
        offramp.run(["--debug", *command] if place == "before" else [*command, "--debug"])


def test_debug_after_two_dashes_is_a_text_like_any_other() -> None:
    assert offramp.take_debug(["classify", "--", "--debug"]) == (["classify", "--", "--debug"], False)


def test_no_runtime_names_both_choices() -> None:
    with pytest.raises(typer.TyperException, match=r"offramp\[cpu\].*offramp\[gpu\]"):
        offramp.require_one_runtime([])


def test_two_runtimes_are_refused_by_name() -> None:
    with pytest.raises(typer.TyperException, match="onnxruntime and onnxruntime-gpu are both installed"):
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
