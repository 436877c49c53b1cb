"""A grid of training runs on one task, kept in a folder: it can be stopped, and a run that is done is not done again.

One run is a cell: method, head and seed. Its folder holds ``result.json``; :func:`summary` turns all results into
mean ± std per exit.
"""

import csv
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from tokenizers import Tokenizer

from models.architecture import Head
from models.costs import exit_costs
from models.network import Backbone, MultiExitNetwork, build_network, load_backbone
from models.tokenization import TextEncoder
from training.checkpoint import replace_text
from training.data import Example, Tokenized, subset, tokenize
from training.methods import METHODS, Contrast, MethodName
from training.metrics import metric_value
from training.parallel import launched_count
from training.pipeline import DataSettings, Observer, exit_specs, flat, prepare
from training.tracking import tracked
from training.trainer import (
    EpochReport,
    StepReport,
    TrainingError,
    TrainingSettings,
    exit_features,
    exit_logits,
    train,
)

# Beside a cell's result.json.
ANSWERS_NAME = "answers.npz"
# Texts whose vectors are kept, for a picture of them.
EMBEDDED_TEXTS = 300


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a grid."""

    method: MethodName
    head: Head
    seed: int
    contrast_weight: float = Contrast().weight

    @property
    def name(self) -> str:
        """Its folder's name; a weight that is not the default's stands in it."""
        weight = "" if self.contrast_weight == Contrast().weight else f"-weight{self.contrast_weight:g}"
        return f"{self.method}-{self.head}{weight}-seed{self.seed}"


def run_cell(
    cell: Cell,
    backbone: Backbone,
    train_examples: Sequence[Example],
    validation: Sequence[Example],
    evaluation: Sequence[Example],
    labels: Sequence[str],
    settings: TrainingSettings,
    folder: Path,
    *,
    max_length: int = 128,
    on_step: Callable[[StepReport], None] = lambda report: None,
    on_epoch: Callable[[EpochReport], None] = lambda report: None,
) -> dict[str, Any]:
    """Trains one cell (or reads its result, where it is done) and scores every exit on ``evaluation``.

    Raises :class:`TrainingError` where the result that is there comes from other settings or sizes of data.
    """
    target = folder / cell.name / "result.json"
    contrast = replace(settings.contrast, weight=cell.contrast_weight)
    chosen = replace(settings, method=cell.method, seed=cell.seed, contrast=contrast)
    sizes = {"examples": len(train_examples), "evaluated_on": len(evaluation)}
    if target.exists():
        done: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        # Settings that came after a result was written stood at what are their defaults now.
        theirs, ours = {**asdict(TrainingSettings()), **done, **done["settings"]}, {**asdict(chosen), **sizes}
        differing = [name for name in ours if name != "checkpoint_minutes" and theirs.get(name) != ours[name]]
        if differing:
            raise TrainingError(f"{target}: was made with other {', '.join(differing)}; use another folder")
        return done
    torch.manual_seed(cell.seed)
    network = build_network(
        backbone, num_labels=len(labels), exits=exit_specs(cell.head, backbone.num_layers), max_length=max_length
    )
    encoder = TextEncoder(Tokenizer.from_str(backbone.tokenizer_json), network.architecture.max_length)
    data: list[Tokenized] = [tokenize(part, labels, encoder) for part in (train_examples, validation, evaluation)]
    start = time.monotonic()
    network = train(
        network, data[0], data[1], chosen, folder / cell.name, resume=True, on_step=on_step, on_epoch=on_epoch
    )
    seconds = time.monotonic() - start
    # Settings are chosen by the validation scores; those on the evaluation file are only reported.
    logits = [exit_logits(network, part) for part in data[1:]]
    validated, scores = (
        {number: metric_value(settings.metric, array.argmax(-1), part.labels) for number, array in found.items()}
        for found, part in zip(logits, data[1:], strict=True)
    )
    tokens = round(float(np.mean([len(t) for t in data[2].texts])))
    costs = exit_costs(network.architecture, tokens)
    _keep_answers(folder / cell.name / ANSWERS_NAME, network, logits[0], logits[1], data[1], data[2])
    with (folder / cell.name / "epochs.csv").open(encoding="utf-8") as stream:
        epochs = list(csv.DictReader(stream))
    result = {
        **asdict(cell),
        **sizes,
        "settings": asdict(chosen),
        "metric": settings.metric,
        "exits": [
            {
                "number": e.number,
                "after_layer": e.after_layer,
                "cost": round(float(c), 4),
                "validation_score": validated[e.number],
                "score": scores[e.number],
            }
            for e, c in zip(network.architecture.exits, costs, strict=True)
        ],
        "angle_by_epoch": [_number(e["mean_angle"]) for e in epochs],
        "conflicts_by_epoch": [_number(e["share_of_conflicts"]) for e in epochs],
        "seconds": round(seconds, 1),
    }
    replace_text(target, json.dumps(result, indent=1) + "\n")
    return result


def _keep_answers(
    path: Path,
    network: MultiExitNetwork,
    validation_logits: Mapping[int, np.ndarray],
    evaluation_logits: Mapping[int, np.ndarray],
    validation: Tokenized,
    evaluation: Tokenized,
) -> None:
    """What a report needs of a trained cell, so that it needs neither the network nor the texts.

    Logits ``[E, N, K]``, labels and token counts ``[N]`` of both parts; ``features [E, n, d]`` of the first texts of
    the evaluation part, and the ``label_embeddings [E, K, d]``.
    """
    some = Tokenized(evaluation.texts[:EMBEDDED_TEXTS], evaluation.labels[:EMBEDDED_TEXTS])
    arrays: dict[str, np.ndarray] = {
        "features": np.stack(list(exit_features(network, some).values())).astype(np.float16),
        "label_embeddings": np.stack(
            [network.label_embeddings(e.number).detach().cpu().numpy() for e in network.architecture.exits]
        ),
    }
    for name, part, logits in (
        ("validation", validation, validation_logits),
        ("evaluation", evaluation, evaluation_logits),
    ):
        arrays[f"{name}_logits"] = np.stack(list(logits.values()))
        arrays[f"{name}_labels"] = part.labels
        arrays[f"{name}_tokens"] = np.asarray([len(t) for t in part.texts])
    np.savez_compressed(path, allow_pickle=False, **arrays)


def _number(cell: str) -> float | None:
    """A log's number; None (JSON has no NaN) where the method has none."""
    return None if math.isnan(float(cell)) else float(cell)


def run_grid(
    folder: Path,
    *,
    task: str,
    data_dir: Path,
    methods: Sequence[str],
    heads: Sequence[str],
    seeds: Sequence[int],
    examples: int | None,
    backbone: str,
    settings: TrainingSettings,
    weights: Sequence[float] = (Contrast().weight,),
    max_length: int = 128,
    tracker: str | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> str:
    """Runs every cell of seeds × methods × heads that is not done yet, and returns the :func:`summary` of all.

    Methods with a contrastive part run once for each of its ``weights``. All cells share the splits (drawn with seed 0)
    and are scored on the task's evaluation file; runs of one seed share their part of the training split. Raises
    ValueError for a method or head that is none, before any work.
    """
    if launched_count() > 1:
        raise ValueError("offramp sweep runs in one process; start it without accelerate launch")
    from_scratch = [name for name, method in METHODS.items() if method.stages != ("others",)]
    for kind, names, known in (("method", methods, from_scratch), ("head", heads, get_args(Head))):
        for name in names:
            if name not in known:
                raise ValueError(f"{kind} must be one of {', '.join(known)}, not {name!r}")
    prepared = prepare(DataSettings(task=task, data_dir=str(data_dir)), seed=0)
    encoder = load_backbone(backbone)
    for seed in seeds:
        part = training_part(prepared.splits.train, examples, seed)
        for method in methods:
            of_method = weights if METHODS[cast(MethodName, method)].contrast else (Contrast().weight,)
            for head, weight in itertools.product(heads, of_method):
                cell = Cell(cast(MethodName, method), cast(Head, head), seed, weight)
                with tracked(Observer(), tracker, folder / cell.name, flat(asdict(settings))) as observer:
                    result = run_cell(
                        cell,
                        encoder,
                        part,
                        prepared.splits.validation,
                        prepared.evaluation,
                        prepared.splits.labels,
                        replace(settings, metric=prepared.metric),
                        folder,
                        max_length=max_length,
                        on_step=observer.step,
                        on_epoch=observer.epoch,
                    )
                tell(f"{cell.name}: " + " ".join(f"{100 * e['score']:.1f}" for e in result["exits"]))
    return summary(read_results(folder))


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Every finished cell under ``folder``, by name."""
    return [result for _, result in read_cells(folder)]


def read_cells(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Every finished cell's own folder and result, by name."""
    return [
        (path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*/result.json"))
    ]


def training_part(examples: Sequence[Example], size: int | None, seed: int) -> tuple[Example, ...]:
    """The part of the training split that a seed's runs share, whatever their method and head."""
    return tuple(examples) if size is None else subset(examples, size, seed)


def summary(results: Iterable[dict[str, Any]]) -> str:
    """A Markdown table per method, head and weight: mean ± std (n − 1) over seeds of each exit's score, by cost."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        groups[result["method"], result["head"], result["settings"]["contrast"]["weight"]].append(result)
    if not groups:
        return "no finished runs\n"
    lines = []
    for (method, head, weight), runs in sorted(groups.items()):
        of_weight = "" if weight == Contrast().weight else f"λ = {weight:g}, "
        exits = runs[0]["exits"]
        scores = 100 * np.array([[e["score"] for e in r["exits"]] for r in runs])
        spread = scores.std(axis=0, ddof=1) if len(runs) > 1 else np.full(len(exits), np.nan)
        average = scores.mean(axis=1)
        # None becomes NaN.
        angle = np.array([r["angle_by_epoch"][-1] for r in runs], dtype=float).mean()
        conflicts = 100 * np.array([r["conflicts_by_epoch"][-1] for r in runs], dtype=float).mean()
        lines.append(
            f"\n{method}, {head}, {of_weight}{len(runs)} seeds, {runs[0]['examples']} examples, "
            f"n = {runs[0]['evaluated_on']}\n"
        )
        lines.append("| cost in layers | " + " | ".join(f"{e['cost']:.2f}" for e in exits) + " | mean of exits |")
        lines.append("|---" * (len(exits) + 2) + "|")
        cells = [f"{m:.1f} ± {s:.1f}" for m, s in zip(scores.mean(axis=0), spread, strict=True)]
        total = f"{average.mean():.2f} ± {average.std(ddof=1) if len(runs) > 1 else np.nan:.2f}"
        lines.append(f"| {runs[0]['metric']}, % | " + " | ".join(cells) + f" | {total} |")
        if not np.isnan(angle):
            lines.append(
                f"\nAngle in the last epoch: mean {angle:.0f}°, above the limit in {conflicts:.1f} % of batches."
            )
    return "\n".join(lines) + "\n"
