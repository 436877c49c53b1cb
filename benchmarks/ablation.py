"""What matters in ACL-CL: one setting changed at a time, on a part of a task that trains in two minutes a run.

    PYTHONPATH=. python benchmarks/ablation.py --data-dir SST-2 --output runs/ablation --csv docs/results/ablation.csv
    PYTHONPATH=. python benchmarks/ablation.py --csv docs/results/ablation.csv     # prints the table again

Runs that are done are kept, so it can be stopped and started again. Differences are paired by seed: runs of one seed
share examples, heads as they begin, and the order of batches.
"""

import argparse
import csv
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from training.methods import Contrast, Distillation, MethodName
from training.report import markdown_table
from training.sweep import read_results, run_grid
from training.trainer import TrainingSettings


@dataclass(frozen=True, slots=True)
class Variant:
    """A method, and what of the settings is not the default."""

    method: MethodName
    settings: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = {
    "jt": Variant("jt"),
    "acl-cl (λ 0.2, τ 0.3, θ 90°)": Variant("acl-cl"),
    "acl-cl, λ 0.05": Variant("acl-cl", settings={"contrast": Contrast(weight=0.05)}),
    "acl-cl, λ 0.5": Variant("acl-cl", settings={"contrast": Contrast(weight=0.5)}),
    "acl-cl, λ 1": Variant("acl-cl", settings={"contrast": Contrast(weight=1.0)}),
    "acl-cl, τ 0.1": Variant("acl-cl", settings={"contrast": Contrast(temperature=0.1)}),
    "acl-cl, τ 1": Variant("acl-cl", settings={"contrast": Contrast(temperature=1.0)}),
    "acl-cl, no teacher (acl-embed)": Variant("acl-embed"),
    "acl-cl, no gate (θ 180°)": Variant("acl-cl", settings={"contrast": Contrast(max_angle=180.0)}),
    "acl-cl, gate at 60°": Variant("acl-cl", settings={"contrast": Contrast(max_angle=60.0)}),
    "jt+scl": Variant("jt+scl"),
    "jt, w ∝ depth": Variant("jt", settings={"exit_weights": "depth"}),
    "jt, distilled (δ 1)": Variant("jt", settings={"distillation": Distillation(weight=1.0)}),
    "acl-cl, distilled (δ 1)": Variant("acl-cl", settings={"distillation": Distillation(weight=1.0)}),
}
REFERENCE = "jt"


@dataclass(frozen=True, slots=True)
class Row:
    """One run: its ``scores`` by exit, shallowest first, and the share of batches above the limit of the angle in the
    last epoch (NaN where there is no contrastive part)."""

    variant: str
    seed: int
    n: int
    scores: tuple[float, ...]
    conflicts: float

    @property
    def shallow(self) -> float:
        """The mean over the exits before the last."""
        return float(np.mean(self.scores[:-1]))

    @property
    def last(self) -> float:
        return self.scores[-1]


def rows_in(folder: Path) -> list[Row]:
    """The finished runs under ``folder``, by variant."""
    rows = []
    for number, name in enumerate(VARIANTS):
        for result in read_results(folder / f"{number:02d}"):
            conflicts = result["conflicts_by_epoch"][-1]
            scores = tuple(exit["score"] for exit in result["exits"])
            rows.append(
                Row(name, result["seed"], result["evaluated_on"], scores, np.nan if conflicts is None else conflicts)
            )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Per variant the mean over seeds of the exits before the last and of the last, and how far each run is from the
    reference's of its seed, with the p-value of a paired t-test (not corrected for their number)."""
    by_variant = {name: {row.seed: row for row in rows if row.variant == name} for name in VARIANTS}
    reference = by_variant[REFERENCE]
    lines = [["", "seeds", "mean of exits", f"− {REFERENCE}", "p", "last exit", f"− {REFERENCE}", "p", "dropped, %"]]
    for name, own in by_variant.items():
        if not own:
            continue
        cells = [name, str(len(own))]
        cells += _compared(
            {seed: row.shallow for seed, row in own.items()}, {s: r.shallow for s, r in reference.items()}
        )
        cells += _compared({seed: row.last for seed, row in own.items()}, {s: r.last for s, r in reference.items()})
        conflicts = [row.conflicts for row in own.values()]
        cells.append("" if np.isnan(conflicts).all() else f"{100 * np.mean(conflicts):.1f}")
        lines.append(cells)
    return markdown_table(lines)


def _compared(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[str]:
    """The mean over seeds, the mean difference of pairs with its deviation, and of three pairs or more its p-value."""
    mean = f"{100 * np.mean(list(ours.values())):.2f}"
    apart = 100 * np.array([score - theirs[seed] for seed, score in ours.items() if seed in theirs])
    if len(apart) < 2 or not apart.any():
        return [mean, "", ""]
    p = f"{stats.ttest_1samp(apart, 0.0).pvalue:.3f}" if len(apart) > 2 else ""
    return [mean, f"{apart.mean():+.2f} ± {apart.std(ddof=1):.2f}", p]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line for each run; ``conflicts`` is empty where there is no contrastive part."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        exits = range(1, len(rows[0].scores) + 1)
        writer.writerow(["variant", "seed", "n", "conflicts", *(f"exit_{number}" for number in exits)])
        for row in rows:
            conflicts = "" if np.isnan(row.conflicts) else f"{row.conflicts:.4f}"
            writer.writerow([row.variant, row.seed, row.n, conflicts, *(f"{score:.6f}" for score in row.scores)])


def read_csv(path: Path) -> list[Row]:
    """Rows as :func:`write_csv` wrote them."""
    with path.open(newline="", encoding="utf-8") as stream:
        _, *lines = csv.reader(stream)
    return [
        Row(variant, int(seed), int(n), tuple(map(float, scores)), float(conflicts or "nan"))
        for variant, seed, n, conflicts, *scores in lines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", type=Path, help="the task's folder in GLUE's layout")
    parser.add_argument("--output", type=Path, help="folder of the runs")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", help="numbers of variants, as 0,1,5")
    parser.add_argument("--csv", type=Path, help="write the runs there too; without --data-dir: read them there")
    arguments = parser.parse_args()
    if arguments.data_dir is None:
        if arguments.csv is None:
            parser.error("give --data-dir and --output, or --csv alone")
        print(table(read_csv(arguments.csv)))
        return
    if arguments.output is None:
        parser.error("--data-dir needs --output")
    torch.set_num_threads(1)
    only = None if arguments.only is None else {int(number) for number in arguments.only.split(",")}
    for seed in (int(seed) for seed in arguments.seeds.split(",")):
        for number, (name, variant) in enumerate(VARIANTS.items()):
            if only is None or number in only:
                contrast = variant.settings.get("contrast", Contrast())
                run_grid(
                    arguments.output / f"{number:02d}",
                    task=arguments.task,
                    data_dir=arguments.data_dir,
                    methods=[variant.method],
                    heads=["peek"],
                    seeds=[seed],
                    examples=arguments.examples,
                    backbone="minilm-l6",
                    settings=replace(TrainingSettings(epochs=2), **variant.settings),
                    weights=[contrast.weight],
                    tell=functools.partial(print, f"{name}:", flush=True),
                )
    rows = rows_in(arguments.output)
    if arguments.csv is not None:
        write_csv(arguments.csv, rows)
    print(table(rows))


if __name__ == "__main__":
    main()
