"""The model card (README.md of a bundle) and its quality–speed plot. Same bundle, same bytes: no clock, no chance."""

import json
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Literal

from pydantic import TypeAdapter

from models.architecture import Architecture
from models.bundle import Calibration, CurvePoint, ExitScore, Precision, PrecisionCalibration, Scores, Tier
from models.exits import CRITERIA, Criterion

PLOT_NAME = "quality_speed.png"
# The name of the evaluation split where there is no file of its own to evaluate on.
VALIDATION_SPLIT = "validation split"

# Okabe and Ito's palette: told apart with any colour vision.
_COLOURS: dict[Criterion, str] = {
    "agreement": "#CC79A7",
    "confidence": "#0072B2",
    "entropy": "#D55E00",
    "patience": "#009E73",
}
PLOT_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "svg.hashsalt": "offramp",
    "axes.edgecolor": "#8c959f",
    "xtick.color": "#57606a",
    "ytick.color": "#57606a",
}
METRIC_NAMES = {
    "accuracy": "accuracy",
    "matthews": "Matthews correlation",
    "f1": "F1",
    "agreement": "agreement with the classifier",
}
_TICKS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)


# --- plot ------------------------------------------------------------------------------------------------------------


def quality_speed_plot(
    curves: Mapping[Criterion, Sequence[CurvePoint]],
    certified: Sequence[Tier],
    per_exit: Sequence[ExitScore],
    metric: str,
    *,
    title: str,
    subtitle: str = "",
    image: Literal["png", "svg"] = "png",
) -> bytes:
    """Task metric against speed-up: one line per criterion, certified tiers marked on it, and what every exit gives
    when all texts leave there. All must come from one split.

    ``per_exit`` gives the reference too: its last exit is full depth, drawn with its standard error.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(8.4, 5.2), dpi=144, layout="constrained")
        axes = figure.add_subplot()
        last = per_exit[-1]
        full, error = 100 * last.metrics[metric], 100 * last.standard_errors.get(metric, 0.0)
        axes.axhspan(full - error, full + error, color="#57606a", alpha=0.10, linewidth=0, zorder=0)
        axes.axhline(full, color="#57606a", linewidth=1, linestyle=(0, (5, 3)), zorder=1)

        speeds = [last.cost_in_layers / score.cost_in_layers for score in per_exit]
        axes.plot(
            speeds,
            [100 * score.metrics[metric] for score in per_exit],
            linestyle=":",
            linewidth=1,
            marker="s",
            markersize=6,
            color="#8c959f",
            markerfacecolor="white",
            label="one exit for every text",
            zorder=2,
        )
        # The last exit is the dashed line, which has its own words.
        for score, speed in zip(per_exit[:-1], speeds, strict=False):
            axes.annotate(
                f"exit {score.exit}",
                (speed, 100 * score.metrics[metric]),
                xytext=(-6, -12),
                textcoords="offset points",
                ha="right",
                fontsize=8.5,
                color="#57606a",
            )
        for criterion in CRITERIA:
            if points := _distinct(curves.get(criterion, ())):
                # Entropy is dashed over confidence: with two classes both lines are the same.
                axes.plot(
                    [point.speedup for point in points],
                    [100 * point.metric for point in points],
                    color=_COLOURS[criterion],
                    linewidth=2.6 if criterion in ("agreement", "confidence") else 1.3,
                    linestyle=(0, (4, 3)) if criterion == "entropy" else "-",
                    marker="D" if criterion == "patience" else None,
                    markersize=4.5,
                    label=criterion,
                    zorder=4 if criterion == "entropy" else 3,
                )

        fastest = max([*speeds, *(point.speedup for points in curves.values() for point in points)])
        quality_speed_axes(axes, fastest, metric)
        axes.text(
            0.945,
            full + error,
            f" full depth {full:.1f} ± {error:.1f}",
            fontsize=8.5,
            color="#57606a",
            va="bottom",
            ha="left",
        )
        tiers = [(tier, point) for tier in certified if (point := _point_of(curves, tier)) is not None]
        if tiers:
            axes.plot(
                [point.speedup for _, point in tiers],
                [100 * point.metric for _, point in tiers],
                linestyle="none",
                marker="o",
                markersize=8.5,
                color="#24292f",
                markeredgecolor="white",
                markeredgewidth=1.2,
                label="certified quality",
                zorder=6,
            )
        axes.legend(loc="lower left", frameon=True, framealpha=0.95, edgecolor="#d0d7de", fontsize=9.5)
        figure.suptitle(title, x=0.02, ha="left", fontsize=13, fontweight="bold", color="#24292f")
        if subtitle:
            axes.set_title(subtitle, loc="left", fontsize=9.5, color="#57606a")
        # Labels need to know where the points will lie, and the layout is only settled when it is drawn.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        _label_tiers(axes, tiers, figure.dpi)
        return rendered(figure, image)


def quality_speed_axes(axes: Any, fastest: float, metric: str) -> None:
    """Speed-up from 1 to ``fastest`` on a logarithmic axis, metric × 100 on the other; for when all else is drawn."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_xlim(0.94, fastest * 1.12)
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom))
    axes.xaxis.set_major_locator(FixedLocator(_ticks(fastest)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_xlabel("speed-up: mean cost of full depth ÷ mean cost (logarithmic)", color="#24292f")
    axes.set_ylabel(metric_label(metric), color="#24292f")
    tidy(axes)


def tidy(axes: Any) -> None:
    """A grid behind the data, and no frame where no axis is."""
    axes.grid(True, color="#d0d7de", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def metric_label(metric: str) -> str:
    """What an axis says of a metric × 100."""
    return METRIC_NAMES.get(metric, metric) + (" (%)" if metric in ("accuracy", "f1", "agreement") else " (× 100)")


def rendered(figure: Any, image: Literal["png", "svg"] = "png") -> bytes:
    """The figure as a file: same figure, same bytes, since the writers' own stamps (date, version) are left out."""
    buffer = BytesIO()
    figure.savefig(buffer, format=image, metadata={"Software": None} if image == "png" else {"Date": None})
    return buffer.getvalue()


def _label_tiers(axes: Any, tiers: Sequence[tuple[Tier, CurvePoint]], dpi: float) -> None:
    """Writes each tier's quality up and right of its point, moved further up where it would cover another."""
    placed: list[tuple[float, float]] = []
    for tier, point in sorted(tiers, key=lambda pair: -pair[1].speedup):
        x, y = axes.transData.transform((point.speedup, 100 * point.metric)) * 72 / dpi
        rise = 5.0
        # A label is about 30 by 12 points, a marker 9 wide.
        while any(abs(x - other_x) < 32 and abs(y + rise - other_y) < 12 for other_x, other_y in placed):
            rise += 2
        placed.append((x, y + rise))
        axes.annotate(
            f"{tier.quality:g}",
            (point.speedup, 100 * point.metric),
            xytext=(5, rise),
            textcoords="offset points",
            fontsize=9,
            fontweight="bold",
            color="#24292f",
            bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
            zorder=5,
        )


def _distinct(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Without the points where nothing changed from the one before."""
    kept: list[CurvePoint] = []
    for point in points:
        if not kept or (point.speedup, point.metric) != (kept[-1].speedup, kept[-1].metric):
            kept.append(point)
    return kept


def _ticks(fastest: float) -> list[float]:
    ticks: list[float] = []
    for tick in _TICKS:
        # Closer than a tenth of the axis, labels of a logarithmic axis run into each other.
        if tick <= fastest * 1.1 and (not ticks or tick / ticks[-1] >= max(fastest, 1.5) ** 0.09):
            ticks.append(float(tick))
    return ticks


def _point_of(curves: Mapping[Criterion, Sequence[CurvePoint]], tier: Tier) -> CurvePoint | None:
    return next((point for point in curves.get(tier.criterion, ()) if point.threshold == tier.threshold), None)


def bundle_plot(
    manifest: Mapping[str, Any], calibration: Calibration, *, image: Literal["png", "svg"] = "png"
) -> bytes:
    """The plot of a bundle's default precision; ``manifest`` as for :func:`model_card`.

    Single exits are those of the first evaluation split. The curves are that split's too where it has them, else the
    calibration's, and the subtitle says so.
    """
    precision: Precision = manifest["default_precision"]
    scores = _scores(manifest)
    if not scores:
        raise ValueError("manifest: scores are empty; the plot needs the scores of each exit")
    split = scores[0]
    if precision not in split.per_exit:
        raise ValueError(f"manifest: scores on {split.split} lack the default precision {precision}")
    where = f"{precision}, {split.n:,} texts of {split.split}"
    curves = split.curves.get(precision)
    if curves is None:
        curves = calibration.precisions[precision].curves
        where += f"; curves: {calibration.n_risk:,} texts of the risk split"
    calibrated = calibration.precisions[precision]
    return quality_speed_plot(
        curves,
        calibrated.certified,
        split.per_exit[precision],
        calibration.metric,
        title=f"{manifest['name']}: quality against speed",
        subtitle=where,
        image=image,
    )


# --- model card ------------------------------------------------------------------------------------------------------


def model_card(
    manifest: Mapping[str, Any],
    calibration: Calibration,
    *,
    plot: str | None = PLOT_NAME,
    example: str = "A quick answer is often a good answer.",
    example_pair: str = "Good answers can be quick.",
) -> str:
    """README.md of a bundle, as Markdown.

    ``manifest`` is what :func:`models.bundle.write_bundle` takes, or ``bundle.manifest.model_dump(mode="json")``;
    ``plot`` the file name of the plot beside the card, if there is one; ``example`` (and ``example_pair``) the text of
    the curl command.
    """
    architecture = Architecture.model_validate(manifest["architecture"])
    sections = [
        _introduction(manifest, architecture, calibration),
        f"![Quality against speed]({plot})" if plot else "",
        _exits(manifest, architecture, calibration),
        *(_certified(precision, calibration, _scores(manifest)) for precision in calibration.precisions),
        _calibrated(calibration),
        _serving(manifest, calibration, example, example_pair),
        _provenance(manifest, calibration),
        f"## Licence\n\n{manifest['licence']}",
        _limits(manifest, architecture),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _introduction(manifest: Mapping[str, Any], architecture: Architecture, calibration: Calibration) -> str:
    labels = list(manifest["labels"])
    shown = ", ".join(f"`{_cell(label)}`" for label in labels)
    if len(labels) > 12:
        shown = f"{len(labels)} classes\n\n<details><summary>all labels</summary>\n\n{shown}\n\n</details>"
    reads = "pairs of texts" if manifest["takes_pairs"] else "single texts"
    exits = len(architecture.exits)
    size = (
        f"{architecture.num_layers} layers, width {architecture.hidden_size}, {architecture.num_heads} heads, "
        f"vocabulary {architecture.vocab_size:,}"
    )
    what = (
        f"A text classifier with {exits} exit{'s' if exits > 1 else ''} on a {architecture.num_layers}-layer encoder "
        f"(`{architecture.backbone}`), as an Offramp bundle: a request takes the first exit at which the network is "
        "sure enough for what that request asked, and pays for no deeper layer."
    )
    lines = [
        f"# {manifest['name']}",
        "",
        what,
        "",
        "| | |",
        "|---|---|",
        f"| version | {_cell(manifest['version'])} |",
        f"| task | {_cell(manifest['task'])} |",
        f"| reads | {reads}, up to {architecture.max_length} tokens each |",
        f"| size | {size} |",
        f"| precisions | {', '.join(calibration.precisions)} (served by default: {manifest['default_precision']}) |",
        "",
        f"Labels: {shown}",
    ]
    return "\n".join(lines)


def _exits(manifest: Mapping[str, Any], architecture: Architecture, calibration: Calibration) -> str:
    explanation = (
        "Every text leaves at the exit of that row, whatever its confidence. Cost is the mean cost until that exit, "
        "heads and pooled rows included, in units of one whole layer; ± is one standard error."
    )
    parts = ["## What each exit knows", explanation]
    for entry in _scores(manifest):
        for precision, rows in entry.per_exit.items():
            names = list(rows[0].metrics)
            if calibration.metric in names:
                names = [calibration.metric, *(name for name in names if name != calibration.metric)]
            table = [["exit", "after layer", "head", "cost", "speed-up", *names]]
            for row, spec in zip(rows, architecture.exits, strict=True):
                table.append(
                    [
                        str(row.exit),
                        str(spec.after_layer),
                        spec.head,
                        f"{row.cost_in_layers:.2f}",
                        f"{rows[-1].cost_in_layers / row.cost_in_layers:.2f}×",
                        *(_with_error(row, name) for name in names),
                    ]
                )
            parts.append(f"{precision}, {entry.split}, n = {entry.n:,}:\n\n" + markdown_table(table))
    return "\n\n".join(parts)


def _with_error(score: ExitScore, name: str) -> str:
    error = score.standard_errors.get(name)
    return f"{100 * score.metrics[name]:.1f}" + (f" ± {100 * error:.1f}" if error is not None else "")


def _kept(entry: Scores, precision: Precision, calibrated: PrecisionCalibration, metric: str) -> str:
    """What the certified thresholds gave on an evaluation split; empty where it has no curves."""
    curves = entry.curves.get(precision)
    if curves is None:
        return ""
    full = entry.per_exit[precision][-1].metrics[metric]
    table = [["quality", "agreement", metric, "kept", "cost", "speed-up", "leave at exit 1, 2, …"]]
    for tier in calibrated.certified:
        if point := _point_of(curves, tier):
            kept = f"{100 * point.metric / full:.1f} %" if full > 0 else "–"
            shares = " ".join(f"{100 * share:.0f}" for share in point.exit_shares) + " %"
            row = [f"{tier.quality:g}", f"{100 * point.agreement:.2f} %", f"{100 * point.metric:.1f}", kept]
            table.append([*row, f"{point.mean_cost:.2f}", f"{point.speedup:.2f}×", shares])
    if entry.split == VALIDATION_SPLIT:
        role = "which also chose the epoch, the temperatures and the criterion, so expect a little less"
    else:
        role = "which this run fitted nothing on and chose nothing by"
    return f"The same thresholds on {entry.split}, n = {entry.n:,}, {role}:\n\n" + markdown_table(table)


def _certified(precision: Precision, calibration: Calibration, scores: Sequence[Scores]) -> str:
    calibrated: PrecisionCalibration = calibration.precisions[precision]
    parts = [f"## Certified quality, {precision}"]
    if calibrated.certified:
        parts.append(
            "`quality: q` promises that the answer is the last exit's with probability ≥ q. All rows of all precisions "
            f"hold at once with probability ≥ {1 - calibration.delta:g} over the draw of the {calibration.n_risk:,} "
            "texts of the risk split, which neither training nor the choice of the grid saw (exact binomial test, "
            "fixed sequence from the safest threshold, Bonferroni over all of them). `disagree` is what that split "
            "showed."
        )
        table = [["quality", "leaves by", "disagree", "p-value", "cost", "speed-up"]]
        for tier in calibrated.certified:
            sign = "≤" if tier.criterion == "entropy" else "≥"
            row = [f"{tier.quality:g}", f"{tier.criterion} {sign} {tier.threshold:.6g}"]
            row += [f"{tier.disagreements} of {tier.n:,}", f"{tier.p_value:.2g}"]
            table.append([*row, f"{tier.mean_cost:.2f}", f"{tier.speedup:.2f}×"])
        parts.append(markdown_table(table))
        parts += [_kept(entry, precision, calibrated, calibration.metric) for entry in scores]
    else:
        parts.append("No quality below 1 could be certified; `quality: 1.0` always answers from the last exit.")
    if calibrated.refused:
        parts.append(
            "Not promised, so refused:\n\n"
            + "\n".join(f"- {r.quality:g}: {r.why}; texts needed: {r.n_needed:,}." for r in calibrated.refused)
        )
    return "\n\n".join(part for part in parts if part)


def _calibrated(calibration: Calibration) -> str:
    table = [["precision", "exit", "temperature", "error before", "error after", "for agreement"]]
    for precision, calibrated in calibration.precisions.items():
        rows = zip(
            calibrated.temperatures,
            calibrated.calibration_error_before,
            calibrated.calibration_error_after,
            calibrated.agreement_temperatures,
            strict=True,
        )
        for number, (temperature, before, after, agreeing) in enumerate(rows, start=1):
            row = [f"{temperature:.3f}", f"{before:.4f}", f"{after:.4f}", f"{agreeing:.3f}"]
            table.append([precision, str(number), *row])
    own = calibration.n_temperature
    fitted = f"{own:,} texts of their own" if own else "the validation split (judged by halves)"
    return (
        "## Calibration of the scores\n\n"
        f"Scores are softmax after the exit's temperature, fitted on {fitted} and kept only where it lowers the loss "
        "of texts that did not fit it (1 where it does not). Expected calibration error, 15 bins, on such texts of "
        "the validation split. The criterion `agreement` has temperatures of its own (last column): they make "
        f"confidence the chance that the last exit gives the same label.\n\n{markdown_table(table)}"
    )


def _serving(manifest: Mapping[str, Any], calibration: Calibration, example: str, example_pair: str) -> str:
    inputs: Any = {"text": example, "text_pair": example_pair} if manifest["takes_pairs"] else example
    certified = calibration.precisions[manifest["default_precision"]].certified
    body = {"inputs": inputs, "quality": certified[0].quality if certified else 1.0}
    # A quote inside the shell's single quotes.
    quoted = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return (
        "## Serve it\n\n"
        "```sh\n"
        "offramp serve path/to/this/folder\n"
        "curl -s localhost:8000/classify -H 'Content-Type: application/json' \\\n"
        f"  -d '{quoted}'\n"
        "```\n\n"
        "Depth per request: `quality` (the promise above), or `speed` (a mean speed-up from the measured curve, "
        "without a promise), or `criterion` with `threshold`."
    )


def _provenance(manifest: Mapping[str, Any], calibration: Calibration) -> str:
    rows = [["", ""], *([key, value] for key, value in _flat(manifest["provenance"]))]
    own = f"temperature {calibration.n_temperature:,}, " if calibration.n_temperature else ""
    splits = (
        f"Splits that no weight was fitted on: {own}validation {calibration.n_validation:,}, risk "
        f"{calibration.n_risk:,} texts (sha256 of the risk split `{calibration.data_sha256[:16]}…`)."
    )
    return f"## Data and provenance\n\n{splits}" + (f"\n\n{markdown_table(rows)}" if len(rows) > 1 else "")


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            rows += _flat(entry, f"{prefix}{key}.")
        else:
            text = entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False, default=str)
            rows.append((prefix + str(key), text))
    return rows


def _limits(manifest: Mapping[str, Any], architecture: Architecture) -> str:
    return (
        "## Limits\n\n"
        "- The promise is agreement with this model's last exit, not truth: where the last exit errs, an early answer "
        "that agrees errs too.\n"
        "- It holds on average over texts like those of the risk split, not for each class or each text, and not for "
        "texts of another kind, source or language.\n"
        "- Speed-ups are ratios of multiply-accumulates; the gain in time depends on the machine and the load.\n"
        f"- Longer inputs are cut to {architecture.max_length} tokens, special tokens included"
        + (" (the longer text of a pair first).\n" if manifest["takes_pairs"] else ".\n")
        + "- It answers one of its labels for any input, also for one that fits none of them."
    )


def _scores(manifest: Mapping[str, Any]) -> tuple[Scores, ...]:
    return TypeAdapter(tuple[Scores, ...]).validate_python(list(manifest["scores"]))


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the head."""
    lines = ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _cell(text: object) -> str:
    """One line, with pipes escaped, so that no label or setting breaks a table."""
    return " ".join(str(text).replace("|", "\\|").split())
