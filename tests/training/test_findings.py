"""What sweeps found: read from their folders, kept as CSVs, told as tables and figures."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from offramp import run
from tests.training.toy import LABELS, toy_backbone, toy_examples
from training.data import DataError
from training.figures import draw
from training.findings import Angles, Findings, Score, collect, read_csvs, write_csvs
from training.sweep import ANSWERS_NAME, Cell, run_cell
from training.tables import by_weight, differences, report
from training.trainer import TrainingSettings


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one task's sweep: two methods and two weights of one of them, on two tiny layers."""
    folder = tmp_path_factory.mktemp("sweeps")
    parts = [toy_examples(count, seed) for count, seed in ((40, 1), (20, 2), (30, 3))]
    settings = TrainingSettings(epochs=1, batch_size=20, learning_rate=2e-3)
    for cell in (Cell("jt", "mean", 0), Cell("acl-cl", "mean", 0), Cell("acl-cl", "mean", 0, contrast_weight=0.7)):
        run_cell(cell, toy_backbone(), *parts, LABELS, settings, folder / "toy", max_length=16)
    return folder


def score(method: str, seed: int, exit: int, value: float, *, weight: float = 0.2, task: str = "rte") -> Score:
    return Score(
        task=task,
        method=method,
        head="peek",
        weight=weight,
        seed=seed,
        examples=1700,
        epochs=4,
        exit=exit,
        exits=3,
        cost=exit - 0.8,
        metric="accuracy",
        n=277,
        score=value,
        validation_score=value,
    )


def scores(method: str, by_seed: dict[int, tuple[float, float, float]], **options: float | str) -> list[Score]:
    return [
        score(method, seed, exit, value, **options)  # type: ignore[arg-type]
        for seed, values in by_seed.items()
        for exit, value in enumerate(values, start=1)
    ]


JT = {0: (0.50, 0.60, 0.70), 1: (0.52, 0.62, 0.72), 2: (0.54, 0.61, 0.71)}
ACL_CL = {0: (0.52, 0.62, 0.70), 1: (0.55, 0.63, 0.70), 2: (0.55, 0.66, 0.70)}


def test_a_folder_of_sweeps_is_read_task_by_task(sweep: Path) -> None:
    found = collect([sweep], embed=False)
    assert {s.task for s in found.scores} == {"toy"}
    assert len(found.scores) == 3 * 2
    result = json.loads((sweep / "toy" / "jt-mean-seed0" / "result.json").read_text())
    own = [s for s in found.scores if s.method == "jt"]
    assert [s.score for s in own] == pytest.approx([e["score"] for e in result["exits"]], abs=1e-6)
    # As text: NaN, the spread of one seed, is not NaN.
    assert repr(found) == repr(collect([sweep / "toy"], embed=False))


def test_a_curve_goes_from_the_first_exit_for_all_to_the_last_for_all(sweep: Path) -> None:
    found = collect([sweep], embed=False)
    for method in ("jt", "acl-cl"):
        first, last = (s for s in found.scores if s.method == method and s.weight == 0.2)
        curve = [p for p in found.points if p.method == method]
        assert (curve[0].score, curve[0].mean_cost) == pytest.approx((first.score, first.cost), abs=1e-4)
        assert (curve[-1].score, curve[-1].mean_cost) == pytest.approx((last.score, last.cost), abs=1e-4)
        assert [p.mean_cost for p in curve] == sorted(p.mean_cost for p in curve)
        assert math.isnan(curve[0].spread)


def test_angles_are_those_of_the_default_weight_by_step(sweep: Path) -> None:
    found = collect([sweep], embed=False)
    assert {a.method for a in found.angles} == {"acl-cl"}
    # 40 examples in batches of 20, one epoch, one seed.
    assert sum(a.batches for a in found.angles) == 2


def test_texts_and_labels_are_laid_out_together(sweep: Path) -> None:
    places = [p for p in collect([sweep]).places if p.method == "acl-cl"]
    with np.load(sweep / "toy" / "acl-cl-mean-seed0" / ANSWERS_NAME) as answers:
        labels = answers["evaluation_labels"].tolist()
    for number in (1, 2):
        own = [p for p in places if p.exit == number]
        assert [p.label for p in own if not p.is_label] == labels
        assert [p.label for p in own if p.is_label] == [0, 1, 2]
        assert len({(p.x, p.y) for p in own}) > 25


def test_runs_without_kept_answers_have_scores_but_no_curve(sweep: Path, tmp_path: Path) -> None:
    cell = tmp_path / "toy" / "jt-mean-seed0"
    cell.mkdir(parents=True)
    (cell / "result.json").write_text((sweep / "toy" / "jt-mean-seed0" / "result.json").read_text())
    found = collect([tmp_path])
    assert (len(found.scores), found.points, found.places) == (2, (), ())


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no finished run of offramp sweep in it"):
        collect([tmp_path])


def test_what_was_written_is_read_again(sweep: Path, tmp_path: Path) -> None:
    found = collect([sweep])
    write_csvs(found, tmp_path)
    assert repr(read_csvs(tmp_path)) == repr(found)
    write_csvs(replace(found, angles=()), tmp_path)
    assert read_csvs(tmp_path).angles == ()


def test_a_row_that_is_none_is_named(sweep: Path, tmp_path: Path) -> None:
    write_csvs(collect([sweep], embed=False), tmp_path)
    path = tmp_path / "scores.csv"
    path.write_text(path.read_text().replace("jt,mean,0.2,0,", "jt,mean,high,0,", 1))
    with pytest.raises(DataError, match=r"scores\.csv, row \d+: not a row of scores \(could not convert .*'high'\)"):
        read_csvs(tmp_path)


def test_the_command_makes_the_same_report_from_the_csvs_alone(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(sweep), "--output", str(tmp_path)]) == 0
    assert "report.md: 6 rows of scores, 4 figures" in capsys.readouterr().out
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made.keys() == {
        "report.md",
        *(f"{name}.csv" for name in ("scores", "points", "angles", "places")),
        *("curves-toy-mean.png", "angles.png", "weights.png", "embedding-toy-mean.png"),
    }
    for name in made:
        if not name.endswith(".csv"):
            (tmp_path / name).unlink()
    assert run(["report", "--output", str(tmp_path)]) == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == made


def test_a_table_gives_every_exit_and_the_mean_of_those_before_the_last() -> None:
    found = Findings(
        (
            *scores("jt", JT),
            *[score("ce", 0, 3, 0.74)],
        )
    )
    lines = report(found, {}).splitlines()
    at = lines.index("| method | seeds | 0.20 | 1.20 | 2.20 | mean of all but the last |")
    # A method of one exit has no other columns, and one seed no deviation.
    assert lines[at + 2] == "| `ce` | 1 |  |  | 74.0 |  |"
    # By hand: 50, 52, 54 and 60, 62, 61 and 70, 72, 71; means of the first two 55, 57, 57.5.
    assert lines[at + 3] == "| `jt` | 3 | 52.0 ± 2.0 | 61.0 ± 1.0 | 71.0 ± 1.0 | 56.50 ± 1.32 |"


def test_methods_are_compared_by_runs_of_the_same_seed() -> None:
    # A fourth seed of one method alone counts nowhere.
    more = {**ACL_CL, 3: (0.9, 0.9, 0.9)}
    found = Findings(
        (
            *scores("jt", JT),
            *scores("acl-cl", more),
        )
    )
    by_seed = differences(found, "peek")["acl-cl", "jt", "rte"]
    assert by_seed == pytest.approx({0: 0.02, 1: 0.02, 2: 0.03})
    values = [100 * value for value in by_seed.values()]
    t = stats.ttest_1samp(values, 0).pvalue
    assert f"| `acl-cl` − `jt` | rte | peek | 3 | +2.33 ± 0.58 | {t:.3f} | 0.250 |" in report(found, {})


def test_all_tasks_are_averaged_seed_by_seed() -> None:
    rte = [*scores("jt", JT), *scores("acl-cl", ACL_CL)]
    cola = [
        *scores("jt", {0: (0.5, 0.5, 0.5), 1: (0.5, 0.5, 0.5)}, task="cola"),
        *scores("acl-cl", {0: (0.5, 0.5, 0.5), 1: (0.5, 0.7, 0.5)}, task="cola"),
    ]
    found = Findings((*rte, *cola))
    # Seeds 0 and 1: RTE 2 and 2 points, CoLA 0 and 10.
    assert "| `acl-cl` − `jt` | all tasks | peek | 2 | +3.50 ± 3.54 |" in report(found, {})


def test_pairs_that_do_not_differ_get_no_p_value() -> None:
    found = Findings(
        (
            *scores("jt", JT),
            *scores("acl-cl", JT),
        )
    )
    assert "| `acl-cl` − `jt` | rte | peek | 3 | +0.00 ± 0.00 | – | – |" in report(found, {})


def test_weights_are_compared_over_the_seeds_that_all_of_them_have() -> None:
    low = [score("acl", seed, 3, 0.7 + seed / 100) for seed in (0, 1, 2)]
    high = [score("acl", seed, 3, 0.6 + seed / 100, weight=0.9) for seed in (1, 2)]
    without = [score("jt", 0, 3, 0.7, weight=w) for w in (0.2, 0.9)]
    found = Findings((*low, *high, *without))
    curves = by_weight(found)
    assert curves.keys() == {("rte", "peek", "acl")}
    assert curves["rte", "peek", "acl"] == {0.2: pytest.approx([0.71, 0.72]), 0.9: pytest.approx([0.61, 0.62])}
    assert "| rte | peek | `acl` | 2 | 71.5 ± 0.7 | 61.5 ± 0.7 | 10.0 |" in report(found, {})


def test_the_share_above_a_right_angle_is_told() -> None:
    rows = [Angles("rte", "jt+scl", "peek", 2, low, n) for low, n in ((70, 10), (75, 50), (85, 20), (90, 15), (105, 5))]
    found = Findings((score("jt+scl", 0, 3, 0.7),), angles=tuple(rows))
    line = "| rte | peek | CE and SCL (`jt+scl`) | 2 | 100 | 75° to 80° | 85 % | 20.0 % |"
    assert line in report(found, {})
    assert list(draw(found)) == ["angles.png"]
