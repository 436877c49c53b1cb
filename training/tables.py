"""The tables of a report, from :class:`training.findings.Findings`."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from training.findings import BIN, DEFAULT_WEIGHT, Findings, Score, deviation, is_single
from training.methods import METHODS
from training.report import markdown_table

# What single-exit and multi-exit methods are compared with.
REFERENCES = ("acl", "acl-cl")


@dataclass(frozen=True, slots=True)
class Run:
    """A run's scores by exit, shallowest first; :func:`summarised` gives what is compared of it."""

    scores: tuple[Score, ...]

    @property
    def last(self) -> float:
        return self.scores[-1].score

    @property
    def intermediate(self) -> float:
        """Mean over the exits before the last; NaN where only the last is trained."""
        return float(np.mean([s.score for s in self.scores[:-1]])) if len(self.scores) > 1 else math.nan


Group = tuple[str, str, str, float]


def runs_of(findings: Findings) -> dict[Group, dict[int, Run]]:
    """Runs by (task, head, method, contrast weight) and seed, in the order found."""
    rows: dict[Group, dict[int, list[Score]]] = defaultdict(lambda: defaultdict(list))
    for score in findings.scores:
        rows[score.task, score.head, score.method, score.weight][score.seed].append(score)
    return {
        group: {seed: Run(tuple(sorted(own, key=lambda s: s.exit))) for seed, own in sorted(by_seed.items())}
        for group, by_seed in rows.items()
    }


def report(findings: Findings, figures: Mapping[str, str]) -> str:
    """The whole report as Markdown; ``figures`` are their captions by file name."""
    parts = ["# Report", "Scores × 100 on each task's evaluation file; ± is the standard deviation over seeds (n − 1)."]
    parts += _score_tables(findings)
    if comparisons := _comparisons(findings):
        parts += ["## Compared seed by seed", _COMPARED, comparisons]
    if angles := _angle_table(findings):
        parts += ["## Angles between the gradients", angles]
    if weights := _weight_table(findings):
        parts += ["## Weight of the contrastive part", weights]
    parts += [f"![{name}]({name})\n\n{caption}" for name, caption in figures.items()]
    return "\n\n".join(parts) + "\n"


def ordered(methods: Iterable[str]) -> list[str]:
    """Each of ``methods`` once, in the order in which tables and legends name them."""
    present = set(methods)
    return [name for name in METHODS if name in present]


def _with_spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean ± deviation of shares, × 100."""
    scaled = [100 * v for v in values]
    mean = f"{np.mean(scaled):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {deviation(scaled):.{digits}f}"


def _score_tables(findings: Findings) -> list[str]:
    runs, parts = runs_of(findings), []
    for task in dict.fromkeys(group[0] for group in runs):
        for head in dict.fromkeys(group[1] for group in runs if group[0] == task):
            groups = {m: own for (t, h, m, w), own in runs.items() if (t, h, w) == (task, head, DEFAULT_WEIGHT)}
            if not groups:
                continue
            deepest = max((run for own in groups.values() for run in own.values()), key=lambda run: len(run.scores))
            first = deepest.scores[-1]
            width = len(deepest.scores)
            costs = [f"{s.cost:.2f}" for s in deepest.scores]
            table = [["method", "seeds", *costs, "mean of all but the last"]]
            for method in ordered(groups):
                own = list(groups[method].values())
                by_exit = list(zip(*([s.score for s in run.scores] for run in own), strict=True))
                cells = [""] * (width - len(by_exit)) + [_with_spread(values) for values in by_exit]
                mean = "" if is_single(method) else _with_spread([run.intermediate for run in own], 2)
                table.append([f"`{method}`", str(len(own)), *cells, mean])
            parts.append(
                f"## {task}, head `{head}`\n\n{first.metric}, n = {first.n:,}; trained on {first.examples:,} examples, "
                f"{first.epochs} epochs. Columns are the exits by their cost in layers.\n\n" + markdown_table(table)
            )
    return parts


_COMPARED = (
    "Difference in points of runs of the same seed (same examples, same splits): `acl-cl` against the other methods by "
    "the mean of the exits before the last, `acl` by the last exit. t: paired t-test, W: Wilcoxon's signed-rank test "
    "(exact), both two-sided. With n seeds the smallest p that W can give is 2 / 2ⁿ. "
    '"All tasks" averages over the tasks first, over seeds that every task has.'
)


def differences(findings: Findings, head: str) -> dict[tuple[str, str, str], dict[int, float]]:
    """By (reference, other method, task): what the reference scores more, by seed."""
    runs = {(t, m): own for (t, h, m, w), own in runs_of(findings).items() if (h, w) == (head, DEFAULT_WEIGHT)}
    found = {}
    for reference in REFERENCES:
        single = is_single(reference)
        for (task, method), own in runs.items():
            if method == reference or is_single(method) != single or (task, reference) not in runs:
                continue
            theirs = runs[task, reference]
            shared = sorted(own.keys() & theirs.keys())
            if shared:
                found[reference, method, task] = {
                    seed: (theirs[seed].last - own[seed].last)
                    if single
                    else (theirs[seed].intermediate - own[seed].intermediate)
                    for seed in shared
                }
    return found


def _comparisons(findings: Findings) -> str:
    table = [["", "task", "head", "n", "difference", "t: p", "W: p"]]
    for head in dict.fromkeys(score.head for score in findings.scores):
        found = differences(findings, head)
        for reference, method in dict.fromkeys((r, m) for r, m, _ in found):
            by_task = {task: own for (r, m, task), own in found.items() if (r, m) == (reference, method)}
            if len(by_task) > 1:
                shared = set.intersection(*(set(own) for own in by_task.values()))
                by_task["all tasks"] = {s: float(np.mean([own[s] for own in by_task.values()])) for s in shared}
            for task, own in by_task.items():
                if not own:
                    continue
                values = [100 * value for value in own.values()]
                spread = f" ± {deviation(values):.2f}" if len(values) > 1 else ""
                tests = [_p(stats.ttest_rel, values), _p(stats.wilcoxon, values)]
                name = f"`{reference}` − `{method}`"
                table.append([name, task, head, str(len(values)), f"{np.mean(values):+.2f}{spread}", *tests])
    return markdown_table(table) if len(table) > 1 else ""


def _p(test: Any, values: Sequence[float]) -> str:
    # A test of one pair, or of pairs that do not differ at all, says nothing.
    if len(values) < 2 or len(set(values)) == 1:
        return "–"
    arguments = (values, np.zeros(len(values))) if test is stats.ttest_rel else (values,)
    return f"{test(*arguments).pvalue:.3f}"


def _angle_table(findings: Findings) -> str:
    table = [["task", "head", "gradients of", "seeds", "batches", "median", "75° to 105°", "above 90°"]]
    for (task, method, head), counts in angle_counts(findings).items():
        total = int(counts.sum())
        low = np.arange(0, 180, BIN)
        median = low[np.searchsorted(counts.cumsum(), total / 2)]
        between = counts[(low >= 75) & (low < 105)].sum() / total
        above = counts[low >= 90].sum() / total
        seeds = next(a.seeds for a in findings.angles if (a.task, a.method, a.head) == (task, method, head))
        table.append(
            [
                task,
                head,
                f"CE and {contrast_name(method)} (`{method}`)",
                str(seeds),
                f"{total:,}",
                f"{median}° to {median + BIN}°",
                f"{100 * between:.0f} %",
                f"{100 * above:.1f} %",
            ]
        )
    return markdown_table(table) if len(table) > 1 else ""


def angle_counts(findings: Findings) -> dict[tuple[str, str, str], np.ndarray]:
    """Batches in each bin of BIN degrees, by (task, method, head)."""
    found: dict[tuple[str, str, str], np.ndarray] = {}
    for row in findings.angles:
        counts = found.setdefault((row.task, row.method, row.head), np.zeros(180 // BIN, dtype=np.int64))
        counts[row.low // BIN] += row.batches
    return found


def contrast_name(method: str) -> str:
    """SCL or ACL, as a legend says it."""
    return "SCL" if dict(METHODS)[method].contrast == "scl" else "ACL"  # type: ignore[index]


def by_weight(findings: Findings) -> dict[tuple[str, str, str], dict[float, list[float]]]:
    """By (task, head, method), for methods run with several contrast weights: the seeds' scores by weight.

    The score is the last exit's for single-exit methods, else the mean over the exits before it. Only seeds that every
    weight has count, so that the curve's shape is not the seeds'.
    """
    found: dict[tuple[str, str, str], dict[float, dict[int, float]]] = defaultdict(dict)
    for (task, head, method, weight), own in runs_of(findings).items():
        if dict(METHODS)[method].contrast:  # type: ignore[index]
            values = {seed: run.last if is_single(method) else run.intermediate for seed, run in own.items()}
            found[task, head, method][weight] = values
    curves = {}
    for key, weights in found.items():
        shared = set.intersection(*(set(own) for own in weights.values()))
        if len(weights) > 1 and shared:
            curves[key] = {w: [weights[w][s] for s in sorted(shared)] for w in sorted(weights)}
    return curves


def _weight_table(findings: Findings) -> str:
    curves = by_weight(findings)
    if not curves:
        return ""
    weights = sorted({w for own in curves.values() for w in own})
    table = [["task", "head", "method", "seeds", *(f"λ = {w:g}" for w in weights), "best − worst"]]
    for (task, head, method), own in curves.items():
        means = [float(np.mean(values)) for values in own.values()]
        seeds = str(len(next(iter(own.values()))))
        cells = [_with_spread(own[w]) if w in own else "" for w in weights]
        table.append([task, head, f"`{method}`", seeds, *cells, f"{100 * (max(means) - min(means)):.1f}"])
    return markdown_table(table)
