"""What sweeps found, as rows: read from their folders, kept as CSVs, and turned into tables.

Each kind of row is one CSV, and all tables and figures (``training/figures.py``) come from the CSVs alone, so that they
can be made again where the runs are gone.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy import stats

from models.exits import Policy, judge_all
from training.checkpoint import rows as log_rows
from training.data import DataError
from training.evaluate import Measured, curve_point
from training.methods import METHODS, Contrast
from training.report import markdown_table
from training.sweep import ANSWERS_NAME, read_cells

# In a row of an angle histogram, degrees.
BIN = 5
# From "leave at once" to "never before the last exit".
THRESHOLDS = (
    *np.arange(0.0, 0.95, 0.02).round(2).tolist(),
    *np.round(1 - np.geomspace(0.05, 1e-5, 30), 7).tolist(),
    1.0,
)
# What single-exit and multi-exit methods are compared with.
REFERENCES = ("acl", "acl-cl")
# What t-SNE shows: the usual way to train, and where it was run beside it the one with label embeddings in it.
EMBEDDED = ("jt", "acl-cl")
_DEFAULT_WEIGHT = Contrast().weight


@dataclass(frozen=True, slots=True)
class Score:
    """One exit of one run on the evaluation file of its task, ``n`` texts; ``cost`` in layers."""

    task: str
    method: str
    head: str
    weight: float
    seed: int
    examples: int
    epochs: int
    exit: int
    exits: int
    cost: float
    metric: str
    n: int
    score: float
    validation_score: float


@dataclass(frozen=True, slots=True)
class Point:
    """One threshold of confidence on the evaluation file: mean over ``seeds`` runs, ``spread`` their deviation."""

    task: str
    method: str
    head: str
    seeds: int
    threshold: float
    mean_cost: float
    metric: str
    score: float
    spread: float


@dataclass(frozen=True, slots=True)
class Angles:
    """How many ``batches`` of all ``seeds`` runs had an angle of ``low`` to ``low`` + BIN degrees between CE's gradient
    and that of the contrastive part."""

    task: str
    method: str
    head: str
    seeds: int
    low: int
    batches: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where t-SNE puts a text's vector at an exit, or (``is_label``) that of a label: class ``label``, ``x``, ``y``."""

    task: str
    method: str
    head: str
    exit: int
    is_label: bool
    label: int
    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that is told of some sweeps."""

    scores: tuple[Score, ...]
    points: tuple[Point, ...] = ()
    angles: tuple[Angles, ...] = ()
    places: tuple[Place, ...] = ()


_FILES: Mapping[str, type[Any]] = {"scores": Score, "points": Point, "angles": Angles, "places": Place}
_Row = TypeVar("_Row")


def is_single(method: str) -> bool:
    """Whether a method trains the last exit only."""
    return dict(METHODS)[method].stages == ("last",)  # type: ignore[index]


# --- from sweeps -----------------------------------------------------------------------------------------------------


def collect(folders: Sequence[Path], *, embed: bool = True) -> Findings:
    """Reads sweeps: each folder with finished cells is a task, called by the folder's name.

    A folder of such folders stands for all of them. ``embed`` computes the t-SNE, which needs scikit-learn and takes
    some seconds for each exit. Raises :class:`DataError` where a folder holds no finished run.
    """
    scores: list[Score] = []
    points: list[Point] = []
    angles: list[Angles] = []
    places: list[Place] = []
    for folder in folders:
        found = [part for part in (folder, *sorted(p for p in folder.glob("*") if p.is_dir())) if read_cells(part)]
        if not found:
            raise DataError(f"{folder}: no finished run of offramp sweep in it")
        for part in found:
            cells = read_cells(part)
            scores += [row for _, result in cells for row in _scores(part.name, result)]
            groups: dict[tuple[str, str], list[tuple[Path, dict[str, Any]]]] = defaultdict(list)
            for path, result in cells:
                if result["settings"]["contrast"]["weight"] == _DEFAULT_WEIGHT:
                    groups[result["method"], result["head"]].append((path, result))
            for (method, head), runs in groups.items():
                points += _points(part.name, method, head, runs)
                angles += _angles(part.name, method, head, [path for path, _ in runs])
                if embed and method in EMBEDDED and (EMBEDDED[-1], head) in groups:
                    places += _places(part.name, method, head, runs[0][0])
    return Findings(tuple(scores), tuple(points), tuple(angles), tuple(places))


def _scores(task: str, result: Mapping[str, Any]) -> list[Score]:
    exits = result["exits"]
    return [
        Score(
            task=task,
            method=result["method"],
            head=result["head"],
            weight=result["settings"]["contrast"]["weight"],
            seed=result["seed"],
            examples=result["examples"],
            epochs=result["settings"]["epochs"],
            exit=e["number"],
            exits=len(exits),
            cost=e["cost"],
            metric=result["metric"],
            n=result["evaluated_on"],
            score=round(e["score"], 6),
            validation_score=round(e["validation_score"], 6),
        )
        for e in exits
        if not is_single(result["method"]) or e is exits[-1]
    ]


def _points(task: str, method: str, head: str, runs: Sequence[tuple[Path, Mapping[str, Any]]]) -> list[Point]:
    """The curve of a method: at each threshold the mean over its runs; none where runs kept no answers."""
    curves, metric = [], runs[0][1]["metric"]
    for path, result in runs:
        if not (path / ANSWERS_NAME).exists():
            continue
        with np.load(path / ANSWERS_NAME) as answers:
            logits, labels = answers["evaluation_logits"], answers["evaluation_labels"]
        if is_single(method):
            logits = logits[-1:]
        costs = np.array([e["cost"] for e in result["exits"]][-len(logits) :])
        as_is = np.ones(len(logits))
        of_texts = np.repeat(costs[:, None], len(labels), axis=1)
        split = Measured(judge_all(logits, as_is, as_is), labels, of_texts, of_texts[-1], metric)
        curves.append([curve_point(split, Policy("confidence", threshold)) for threshold in THRESHOLDS])
    points = []
    for threshold, at in zip(THRESHOLDS, zip(*curves, strict=True), strict=True) if curves else ():
        scores = [point.metric for point in at]
        points.append(
            Point(
                task=task,
                method=method,
                head=head,
                seeds=len(at),
                threshold=threshold,
                mean_cost=round(float(np.mean([point.mean_cost for point in at])), 4),
                metric=metric,
                score=round(float(np.mean(scores)), 6),
                spread=round(_deviation(scores), 6),
            )
        )
    return points


def _angles(task: str, method: str, head: str, cells: Sequence[Path]) -> list[Angles]:
    measured = [float(row["angle"]) for cell in cells for row in log_rows(cell / "steps.csv")]
    known = [angle for angle in measured if not math.isnan(angle)]
    counts, edges = np.histogram(known, bins=np.arange(0, 180 + BIN, BIN))
    return [
        Angles(task, method, head, len(cells), int(low), int(count))
        for low, count in zip(edges[:-1], counts, strict=True)
        if count
    ]


def _places(task: str, method: str, head: str, cell: Path) -> list[Place]:
    """t-SNE (van der Maaten and Hinton 2008) of every exit by itself, texts and labels together, by cosine."""
    from sklearn.manifold import TSNE

    if not (cell / ANSWERS_NAME).exists():
        return []
    with np.load(cell / ANSWERS_NAME) as answers:
        features, rows = answers["features"].astype(np.float64), answers["label_embeddings"].astype(np.float64)
        classes = answers["evaluation_labels"][: features.shape[1]].tolist()
    places = []
    for number, (texts, labels) in enumerate(zip(features, rows, strict=True), start=1):
        together = np.concatenate([texts, labels])
        perplexity = min(30.0, (len(together) - 1) / 3)
        flat = TSNE(metric="cosine", init="random", perplexity=perplexity, random_state=0).fit_transform(together)
        for at, (x, y) in enumerate(flat.tolist()):
            is_label = at >= len(texts)
            label = at - len(texts) if is_label else classes[at]
            places.append(Place(task, method, head, number, is_label, label, round(x, 2), round(y, 2)))
    return places


def _deviation(values: Sequence[float]) -> float:
    """Over n − 1; NaN for one value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


# --- CSVs ------------------------------------------------------------------------------------------------------------


def write_csvs(findings: Findings, folder: Path) -> None:
    """One CSV for each kind of row that there is; those of kinds that there are not are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in _FILES.items():
        path, rows = folder / f"{name}.csv", getattr(findings, name)
        if not rows:
            path.unlink(missing_ok=True)
            continue
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, [f.name for f in fields(kind)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


def read_csvs(folder: Path) -> Findings:
    """What :func:`write_csvs` wrote; raises :class:`DataError` naming file and row."""
    if not (folder / "scores.csv").exists():
        raise DataError(f"{folder}: no scores.csv in it; give the folders of sweeps to begin from")
    return Findings(**{name: tuple(_read(folder / f"{name}.csv", kind)) for name, kind in _FILES.items()})


def _read(path: Path, kind: type[_Row]) -> Iterable[_Row]:
    for number, row in enumerate(log_rows(path), start=2):
        try:
            yield kind(**{f.name: _parsed(row[f.name], f.type) for f in fields(kind)})  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}, row {number}: not a row of {path.stem} ({error})") from None


def _parsed(cell: str, kind: object) -> object:
    if kind is bool:
        return {"True": True, "False": False}[cell]
    assert callable(kind)
    return kind(cell)


# --- tables ----------------------------------------------------------------------------------------------------------


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
    return mean if len(values) < 2 else f"{mean} ± {_deviation(scaled):.{digits}f}"


def _score_tables(findings: Findings) -> list[str]:
    runs, parts = runs_of(findings), []
    for task in dict.fromkeys(group[0] for group in runs):
        for head in dict.fromkeys(group[1] for group in runs if group[0] == task):
            groups = {m: own for (t, h, m, w), own in runs.items() if (t, h, w) == (task, head, _DEFAULT_WEIGHT)}
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
    runs = {(t, m): own for (t, h, m, w), own in runs_of(findings).items() if (h, w) == (head, _DEFAULT_WEIGHT)}
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
                spread = f" ± {_deviation(values):.2f}" if len(values) > 1 else ""
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
