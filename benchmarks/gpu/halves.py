"""What fp16 changes: a bundle's weights in fp32 and in fp16 graphs on the same texts, both on the CPU.

    PYTHONPATH=. python benchmarks/gpu/halves.py models/zoo/sst2-minilm-l6 --file dev.tsv --text-column sentence

prints the largest difference of a logit at each exit, and for each certified tier the share of texts that leave at the
same exit with the same label.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

from models.bundle import Bundle, Precision
from models.exits import Policy, judge_all, leave_at
from training.data import read_table
from training.evaluate import run_graphs
from training.export import dequantised_weights
from training.graphs import build_segments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--file", type=Path, required=True, help="texts, labelled: .csv, .tsv or .jsonl")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--label-column", default="label")
    options = parser.parse_args()
    bundle = Bundle.load(options.bundle)
    architecture, served = bundle.manifest.architecture, bundle.manifest.default_precision
    table = read_table(options.file, text_column=options.text_column, label_column=options.label_column)
    texts = [bundle.encoder.encode(example.text) for example in table.examples]
    graphs = [bundle.graph(spec.number, served) for spec in architecture.exits]
    weights = dequantised_weights(architecture, graphs)
    logits = {}
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    with tempfile.TemporaryDirectory() as scratch:
        for precision in precisions:
            paths = build_segments(architecture, weights, precision, Path(scratch) / precision)
            logits[precision] = run_graphs(paths, architecture, texts, threads=1)
    furthest = np.abs(logits["fp32"] - logits["fp16"]).max(axis=(1, 2))
    print(f"{len(texts)} texts, largest difference of a logit by exit: {' '.join(f'{one:.4f}' for one in furthest)}")
    calibration = bundle.calibration.precisions[served]
    judged = [
        judge_all(logits[one], calibration.temperatures, calibration.agreement_temperatures) for one in precisions
    ]
    for tier in calibration.certified:
        left = [leave_at(one, Policy(tier.criterion, tier.threshold)) for one in judged]
        labels = [one.labels[exits, np.arange(len(texts))] for one, exits in zip(judged, left, strict=True)]
        same = (left[0] == left[1]) & (labels[0] == labels[1])
        print(f"tier {tier.quality:g}: {100 * same.mean():.2f} % leave at the same exit with the same label")


if __name__ == "__main__":
    main()
