"""The training loop: batches in, the best network out; it can be stopped anywhere and resumed to the same result."""

import csv
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from models.network import ExitOutput, MultiExitNetwork
from training.checkpoint import (
    Checkpoint,
    StepLog,
    TrainingError,
    digest,
    random_state,
    replace_folder,
    replace_text,
    require_same,
    rows,
    set_random_state,
    trim_log,
)
from training.data import Tokenized, collate, length_grouped
from training.methods import (
    METHODS,
    Contrast,
    Distillation,
    ExitWeights,
    MethodName,
    Objective,
    Stage,
    acl_grad,
    angle_between,
    objective,
    prepare_stage,
    scored_exits,
    step_exits,
    weighted_sum,
)
from training.metrics import METRICS, metric_value
from training.parallel import Processes

__all__ = [
    "EpochReport",
    "StepReport",
    "TrainingError",
    "TrainingSettings",
    "exit_features",
    "exit_logits",
    "exit_metrics",
    "train",
]

Precision = Literal["no", "bf16"]
Kept = Literal["best", "last"]


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How to train. ``learning_rate`` decays linearly to 0 after ``warmup`` (share of all steps); ``epochs``, like
    these, are those of each stage of the method. ``batch_size`` is that of all processes together.

    ``head_learning_rate_factor`` multiplies it for the exits' own parameters, which start from noise.
    ``angle_every`` = n compares the gradients (ACL-Grad) on every n-th batch only, and takes the contrastive term as
    agreeing on the others, which saves a backward pass there. ``exit_weights`` are those of the exits' cross-entropies
    (``methods.exit_weights``), ``distillation`` adds the deepest exit as a teacher to any method.
    ``freeze_embeddings`` keeps the embeddings (tables and norm) as pretrained, which saves the optimiser's work on
    every row of the vocabulary in every step. ``stop_after`` ends a stage after that many epochs without a better
    validation score (None: never).
    ``checkpoint_minutes`` is the longest work that a kill can lose.
    """

    method: MethodName = "acl-cl"
    epochs: int = 3
    batch_size: int = 64
    learning_rate: float = 8e-5
    head_learning_rate_factor: float = 5.0
    weight_decay: float = 0.01
    warmup: float = 0.06
    max_gradient_norm: float = 1.0
    contrast: Contrast = field(default_factory=Contrast)
    distillation: Distillation = field(default_factory=Distillation)
    exit_weights: ExitWeights = "uniform"
    freeze_embeddings: bool = False
    angle_every: int = 1
    metric: str = "accuracy"
    seed: int = 0
    stop_after: int | None = None
    keep: Kept = "best"
    mixed_precision: Precision = "no"
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, not {self.method!r}")
        for name, low in (("epochs", 1), ("batch_size", 2), ("angle_every", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, not {getattr(self, name)}")
        for name, choices in (
            ("metric", tuple(METRICS)),
            ("mixed_precision", get_args(Precision)),
            ("keep", get_args(Kept)),
            ("exit_weights", get_args(ExitWeights)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for name in ("head_learning_rate_factor", "max_gradient_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number above 0, not {getattr(self, name)}")
        for name in ("weight_decay", "checkpoint_minutes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a number of at least 0, not {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie between 0 and {2**32 - 1}, not {self.seed}")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must lie between 0 and 1, not {self.learning_rate}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must lie in [0, 1), not {self.warmup}")
        if self.distillation.weight and METHODS[self.method].stages == ("last",):
            raise ValueError(f"distillation needs a method that trains several exits, not {self.method!r}")
        if METHODS[self.method].contrast == "scl" and self.contrast.weight > 1:
            raise ValueError(
                f"contrast weight must be at most 1 for {self.method!r}, whose cross-entropy counts 1 - weight, "
                f"not {self.contrast.weight}"
            )
        if self.stop_after is not None and self.stop_after < 1:
            raise ValueError(f"stop_after must be at least 1, not {self.stop_after}")

    @property
    def all_epochs(self) -> int:
        """Epochs of all stages, at most."""
        return self.epochs * len(METHODS[self.method].stages)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a progress bar shows: ``loss`` is CE; ``contrastive`` and ``angle`` (degrees) NaN where there is none."""

    epoch: int
    step: int
    steps: int
    loss: float
    contrastive: float
    angle: float
    examples_per_second: float


@dataclass(frozen=True, slots=True)
class EpochReport:
    """Validation after an epoch: the metric ``per_exit`` (by exit number), its mean, and the angles seen.

    ``epoch`` and ``stage`` count from 1.
    """

    epoch: int
    stage: int
    per_exit: dict[int, float]
    score: float
    best: bool
    mean_angle: float
    share_of_conflicts: float


@dataclass(slots=True)
class _Progress:
    """Where training stands; all of it is in a checkpoint. Epochs and steps count on from stage to stage.

    ``stage_began`` is the number of epochs before the stage under way, ``angles`` are those of the epoch under way.
    """

    stage: int = 0
    stage_began: int = 0
    epoch: int = 0
    batch: int = 0
    step: int = 0
    best_score: float = -math.inf
    best_epoch: int = 0
    angles: list[float] = field(default_factory=list)

    def stage_is_over(self, settings: TrainingSettings) -> bool:
        """Whether all epochs of the stage are done, or ``stop_after`` of them without a better score."""
        stalled = settings.stop_after is not None and self.epoch - self.best_epoch >= settings.stop_after
        return self.epoch - self.stage_began >= settings.epochs or stalled

    def next_stage(self) -> "_Progress":
        """The beginning of the next stage, which knows of no score yet."""
        return _Progress(
            stage=self.stage + 1, stage_began=self.epoch, epoch=self.epoch, step=self.step, best_epoch=self.epoch
        )


def exit_metrics(network: MultiExitNetwork, data: Tokenized, metric: str, *, batch_size: int = 128) -> dict[int, float]:
    """``metric`` of each exit by itself on ``data``, by exit number."""
    logits = exit_logits(network, data, batch_size=batch_size)
    return {number: metric_value(metric, array.argmax(-1), data.labels) for number, array in logits.items()}


def exit_logits(network: MultiExitNetwork, data: Tokenized, *, batch_size: int = 128) -> dict[int, np.ndarray]:
    """Logits ``[N, K]`` of each exit on ``data``, in its order; dropout off, the network's mode restored after."""
    return _collected(network, data, lambda output: output.logits, batch_size)


def exit_features(network: MultiExitNetwork, data: Tokenized, *, batch_size: int = 128) -> dict[int, np.ndarray]:
    """The vectors ``[N, d]`` that enter each exit's classifier, as :func:`exit_logits` gives the logits."""
    return _collected(network, data, lambda output: output.features, batch_size)


def _collected(
    network: MultiExitNetwork, data: Tokenized, wanted: Callable[[ExitOutput], Tensor], batch_size: int
) -> dict[int, np.ndarray]:
    device = next(network.parameters()).device
    # Module by module: a stage may train some and not others.
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    order = sorted(range(len(data)), key=lambda r: len(data.texts[r]))
    collected: dict[int, np.ndarray] = {}
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            batch = collate(data, rows)
            outputs = network(
                batch.input_ids.to(device), batch.attention_mask.to(device), batch.token_type_ids.to(device)
            )
            for number, output in outputs.items():
                array = wanted(output).float().cpu().numpy()
                collected.setdefault(number, np.empty((len(data), array.shape[1]), dtype=np.float32))[rows] = array
    for module, training in modes:
        module.training = training
    return collected


def parameter_groups(network: MultiExitNetwork, settings: TrainingSettings) -> list[dict[str, Any]]:
    """AdamW groups of what trains: encoder and exits, each with and without weight decay (none on biases and norms)."""
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((name.startswith("exits."), parameter.ndim >= 2), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": settings.learning_rate * (settings.head_learning_rate_factor if is_exit else 1.0),
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for (is_exit, decays), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]


def train(
    network: MultiExitNetwork,
    training_data: Tokenized,
    validation_data: Tokenized,
    settings: TrainingSettings,
    folder: Path,
    *,
    resume: bool = False,
    on_step: Callable[[StepReport], None] = lambda report: None,
    on_epoch: Callable[[EpochReport], None] = lambda report: None,
) -> MultiExitNetwork:
    """Trains ``network`` and returns it with the weights of its best epoch (mean metric over the trained exits), or of
    its last (``settings.keep``).

    Writes into ``folder``: ``checkpoint.pt`` (removed at the end), ``kept/`` (safetensors), ``steps.csv`` (loss, angle
    per step), ``epochs.csv``, and at the end ``done.json``. With ``resume`` it goes on from the checkpoint, and ends
    with the same weights as a run that was never stopped (same machine and thread count); a run that is done is not
    repeated. Without it, what an earlier run left there is removed. Raises :class:`TrainingError` for a run of other
    settings or data, for no data, for a network with too few exits, and for a loss that is not finite.

    Started by ``accelerate launch``, all processes call this with the same arguments, and one of them writes and
    reports.
    """
    for name, data, fewest in (("training", training_data, 2), ("validation", validation_data, 1)):
        if len(data) < fewest:
            raise TrainingError(f"{name} needs at least {fewest} examples, and there are {len(data)}")
    # accelerate keeps one precision for the whole process and refuses another; two runs may differ in it.
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision=settings.mixed_precision)
    processes = Processes(accelerator.process_index, accelerator.num_processes)
    folder.mkdir(parents=True, exist_ok=True)
    random.seed(settings.seed)
    # Each process drops out in its own way.
    torch.manual_seed(settings.seed + 1_000_003 * processes.rank)
    network = network.to(accelerator.device)
    stages = METHODS[settings.method].stages
    numbers = [spec.number for spec in network.architecture.exits]
    if "others" in stages and len(numbers) < 2:
        raise TrainingError(f"method {settings.method!r} needs at least two exits, and there is one")
    per_epoch = len(length_grouped(training_data, settings.batch_size, seed=settings.seed, epoch=0))
    checkpoint, done = folder / "checkpoint.pt", folder / "done.json"
    identity = _identity(settings, network, training_data, validation_data)
    if resume and done.exists():
        require_same(done, json.loads(done.read_text(encoding="utf-8")), identity, asdict(TrainingSettings()))
        return _kept(network, folder)
    progress, found = _Progress(), None
    if resume and checkpoint.exists():
        found = Checkpoint.load(checkpoint)
        require_same(checkpoint, found.identity, identity, asdict(TrainingSettings()))
        if len(found.random_states) != processes.count:
            raise TrainingError(
                f"{checkpoint}: was written by {len(found.random_states)} processes, and there are {processes.count}"
            )
        progress = _Progress(**found.progress)
    optimizer, schedule = begin_stage(network, stages[progress.stage], settings, per_epoch)
    if found is not None:
        network.load_state_dict(found.network)
        optimizer.load_state_dict(found.optimizer)
        schedule.load_state_dict(found.schedule)
        set_random_state(found.random_states[processes.rank])
    if processes.is_main:
        if found is not None:
            trim_log(folder / "steps.csv", progress.step)
        else:
            # A later resume must find this run's files or none.
            for stale in (done, checkpoint, folder / "steps.csv", folder / "epochs.csv"):
                stale.unlink(missing_ok=True)
            shutil.rmtree(folder / "kept", ignore_errors=True)

    def save() -> None:
        states = processes.gather(random_state())
        if processes.is_main:
            Checkpoint(
                identity, asdict(progress), network.state_dict(), optimizer.state_dict(), schedule.state_dict(), states
            ).save(checkpoint)

    training = Training(network, training_data, settings, processes, accelerator.autocast)
    saved_at = time.monotonic()
    log_path = folder / "steps.csv" if processes.is_main else Path(os.devnull)
    with StepLog(log_path, ["step", "epoch", "cross_entropy", "contrastive", "angle", "distilled"]) as log:
        while not (progress.stage_is_over(settings) and progress.stage + 1 == len(stages)):
            if progress.stage_is_over(settings):
                processes.wait()
                _kept(network, folder)
                progress = progress.next_stage()
                optimizer, schedule = begin_stage(network, stages[progress.stage], settings, per_epoch)
                save()
            stage, epoch = stages[progress.stage], progress.epoch
            batches = length_grouped(training_data, settings.batch_size, seed=settings.seed, epoch=epoch)
            clock, seen = time.monotonic(), 0
            for index in range(progress.batch, len(batches)):
                taken = take_step(training, batches[index], stage, progress.step, optimizer)
                schedule.step()
                progress.step += 1
                progress.batch = index + 1
                progress.angles.append(taken.angle)
                log.write([progress.step, epoch, taken.cross_entropy, taken.contrastive, taken.angle, taken.distilled])
                seen += len(batches[index])
                if processes.is_main:
                    rate = seen / max(time.monotonic() - clock, 1e-9)
                    steps = per_epoch * settings.all_epochs
                    losses = taken.cross_entropy, taken.contrastive, taken.angle
                    on_step(StepReport(epoch + 1, progress.step, steps, *losses, rate))
                if processes.agree(time.monotonic() - saved_at > settings.checkpoint_minutes * 60):
                    log.flush()
                    save()
                    saved_at = time.monotonic()
            report = _end_epoch(network, validation_data, settings, scored_exits(stage, numbers), progress)
            if processes.is_main and (report.best or settings.keep == "last"):
                replace_folder(folder / "kept", network.save)
            progress.epoch, progress.batch, progress.angles = epoch + 1, 0, []
            log.flush()
            if processes.is_main:
                _log_epoch(folder / "epochs.csv", report)
            save()
            saved_at = time.monotonic()
            if processes.is_main:
                on_epoch(report)
    processes.wait()
    if processes.is_main:
        replace_text(done, json.dumps(identity, indent=1) + "\n")
        checkpoint.unlink(missing_ok=True)
    return _kept(network, folder)


def begin_stage(
    network: MultiExitNetwork, stage: Stage, settings: TrainingSettings, steps_per_epoch: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Freezes what the stage does not train; a fresh optimiser for the rest, and its learning rates."""
    prepare_stage(stage, network, freeze_embeddings=settings.freeze_embeddings)
    optimizer = torch.optim.AdamW(parameter_groups(network, settings), fused=True)
    rates = _linear(steps_per_epoch * settings.epochs, settings.warmup)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rates)


@dataclass(frozen=True, slots=True)
class Taken:
    """What one step saw: losses before it, and the ``angle`` in degrees; NaN for what the method or step has not."""

    cross_entropy: float
    contrastive: float
    distilled: float
    angle: float


@dataclass(frozen=True, slots=True)
class Training:
    """What all steps of a run share; ``autocast`` makes the context of a forward pass."""

    network: MultiExitNetwork
    data: Tokenized
    settings: TrainingSettings
    processes: Processes
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext


def take_step(
    training: Training, rows: Sequence[int], stage: Stage, step: int, optimizer: torch.optim.Optimizer
) -> Taken:
    """One step of the optimiser on the batch at ``rows``; ``step`` counts from 0.

    Raises :class:`TrainingError` for a loss that is not finite, before it spoils weights.
    """
    settings, processes = training.settings, training.processes
    with training.autocast():
        goal = _forward(training, rows, stage, step)
    supervised, loss, contrastive, distilled = (
        math.nan if part is None else float(part.detach())
        for part in (goal.supervised, goal.cross_entropy, goal.contrastive, goal.distilled)
    )
    if not math.isfinite(supervised) or not (goal.contrastive is None or math.isfinite(contrastive)):
        raise TrainingError(
            f"the loss is {loss} (contrastive: {contrastive}) at step {step + 1}; a lower learning_rate than "
            f"{settings.learning_rate:g} may help"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    compare = step % settings.angle_every == 0
    gradients, angle = _gradients(goal, parameters, settings.contrast, processes, compare=compare)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_(parameters, settings.max_gradient_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Taken(loss, contrastive, distilled, angle)


def _forward(training: Training, rows: Sequence[int], stage: Stage, step: int) -> Objective:
    """The losses of the batch at ``rows``, of which this process computes its part."""
    network, data, settings, processes = training.network, training.data, training.settings, training.processes
    device = next(network.parameters()).device
    numbers = [spec.number for spec in network.architecture.exits]
    exits = step_exits(stage, numbers, step, teaching=settings.distillation.weight > 0)
    batch = collate(data, processes.part(rows))
    outputs = network(
        batch.input_ids.to(device),
        batch.attention_mask.to(device),
        batch.token_type_ids.to(device),
        only=exits.computed,
    )
    return objective(
        settings.method,
        network,
        processes.whole(outputs, len(rows)),
        torch.from_numpy(data.labels[list(rows)]).to(device),
        settings.contrast,
        settings.distillation,
        settings.exit_weights,
        learning=exits.learning,
    )


def _kept(network: MultiExitNetwork, folder: Path) -> MultiExitNetwork:
    network.load_state_dict(MultiExitNetwork.load(folder / "kept").state_dict())
    return network.requires_grad_(True).eval()


def _gradients(
    goal: Objective, parameters: Sequence[Tensor], contrast: Contrast, processes: Processes, *, compare: bool
) -> tuple[list[Tensor | None], float]:
    """Gradients to step with, from one forward pass; the angle in degrees is NaN where nothing was compared.

    Means over the processes come first: all of them must see one angle, and decide alike.
    """

    def gradient(loss: Tensor, *, again: bool = False) -> list[Tensor | None]:
        found = torch.autograd.grad(loss, parameters, retain_graph=again, allow_unused=True)
        return processes.mean([g.coalesce() if g is not None and g.is_sparse else g for g in found])

    if goal.contrastive is None or not compare:
        extra = 0.0 if goal.contrastive is None else contrast.weight * goal.contrastive
        total = gradient(goal.share * goal.supervised + extra)
        return [None if g is None else _dense(g, _values(g)) for g in total], math.nan
    first, second = gradient(goal.supervised, again=True), gradient(goal.contrastive)
    # Both losses saw the same tokens, so sparse gradients of one table have the same rows.
    rows_first, rows_second = ([None if g is None else _values(g) for g in side] for side in (first, second))
    if goal.gated:
        combined, angle = acl_grad(rows_first, rows_second, contrast)
    else:
        combined = weighted_sum(rows_first, rows_second, goal.share, contrast.weight)
        angle = angle_between(rows_first, rows_second)
    there = [b if a is None else a for a, b in zip(first, second, strict=True)]
    return [
        None if g is None or like is None else _dense(like, g) for like, g in zip(there, combined, strict=True)
    ], angle


def _values(gradient: Tensor) -> Tensor:
    """The rows of a (coalesced) sparse gradient, or a dense one as it is."""
    return gradient.values() if gradient.is_sparse else gradient


def _dense(like: Tensor, values: Tensor) -> Tensor:
    """``values`` as rows of a dense gradient where ``like`` is sparse: AdamW moves every row."""
    if not like.is_sparse:
        return values
    return values.new_zeros(like.shape).index_copy_(0, like.indices()[0], values)


def _end_epoch(
    network: MultiExitNetwork,
    data: Tokenized,
    settings: TrainingSettings,
    only: Sequence[int],
    progress: _Progress,
) -> EpochReport:
    per_exit = {n: v for n, v in exit_metrics(network, data, settings.metric).items() if n in only}
    score = sum(per_exit.values()) / len(per_exit)
    best = score > progress.best_score
    if best:
        progress.best_score, progress.best_epoch = score, progress.epoch + 1
    known = [a for a in progress.angles if not math.isnan(a)]
    mean = sum(known) / len(known) if known else math.nan
    conflicts = sum(a > settings.contrast.max_angle for a in known) / len(known) if known else math.nan
    return EpochReport(progress.epoch + 1, progress.stage + 1, per_exit, score, best, mean, conflicts)


def _linear(steps: int, warmup: float) -> Callable[[int], float]:
    rising = max(1, round(steps * warmup))
    return lambda step: min((step + 1) / rising, max(0.0, (steps - step) / max(1, steps - rising)))


def _identity(
    settings: TrainingSettings, network: MultiExitNetwork, training_data: Tokenized, validation_data: Tokenized
) -> dict[str, Any]:
    """What must be the same for a run to be continued, as JSON would hold it; all but when it was saved."""
    return {
        **asdict(replace(settings, checkpoint_minutes=0.0)),
        "architecture": network.architecture.model_dump_json(),
        "training data": digest(training_data),
        "validation data": digest(validation_data),
    }


def _log_epoch(path: Path, report: EpochReport) -> None:
    earlier = [r for r in rows(path) if int(r["epoch"]) < report.epoch]
    row: dict[str, object] = {"epoch": report.epoch, "stage": report.stage, "score": f"{report.score:.6f}"}
    row |= {f"exit_{n}": f"{v:.6f}" for n, v in report.per_exit.items()}
    row |= {"mean_angle": f"{report.mean_angle:.4f}", "share_of_conflicts": f"{report.share_of_conflicts:.5f}"}
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, row.keys())
        writer.writeheader()
        writer.writerows([*earlier, row])
