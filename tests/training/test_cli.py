"""The training commands as a person types them."""

import json
from pathlib import Path

import pytest

import training
from models.bundle import Bundle
from offramp import run
from tests.tiny_backbones import save_tiny, tiny_model
from tests.training.test_pipeline import write_texts
from training.cli import _name_of

RECIPES = Path(training.__file__).parent / "recipes"
QUICK = ["--epochs", "1", "--batch-size", "16", "--learning-rate", "3e-3", "--precisions", "fp32", "--threads", "1"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("backbone"), tiny_model("bert"))


@pytest.fixture(scope="module")
def trained(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    data = write_texts(folder / "texts.csv", 300)
    command = ["train", "--train-file", str(data), "--backbone", str(backbone), "--output", str(folder / "run"), *QUICK]
    assert run([*command, "--track", "tensorboard"]) == 0
    return folder / "run"


def test_train_ends_with_a_bundle_named_after_its_folder(trained: Path) -> None:
    assert Bundle.load(trained / "bundle").manifest.name == "run"


def test_a_tracker_logs_into_the_runs_folder(trained: Path) -> None:
    assert list((trained / "logs").rglob("events.out.tfevents.*"))


def test_a_sweep_goes_over_methods_and_weights_and_its_summary_ends_it(
    backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, rows in (("train.tsv", 1510), ("dev.tsv", 20)):
        lines = [f"{i}\tpremise w{i}\tw{i % 7}\t{'not_' if i % 2 else ''}entailment" for i in range(rows)]
        (tmp_path / file).write_text("\n".join(["index\tsentence1\tsentence2\tlabel", *lines]) + "\n")
    command = [
        "sweep",
        "--task",
        "rte",
        "--data-dir",
        str(tmp_path),
        "--output",
        str(tmp_path / "grid"),
        "--seeds",
        "4",
    ]
    options = ["--methods", "jt,acl", "--heads", "mean", "--examples", "40", "--epochs", "1", "--batch-size", "20"]
    small = ["--backbone", str(backbone), "--max-length", "16", "--threads", "1"]
    assert run([*command, *options, *small, "--contrast-weights", "0.2,0.7"]) == 0
    # A method without a contrastive part has no weight to vary.
    assert {p.name for p in (tmp_path / "grid").iterdir()} == {
        "jt-mean-seed4",
        "acl-mean-seed4",
        "acl-mean-weight0.7-seed4",
    }
    assert "jt, mean, 1 seeds, 40 examples, n = 20" in capsys.readouterr().out
    assert run([*command, "--contrast-weights", "0.2,high"]) == 2
    assert "--contrast-weights must be numbers with commas between, not '0.2,high'" in capsys.readouterr().err


def test_a_finished_run_resumes_to_the_same_bundle_without_training_again(
    trained: Path, backbone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = trained / "bundle" / "graphs" / "fp32" / "segment_1.onnx"
    before = graph.read_bytes()
    data = trained.parent / "texts.csv"
    command = ["train", "--train-file", str(data), "--backbone", str(backbone), "--output", str(trained), *QUICK]
    assert run(command) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert run([*command, "--resume"]) == 0
    assert graph.read_bytes() == before


def test_evaluate_prints_every_exit_and_speaks_json(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_texts(trained.parent / "more.csv", 50, seed=5)
    assert run(["evaluate", str(trained / "bundle"), "--file", str(data), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [e["exit"] for e in found["precisions"]["fp32"]["per_exit"]] == [1, 2, 3]
    assert run(["evaluate", str(trained / "bundle"), "--file", str(data)]) == 0
    assert "full depth" in capsys.readouterr().out


def test_labels_in_other_words_are_mapped(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_texts(trained.parent / "numbers.csv", 50, seed=5, labels=(0, 1))
    evaluate = ["evaluate", str(trained / "bundle"), "--file", str(data)]
    assert run(evaluate) == 1
    assert "numbers.csv, row 2: label '0' is not among the training labels" in capsys.readouterr().err
    assert run([*evaluate, "--label-map", "0=no,1=yes"]) == 0


def test_export_keeps_the_exits_asked_for(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(trained), "--exits", "0,2", "--output", str(tmp_path / "two")]) == 0
    assert len(Bundle.load(tmp_path / "two").manifest.architecture.exits) == 2
    other = ["export", str(trained), "--precisions", "fp16", "--exits", "2", "--output", str(tmp_path / "other")]
    assert run(other) == 0
    assert set(Bundle.load(tmp_path / "other").manifest.precisions) == {"fp16"}
    capsys.readouterr()
    assert run(["export", str(trained), "--exits", "1,9", "--output", str(tmp_path / "none")]) != 0
    assert "9" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_export_can_choose_the_exits_by_measuring(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["export", str(trained), "--exits", "auto", "--output", str(tmp_path / "auto")]
    assert run([*arguments, "--quality", "0.9"]) == 0
    shown = capsys.readouterr().out
    assert "validation split, agreement of at least 0.9" in shown
    kept = [str(e.after_layer) for e in Bundle.load(tmp_path / "auto").manifest.architecture.exits]
    cheapest = next(line for line in shown.splitlines() if "(" in line and line.lstrip()[0].isdigit())
    assert [part.strip().split(" ")[0] for part in cheapest.split(" %  ")[1].split(",")] == kept


def test_calibrate_replaces_the_bundle_or_writes_another(trained: Path, tmp_path: Path) -> None:
    data = write_texts(tmp_path / "traffic.csv", 400, seed=7)
    command = ["calibrate", str(trained / "bundle"), "--file", str(data), "--output", str(tmp_path / "new")]
    assert run([*command, "--add-precision", "fp16"]) == 0
    assert "fp16" in Bundle.load(tmp_path / "new").manifest.precisions
    assert Bundle.load(tmp_path / "new").manifest.provenance["calibrated_on"] == "traffic.csv"


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_package_is_taken_and_says_what_it_gave(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "--recipe", str(recipe), "--data-dir", str(tmp_path), "--output", str(tmp_path / "run")]) == 1
    assert f"{tmp_path / 'train.tsv'}: no such file" in capsys.readouterr().err
    comments = " ".join(line[1:] for line in recipe.read_text().splitlines() if line.startswith("#"))
    assert f"offramp train --recipe training/recipes/{recipe.name} " in comments
    assert "Result" in comments


def test_a_recipe_gives_options_and_flags_win(backbone: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"backbone: {backbone}\nmethod: jt\nhead: mean\nexits: [1, 3]\nepochs: 5\nbatch-size: 16\n"
        "learning_rate: 3e-3\nprecisions: fp32\n",
        encoding="utf-8",
    )
    data = write_texts(tmp_path / "texts.csv", 200)
    command = ["train", "--train-file", str(data), "--output", str(tmp_path / "run"), "--recipe", str(recipe)]
    assert run([*command, "--epochs", "1"]) == 0
    settings = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert settings["training"]["method"] == "jt"
    assert settings["training"]["epochs"] == 1
    assert settings["exit_layers"] == [1, 3]
    assert len(Bundle.load(tmp_path / "run" / "bundle").manifest.architecture.exits) == 2


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("epoch: 3\n", "no option 'epoch'"),
        ("[1, 2]\n", "not a mapping"),
        ("epochs: many\n", "epochs"),
        ("method: magic\n", "method"),
        ("a: [\n", "recipe.yaml"),
    ],
)
def test_a_bad_recipe_is_named(recipe: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe, encoding="utf-8")
    data = write_texts(tmp_path / "texts.csv", 60)
    assert run(["train", "--train-file", str(data), "--output", str(tmp_path / "r"), "--recipe", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "0"], "epochs must be at least 1"),
        (["--learning-rate", "7"], "learning_rate must lie between"),
        (["--precisions", "int4"], "--precisions must be of fp32, fp16, int8"),
        (["--exits", "1,x"], "--exits must be whole numbers"),
        (["--exits", "2,1"], "exit layers must ascend"),
        (["--contrast-temperature", "0"], "contrast temperature must be above 0"),
        (["--text-column", "texts"], "no column 'texts'; it has 'text', 'label'"),
        (["--calibration-size", "0"], "--calibration-size must be at least 1"),
        (["--calibration-size", "500"], "60 rows are too few"),
        (["--backbone", "/nowhere/at/all"], "backbone '/nowhere/at/all' could not be loaded"),
        (["--method", "magic"], "--method"),
        (["--seed", "-1"], "seed must lie between 0"),
        (["--name", "my model"], "name must be of letters"),
        (["--version", ""], "version must not be empty"),
        (["--task", "sst2"], "either a task or a train_file"),
    ],
)
def test_wrong_options_end_in_one_line_that_names_them(
    options: list[str], message: str, backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_texts(tmp_path / "texts.csv", 60)
    output = tmp_path / "run"
    base = ["train", "--train-file", str(data), "--backbone", str(backbone), "--output", str(output), *QUICK]
    assert run([*base, *options]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.strip().count("\n") == 0
    # Nothing is left that would stand in the way of the command without the mistake.
    assert not (output / "run.json").exists()


@pytest.mark.parametrize(
    ("folder", "name"), [("my run", "my-run"), ("caf\u00e9 2", "caf-2"), ("...", "model"), ("a_b-1.0", "a_b-1.0")]
)
def test_a_bundle_is_named_after_its_folder_as_far_as_names_allow(folder: str, name: str, tmp_path: Path) -> None:
    """The manifest refused such names, but only after the training."""
    assert _name_of(tmp_path / folder) == name


@pytest.mark.parametrize("label_map", ["zz", "0=negative,zz", "0=negative,0=positive"])
def test_a_label_map_is_taken_whole_or_not_at_all(
    trained: Path, label_map: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_texts(trained.parent / "numbered.csv", 20, seed=5, labels=(0, 1))
    assert run(["evaluate", str(trained / "bundle"), "--file", str(data), "--label-map", label_map]) == 2
    assert "--label-map must look like" in capsys.readouterr().err
