"""The model card says what the bundle holds, no more, and the same bundle gives the same bytes."""

import json
import re
from typing import Any

import numpy as np
import pytest

from models.bundle import Calibration, PrecisionCalibration
from tests.training.synthetic import architecture, draw
from training.calibrate import Split, SplitLogits, calibrate
from training.evaluate import curve, exit_scores, measure
from training.report import VALIDATION_SPLIT, bundle_plot, model_card


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    parts = [draw(n, seed=seed) for seed, n in enumerate((300, 700, 500))]
    splits = [Split(labels, tokens) for _, labels, tokens in parts]
    logits = SplitLogits(temperature=parts[0][0], risk=parts[1][0], validation=parts[2][0])
    return calibrate(
        {"fp32": logits, "int8": logits},
        architecture(),
        temperature=splits[0],
        risk=splits[1],
        validation=splits[2],
        metric="accuracy",
        data_sha256="c0ffee" * 10,
        points=30,
    )


def scores(split: str, n: int, precision: PrecisionCalibration) -> dict[str, Any]:
    logits, labels, tokens = draw(n, seed=2)
    rows = exit_scores(
        measure(
            logits, precision.temperatures, precision.agreement_temperatures, labels, tokens, architecture(), "accuracy"
        )
    )
    return {"split": split, "n": n, "per_exit": {"int8": [row.model_dump(mode="json") for row in rows]}}


@pytest.fixture(scope="module")
def drawn(manifest: dict[str, Any], calibration: Calibration) -> str:
    """The plot as SVG: matplotlib leaves every text beside its outlines as a comment."""
    return bundle_plot(manifest, calibration, image="svg").decode()


@pytest.fixture(scope="module")
def manifest(calibration: Calibration) -> dict[str, Any]:
    return {
        "name": "tiny-sentiment",
        "version": "3",
        "task": "sst2",
        "labels": ["negative", "positive"],
        "takes_pairs": False,
        "architecture": architecture().model_dump(mode="json"),
        "default_precision": "int8",
        "scores": [scores("dev", 200, calibration.precisions["int8"])],
        "provenance": {"method": "acl-cl", "versions": {"torch": "2.13"}, "note": "a | b"},
        "licence": "Apache-2.0; data: research use",
    }


def rows_of(card: str, first_cell: str) -> list[list[str]]:
    """Cells of the table rows that begin with ``first_cell``."""
    lines = [line for line in card.splitlines() if line.startswith(f"| {first_cell} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_card_gives_every_exit_with_n_and_standard_error(
    manifest: dict[str, Any], calibration: Calibration
) -> None:
    card = model_card(manifest, calibration)
    assert "int8, dev, n = 200:" in card
    for row in manifest["scores"][0]["per_exit"]["int8"]:
        accuracy, error = 100 * row["metrics"]["accuracy"], 100 * row["standard_errors"]["accuracy"]
        cells = rows_of(card, str(row["exit"]))[0]
        assert cells[-1] == f"{accuracy:.1f} ± {error:.1f}"
        assert cells[3] == f"{row['cost_in_layers']:.2f}"


def test_the_card_gives_every_certified_tier_with_its_threshold_and_what_it_keeps(
    manifest: dict[str, Any], calibration: Calibration
) -> None:
    card = model_card(manifest, calibration)
    certified = calibration.precisions["int8"].certified
    assert certified
    for tier in certified:
        rows = rows_of(card, f"{tier.quality:g}")
        assert len(rows) == 2  # one for each precision
        assert f"{tier.threshold:.6g}" in rows[0][1]
        assert rows[0][2] == f"{tier.disagreements} of {tier.n:,}"
        assert rows[0][-1] == f"{tier.speedup:.2f}×"
    assert "probability ≥ 0.95" in card


def test_the_card_says_what_is_refused_and_why(manifest: dict[str, Any], calibration: Calibration) -> None:
    refused = calibration.precisions["int8"].refused
    assert refused
    card = model_card(manifest, calibration)
    for tier in refused:
        assert f"- {tier.quality:g}: {tier.why}; texts needed: {tier.n_needed:,}." in card


def test_a_bundle_that_can_promise_nothing_says_so(manifest: dict[str, Any], calibration: Calibration) -> None:
    nothing = {
        name: precision.model_copy(update={"certified": ()}) for name, precision in calibration.precisions.items()
    }
    card = model_card(manifest, calibration.model_copy(update={"precisions": nothing}))
    assert "No quality below 1 could be certified" in card
    assert '"quality": 1.0' in card


@pytest.mark.parametrize("text", ["plain", 'it\'s "quoted" – ünïcode'])
@pytest.mark.parametrize("pairs", [False, True])
def test_the_curl_command_sends_what_the_model_takes(
    manifest: dict[str, Any], calibration: Calibration, text: str, pairs: bool
) -> None:
    card = model_card({**manifest, "takes_pairs": pairs}, calibration, example=text, example_pair="other")
    found = re.search(r"-d '(.*)'\n```", card)
    assert found is not None
    body = json.loads(found.group(1).replace("'\\''", "'"))
    assert body["inputs"] == ({"text": text, "text_pair": "other"} if pairs else text)
    assert body["quality"] == calibration.precisions["int8"].certified[0].quality


def test_labels_licence_provenance_and_splits_are_named(manifest: dict[str, Any], calibration: Calibration) -> None:
    card = model_card(manifest, calibration)
    assert "Labels: `negative`, `positive`" in card
    assert "## Licence\n\nApache-2.0; data: research use" in card
    assert "| versions.torch | 2.13 |" in card
    assert "temperature 300, validation 500, risk 700 texts" in card
    assert "c0ffeec0ffee" in card
    assert card.startswith("# tiny-sentiment\n")


def test_nothing_from_a_manifest_breaks_a_table(manifest: dict[str, Any], calibration: Calibration) -> None:
    card = model_card({**manifest, "task": "a|b\nc"}, calibration)
    assert "| task | a\\|b c |" in card
    assert "| note | a \\| b |" in card


def test_many_labels_are_folded_away(manifest: dict[str, Any], calibration: Calibration) -> None:
    card = model_card({**manifest, "labels": [f"intent_{n}" for n in range(77)]}, calibration)
    assert "Labels: 77 classes" in card
    assert "<details>" in card
    assert "`intent_76`" in card


def test_a_card_without_a_plot_shows_none(manifest: dict[str, Any], calibration: Calibration) -> None:
    assert "![Quality against speed](quality_speed.png)" in model_card(manifest, calibration)
    assert "![" not in model_card(manifest, calibration, plot=None)


def test_the_same_bundle_gives_the_same_card_and_the_same_plot(
    manifest: dict[str, Any], calibration: Calibration, drawn: str
) -> None:
    assert model_card(manifest, calibration) == model_card(manifest, calibration)
    plot = bundle_plot(manifest, calibration)
    assert plot == bundle_plot(manifest, calibration)
    assert plot.startswith(b"\x89PNG")
    assert bundle_plot(manifest, calibration, image="svg").decode() == drawn


def test_the_plot_marks_certified_tiers_exits_and_full_depth(
    manifest: dict[str, Any], calibration: Calibration, drawn: str
) -> None:
    for tier in calibration.precisions["int8"].certified:
        assert f"<!-- {tier.quality:g} -->" in drawn
    for number in range(1, 6):
        assert f"<!-- exit {number} -->" in drawn
    last = manifest["scores"][0]["per_exit"]["int8"][-1]
    assert f"full depth {100 * last['metrics']['accuracy']:.1f}" in drawn
    for criterion in ("confidence", "entropy", "patience"):
        assert f"<!-- {criterion} -->" in drawn


def test_the_plot_says_where_its_exits_and_curves_come_from(
    manifest: dict[str, Any], calibration: Calibration, drawn: str
) -> None:
    assert "200 texts of dev; curves: 700 texts of the risk split" in drawn
    whole = {**manifest, "scores": [with_curves(manifest["scores"][0], calibration)]}
    one_split = bundle_plot(whole, calibration, image="svg").decode()
    assert "200 texts of dev" in one_split
    assert "risk split" not in one_split


def test_the_card_shows_what_certified_thresholds_gave_on_the_evaluation_split(
    manifest: dict[str, Any], calibration: Calibration
) -> None:
    entry = with_curves(manifest["scores"][0], calibration)
    card = model_card({**manifest, "scores": [entry]}, calibration)
    assert "The same thresholds on dev, n = 200" in card
    section = card[card.index("The same thresholds on dev") :]
    full = entry["per_exit"]["int8"][-1]["metrics"]["accuracy"]
    for tier in calibration.precisions["int8"].certified:
        point = next(p for p in entry["curves"]["int8"][tier.criterion] if p["threshold"] == tier.threshold)
        row = rows_of(section, f"{tier.quality:g}")[0]
        assert row[1] == f"{100 * point['agreement']:.2f} %"
        assert row[3] == f"{100 * point['metric'] / full:.1f} %"
        assert row[5] == f"{point['speedup']:.2f}×"


def test_the_card_does_not_call_the_validation_split_untouched(
    manifest: dict[str, Any], calibration: Calibration
) -> None:
    entry = with_curves(manifest["scores"][0], calibration)
    assert "chose nothing by" in model_card({**manifest, "scores": [entry]}, calibration)
    card = model_card({**manifest, "scores": [{**entry, "split": VALIDATION_SPLIT}]}, calibration)
    assert "which also chose the epoch" in card
    assert "chose nothing by" not in card


def with_curves(entry: dict[str, Any], calibration: Calibration) -> dict[str, Any]:
    """Evaluation scores with the curves of their own texts, at the calibration's thresholds."""
    calibrated = calibration.precisions["int8"]
    logits, labels, tokens = draw(entry["n"], seed=2)
    split = measure(
        logits, calibrated.temperatures, calibrated.agreement_temperatures, labels, tokens, architecture(), "accuracy"
    )
    curves = {
        criterion: [p.model_dump(mode="json") for p in curve(split, criterion, [p.threshold for p in points])]
        for criterion, points in calibrated.curves.items()
    }
    return {**entry, "curves": {"int8": curves}}


def test_a_plot_without_scores_is_refused(manifest: dict[str, Any], calibration: Calibration) -> None:
    with pytest.raises(ValueError, match="manifest: scores are empty"):
        bundle_plot({**manifest, "scores": []}, calibration)


def test_a_model_with_one_exit_and_no_tier_can_still_be_drawn(
    manifest: dict[str, Any], calibration: Calibration
) -> None:
    logits, labels, tokens = draw(40, exits=1)
    single = architecture(exits=1)
    split = Split(labels, tokens)
    calibrated = calibrate(
        {"fp32": SplitLogits(logits, logits)},
        single,
        validation=split,
        risk=split,
        metric="accuracy",
        data_sha256="0" * 64,
    )
    rows = exit_scores(measure(logits, np.ones(1), np.ones(1), labels, tokens, single, "accuracy"))
    one = {
        **manifest,
        "architecture": single.model_dump(mode="json"),
        "default_precision": "fp32",
        "scores": [{"split": "dev", "n": 40, "per_exit": {"fp32": [row.model_dump(mode="json") for row in rows]}}],
    }
    assert bundle_plot(one, calibrated).startswith(b"\x89PNG")
    card = model_card(one, calibrated)
    assert "with 1 exit on" in card
    assert "fitted on the validation split (judged by halves)" in card
