"""What sweeps found, as rows: read from their folders and kept as CSVs.

Each kind of row is one CSV, and all tables (``training/tables.py``) and figures (``training/figures.py``) come from the
CSVs alone, so that they can be made again where the runs are gone.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from models.exits import Policy, judge_all
from training.checkpoint import rows as log_rows
from training.data import DataError
from training.evaluate import Measured, curve_point
from training.methods import METHODS, Contrast
from training.sweep import ANSWERS_NAME, read_cells

# In a row of an angle histogram, degrees.
BIN = 5
# From "leave at once" to "never before the last exit".
THRESHOLDS = (
    *np.arange(0.0, 0.95, 0.02).round(2).tolist(),
    *np.round(1 - np.geomspace(0.05, 1e-5, 30), 7).tolist(),
    1.0,
)
# What t-SNE shows: the usual way to train, and where it was run beside it the one with label embeddings in it.
EMBEDDED = ("jt", "acl-cl")
# Comparisons are of runs with this weight of the contrastive part.
DEFAULT_WEIGHT = Contrast().weight


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
                if result["settings"]["contrast"]["weight"] == DEFAULT_WEIGHT:
                    groups[result["method"], result["head"]].append((path, result))
            for (method, head), runs in groups.items():
                if not is_single(method):
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
                spread=round(deviation(scores), 6),
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


def deviation(values: Sequence[float]) -> float:
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
