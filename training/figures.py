"""The figures of a report, drawn from :class:`training.findings.Findings`. Same findings, same bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from training.findings import BIN, Findings, Place, Point, is_single
from training.report import PLOT_STYLE, metric_label, quality_speed_axes, rendered, tidy
from training.tables import angle_counts, by_weight, contrast_name, ordered

# Okabe and Ito's palette, told apart with any colour vision; the method that the others are measured by in black.
COLOURS = {
    "jt": "#0072B2",
    "2st": "#E69F00",
    "alt": "#56B4E9",
    "jt+scl": "#009E73",
    "acl-embed": "#CC79A7",
    "acl-cl": "#D55E00",
    "ce": "#57606a",
    "ce+scl": "#009E73",
    "acl": "#D55E00",
}
_CLASSES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_INK = "#24292f"


def draw(findings: Findings) -> dict[str, tuple[str, bytes]]:
    """Every figure that there is data for: by file name its caption and its PNG."""
    made: dict[str, tuple[str, bytes]] = {}
    with matplotlib.rc_context(PLOT_STYLE):
        for task, head in dict.fromkeys((p.task, p.head) for p in findings.points):
            own = [p for p in findings.points if (p.task, p.head) == (task, head)]
            caption = (
                f"{task}, head {head}: quality against speed, leaving by confidence, mean over seeds; the band is one "
                "standard deviation over seeds."
            )
            made[f"curves-{task}-{head}.png"] = caption, rendered(_curves(own))
        if angle_counts(findings):
            caption = (
                "Angles between the gradient of cross-entropy and that of the contrastive part, all batches of all "
                "seeds; shaded: 75° to 105°, the range that the paper's pilot on RTE reports for SCL."
            )
            made["angles.png"] = caption, rendered(_angles(findings))
        if by_weight(findings):
            caption = (
                "Weight λ of the contrastive part; single-exit methods by the last exit, multi-exit methods by the "
                "mean of the exits before it; bars are one standard deviation over seeds."
            )
            made["weights.png"] = caption, rendered(_weights(findings))
        for task, head in dict.fromkeys((p.task, p.head) for p in findings.places):
            own_places = [p for p in findings.places if (p.task, p.head) == (task, head)]
            caption = (
                f"{task}, head {head}: t-SNE of the vectors that enter each exit's classifier, one seed, texts of the "
                "evaluation file coloured by their true class; stars are the label embeddings."
            )
            made[f"embedding-{task}-{head}.png"] = caption, rendered(_embedding(own_places))
    return made


def _curves(points: Sequence[Point]) -> Figure:
    figure = Figure(figsize=(7.6, 5.0), dpi=144, layout="constrained")
    axes = figure.add_subplot()
    full = max(p.mean_cost for p in points)
    for method in ordered([p.method for p in points]):
        own = sorted((p for p in points if p.method == method), key=lambda p: p.mean_cost)
        speeds = np.array([full / p.mean_cost for p in own])
        scores, spread = 100 * np.array([p.score for p in own]), 100 * np.array([p.spread for p in own])
        label = f"{method} ({own[0].seeds} seed{'s' if own[0].seeds > 1 else ''})"
        if is_single(method):
            marker = {"ce": "o", "ce+scl": "^", "acl": "s"}[method]
            axes.plot(speeds[:1], scores[:1], marker, ms=7, mfc="none", color=COLOURS[method], label=label, zorder=5)
            continue
        axes.plot(speeds, scores, color=COLOURS[method], lw=2.2 if method == "acl-cl" else 1.5, label=label, zorder=3)
        if not np.isnan(spread).any():
            axes.fill_between(speeds, scores - spread, scores + spread, color=COLOURS[method], alpha=0.1, lw=0)
    quality_speed_axes(axes, max(full / p.mean_cost for p in points), points[0].metric)
    axes.legend(frameon=True, framealpha=0.95, edgecolor="#d0d7de", fontsize=9, loc="lower left")
    axes.set_title(f"{points[0].task}, head {points[0].head}", loc="left", fontweight="bold", color=_INK)
    return figure


def _angles(findings: Findings) -> Figure:
    counts = angle_counts(findings)
    # A panel for each task and head; methods of one exit first, those of several in panels of their own.
    panels = sorted({(not is_single(method), task, head) for task, method, head in counts})
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(4.6, 3.1 * columns), 2.7 * rows + 0.4), dpi=144, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for place, (axes, (several, task, head)) in enumerate(zip(grid, panels, strict=False)):
        axes.axvspan(75, 105, color="#57606a", alpha=0.09, lw=0)
        axes.axvline(90, color="#57606a", lw=1, ls=(0, (4, 3)))
        for method in ordered([m for t, m, h in counts if (t, h, is_single(m)) == (task, head, not several)]):
            own = counts[task, method, head]
            share = 100 * own / own.sum()
            above = share[90 // BIN :].sum()
            label = f"{contrast_name(method)} ({method}): {above:.0f} % > 90°"
            edges = np.arange(0, 180 + BIN, BIN)
            axes.stairs(share, edges, color=COLOURS[method], fill=True, alpha=0.22)
            axes.stairs(share, edges, color=COLOURS[method], lw=1.5, label=label)
        tidy(axes)
        axes.set_xlim(0, 180)
        axes.set_xticks(range(0, 181, 30), [f"{angle}°" for angle in range(0, 181, 30)])
        axes.set_title(f"{task}, {head}, {'all exits' if several else 'one exit'}", loc="left", fontsize=9.5)
        # Above the tallest bar, where no bar can be behind it.
        axes.set_ylim(0, axes.get_ylim()[1] * 1.35)
        axes.legend(frameon=False, fontsize=7.5, loc="upper left")
        axes.set_xlabel("angle to the gradient of CE", color=_INK)
        if place % columns == 0:
            axes.set_ylabel("batches (%)", color=_INK)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    return figure


def _weights(findings: Findings) -> Figure:
    curves = by_weight(findings)
    metrics = {(s.task, s.head): s.metric for s in findings.scores}
    panels = list(dict.fromkeys((task, head, is_single(method)) for task, head, method in curves))
    figure = Figure(figsize=(3.9 * len(panels), 3.3), dpi=144, layout="constrained")
    for axes, (task, head, single) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for method in ordered([m for t, h, m in curves if (t, h, is_single(m)) == (task, head, single)]):
            own = curves[task, head, method]
            values = [100 * np.array(scores) for scores in own.values()]
            spread = [v.std(ddof=1) if len(v) > 1 else 0.0 for v in values]
            label = f"{method} ({len(values[0])} seed{'s' if len(values[0]) > 1 else ''})"
            axes.errorbar(
                list(own), [v.mean() for v in values], spread, fmt="o-", ms=4, capsize=3, color=COLOURS[method],
                label=label,
            )  # fmt: skip
        tidy(axes)
        what = "last exit" if single else "mean of exits before the last"
        axes.set_title(f"{task}, {head}, {what}", loc="left", fontsize=9.5)
        axes.set_xlabel("λ", color=_INK)
        axes.set_ylabel(metric_label(metrics[task, head]), color=_INK)
        axes.legend(frameon=False, fontsize=9)
    return figure


def _embedding(places: Sequence[Place]) -> Figure:
    methods, exits = ordered([p.method for p in places]), sorted({p.exit for p in places})
    figure = Figure(figsize=(2.1 * len(exits), 2.2 * len(methods) + 0.3), dpi=144, layout="constrained")
    grid: Any = figure.subplots(len(methods), len(exits), squeeze=False)
    for row, method in zip(grid, methods, strict=True):
        for axes, number in zip(row, exits, strict=True):
            own = [p for p in places if (p.method, p.exit) == (method, number)]
            for is_label, style in _MARKS.items():
                some = [p for p in own if p.is_label == is_label]
                colours = [_CLASSES[p.label % len(_CLASSES)] for p in some]
                axes.scatter([p.x for p in some], [p.y for p in some], c=colours, **style)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(f"exit {number}" if method == methods[0] else "", fontsize=9.5)
        row[0].set_ylabel(method, color=_INK)
    return figure


_MARKS: Mapping[bool, Mapping[str, Any]] = {
    False: {"s": 5, "alpha": 0.65, "linewidths": 0},
    True: {"s": 130, "marker": "*", "edgecolors": "black", "linewidths": 0.8, "zorder": 3},
}
