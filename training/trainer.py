"""The training loop: batches in, the best network out; it can be stopped anywhere and resumed to the same result."""

import csv
import hashlib
import json
import math
import os
import pickle
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor

from models.network import MultiExitNetwork
from training.data import Tokenized, collate, length_grouped
from training.methods import (
    METHODS,
    Contrast,
    Distillation,
    ExitWeights,
    MethodName,
    Objective,
    acl_grad,
    objective,
    trained_exits,
)
from training.metrics import METRICS, metric_value


class TrainingError(Exception):
    """Training that cannot go on; the message says why and what would help."""


Precision = Literal["no", "bf16"]
Kept = Literal["best", "last"]


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How to train. ``learning_rate`` decays linearly to 0 after ``warmup`` (share of all steps).

    ``head_learning_rate_factor`` multiplies it for the exits' own parameters, which start from noise.
    ``angle_every`` = n compares the gradients (ACL-Grad) on every n-th batch only, and takes the contrastive term as
    agreeing on the others, which saves a backward pass there. ``exit_weights`` are those of the exits' cross-entropies
    (``methods.exit_weights``), ``distillation`` adds the deepest exit as a teacher to any method.
    ``stop_after`` ends training after that many epochs without a better validation score (None: never).
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
        if self.distillation.weight and self.method == "ce":
            raise ValueError("distillation needs a method that trains several exits, not 'ce'")
        if self.stop_after is not None and self.stop_after < 1:
            raise ValueError(f"stop_after must be at least 1, not {self.stop_after}")


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
    """Validation after an epoch: the metric ``per_exit`` (by exit number), its mean, and the angles seen."""

    epoch: int
    per_exit: dict[int, float]
    score: float
    best: bool
    mean_angle: float
    share_of_conflicts: float


@dataclass(slots=True)
class _Progress:
    """Where training stands; all of it is in a checkpoint. ``angles`` are those of the epoch under way."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    best_score: float = -math.inf
    best_epoch: int = 0
    angles: list[float] = field(default_factory=list)

    def is_over(self, settings: TrainingSettings) -> bool:
        """Whether all epochs are done, or ``stop_after`` of them without a better score."""
        stalled = settings.stop_after is not None and self.epoch - self.best_epoch >= settings.stop_after
        return self.epoch >= settings.epochs or stalled


def exit_metrics(network: MultiExitNetwork, data: Tokenized, metric: str, *, batch_size: int = 128) -> dict[int, float]:
    """``metric`` of each exit by itself on ``data``, by exit number."""
    logits = exit_logits(network, data, batch_size=batch_size)
    return {number: metric_value(metric, array.argmax(-1), data.labels) for number, array in logits.items()}


def exit_logits(network: MultiExitNetwork, data: Tokenized, *, batch_size: int = 128) -> dict[int, np.ndarray]:
    """Logits ``[N, K]`` of each exit on ``data``, in its order; dropout off, the network's mode restored after."""
    training, device = network.training, next(network.parameters()).device
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
                array = output.logits.float().cpu().numpy()
                collected.setdefault(number, np.empty((len(data), array.shape[1]), dtype=np.float32))[rows] = array
    network.train(training)
    return collected


def parameter_groups(network: MultiExitNetwork, settings: TrainingSettings) -> list[dict[str, Any]]:
    """AdamW groups: encoder and exits, each with and without weight decay (none on biases and norms)."""
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for name, parameter in network.named_parameters():
        key = (name.startswith("exits."), parameter.ndim >= 2)
        groups.setdefault(key, []).append(parameter)
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
    settings or data, for no data, and for a loss that is not finite.
    """
    for name, data, fewest in (("training", training_data, 2), ("validation", validation_data, 1)):
        if len(data) < fewest:
            raise TrainingError(f"{name} needs at least {fewest} examples, and there are {len(data)}")
    # accelerate keeps one precision for the whole process and refuses another; two runs may differ in it.
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision=settings.mixed_precision)
    if accelerator.num_processes > 1:
        raise TrainingError("training runs in one process; start it without accelerate launch")
    folder.mkdir(parents=True, exist_ok=True)
    random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    network = network.to(accelerator.device)
    steps_per_epoch = len(length_grouped(training_data, settings.batch_size, seed=settings.seed, epoch=0))
    steps = steps_per_epoch * settings.epochs
    optimizer = torch.optim.AdamW(parameter_groups(network, settings), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _linear(steps, settings.warmup))
    progress = _Progress()
    checkpoint, done = folder / "checkpoint.pt", folder / "done.json"
    identity = _identity(settings, network, training_data, validation_data)
    if resume and done.exists():
        _require_same(done, json.loads(done.read_text(encoding="utf-8")), identity)
        return _kept(network, folder)
    if resume and checkpoint.exists():
        progress = _restore(checkpoint, identity, network, optimizer, schedule)
        _trim_log(folder / "steps.csv", progress.step)
    else:
        # A later resume must find this run's files or none.
        for stale in (done, checkpoint, folder / "steps.csv", folder / "epochs.csv"):
            stale.unlink(missing_ok=True)
        shutil.rmtree(folder / "kept", ignore_errors=True)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    only = trained_exits(settings.method, network)
    network.train()
    saved_at = time.monotonic()
    with _Log(folder / "steps.csv", ["step", "epoch", "cross_entropy", "contrastive", "angle", "distilled"]) as log:
        while not progress.is_over(settings):
            epoch = progress.epoch
            batches = length_grouped(training_data, settings.batch_size, seed=settings.seed, epoch=epoch)
            clock, seen = time.monotonic(), 0
            for index in range(progress.batch, len(batches)):
                batch = collate(training_data, batches[index])
                device = accelerator.device
                with accelerator.autocast():
                    outputs = network(
                        batch.input_ids.to(device),
                        batch.attention_mask.to(device),
                        batch.token_type_ids.to(device),
                        only=only,
                    )
                    goal = objective(
                        settings.method,
                        network,
                        outputs,
                        batch.labels.to(device),
                        settings.contrast,
                        settings.distillation,
                        settings.exit_weights,
                    )
                loss = float(goal.cross_entropy.detach())
                extra, distilled = (
                    math.nan if part is None else float(part.detach()) for part in (goal.contrastive, goal.distilled)
                )
                if not math.isfinite(float(goal.supervised.detach())) or not (
                    goal.contrastive is None or math.isfinite(extra)
                ):
                    raise TrainingError(
                        f"the loss is {loss} (contrastive: {extra}) at step {progress.step + 1}; a lower learning_rate "
                        f"than {settings.learning_rate:g} may help"
                    )
                compare = progress.step % settings.angle_every == 0
                gradients, angle = _gradients(goal, parameters, settings.contrast, compare=compare)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
                torch.nn.utils.clip_grad_norm_(parameters, settings.max_gradient_norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                schedule.step()
                progress.step += 1
                progress.batch = index + 1
                progress.angles.append(angle)
                log.write([progress.step, epoch, loss, extra, angle, distilled])
                seen += len(batch.labels)
                rate = seen / max(time.monotonic() - clock, 1e-9)
                on_step(StepReport(epoch + 1, progress.step, steps, loss, extra, angle, rate))
                if time.monotonic() - saved_at > settings.checkpoint_minutes * 60:
                    log.flush()
                    _save(checkpoint, identity, progress, network, optimizer, schedule)
                    saved_at = time.monotonic()
            report = _end_epoch(network, validation_data, settings, only, progress)
            if report.best or settings.keep == "last":
                _replace_folder(folder / "kept", network.save)
            progress.epoch, progress.batch, progress.angles = epoch + 1, 0, []
            log.flush()
            _log_epoch(folder / "epochs.csv", report)
            _save(checkpoint, identity, progress, network, optimizer, schedule)
            saved_at = time.monotonic()
            on_epoch(report)
    _replace_text(done, json.dumps(identity, indent=1) + "\n")
    checkpoint.unlink(missing_ok=True)
    return _kept(network, folder)


def _kept(network: MultiExitNetwork, folder: Path) -> MultiExitNetwork:
    network.load_state_dict(MultiExitNetwork.load(folder / "kept").state_dict())
    return network.eval()


def _gradients(
    goal: Objective, parameters: Sequence[Tensor], contrast: Contrast, *, compare: bool
) -> tuple[list[Tensor | None], float]:
    """Gradients to step with, from one forward pass; the angle is NaN where nothing was compared."""
    if goal.contrastive is None:
        return list(torch.autograd.grad(goal.supervised, parameters, allow_unused=True)), math.nan
    if not compare:
        total = goal.supervised + contrast.weight * goal.contrastive
        return list(torch.autograd.grad(total, parameters, allow_unused=True)), math.nan
    ce = torch.autograd.grad(goal.supervised, parameters, retain_graph=True, allow_unused=True)
    acl = torch.autograd.grad(goal.contrastive, parameters, allow_unused=True)
    return acl_grad(ce, acl, contrast)


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
    return EpochReport(progress.epoch + 1, per_exit, score, best, mean, conflicts)


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
        "training data": _digest(training_data),
        "validation data": _digest(validation_data),
    }


def _digest(data: Tokenized) -> str:
    digest = hashlib.sha256(data.labels.tobytes())
    for text in data.texts:
        digest.update(repr((text.ids, text.type_ids)).encode())
    return digest.hexdigest()


def _require_same(path: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    # Settings that came after that run began stood at what are their defaults now.
    theirs = {**asdict(TrainingSettings()), **theirs}
    differing = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    if differing:
        raise TrainingError(f"{path}: was written with other {', '.join(differing)}; it cannot be resumed")


def _save(
    path: Path,
    identity: dict[str, Any],
    progress: _Progress,
    network: MultiExitNetwork,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    document = {
        "identity": identity,
        "progress": asdict(progress),
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    partial = path.with_suffix(".partial")
    torch.save(document, partial)
    os.replace(partial, path)


def _restore(
    path: Path,
    identity: dict[str, Any],
    network: MultiExitNetwork,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> _Progress:
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise TrainingError(f"{path}: not a whole checkpoint; remove it to train from the start") from error
    _require_same(path, document["identity"], identity)
    network.load_state_dict(document["network"])
    optimizer.load_state_dict(document["optimizer"])
    schedule.load_state_dict(document["schedule"])
    torch.set_rng_state(document["torch_rng"])
    if document["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(document["cuda_rng"])
    return _Progress(**document["progress"])


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder beside ``target`` and swaps it in, so a kill leaves the old one or the new one."""
    partial, old = target.with_name(target.name + ".partial"), target.with_name(target.name + ".old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    write(partial)
    if target.exists():
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)


class _Log:
    """Appends rows to a CSV with a header."""

    def __init__(self, path: Path, header: Sequence[str]) -> None:
        fresh = not path.exists()
        self._stream = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._stream)
        if fresh:
            self._writer.writerow(header)

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()

    def write(self, row: Sequence[object]) -> None:
        self._writer.writerow([f"{c:.6g}" if isinstance(c, float) else c for c in row])

    def flush(self) -> None:
        self._stream.flush()


def _rows(path: Path) -> Iterator[dict[str, str]]:
    if path.exists():
        with path.open(newline="", encoding="utf-8") as stream:
            yield from csv.DictReader(stream)


def _trim_log(path: Path, step: int) -> None:
    """Drops rows that were written after the checkpoint: those steps are done again.

    The last row may be torn, and half of its step's number is a smaller number: it counts only if it is whole.
    """
    rows = [r for r in _rows(path) if None not in r.values() and int(r["step"]) <= step]
    if not rows:
        path.unlink(missing_ok=True)
        return
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def _log_epoch(path: Path, report: EpochReport) -> None:
    rows = [r for r in _rows(path) if int(r["epoch"]) < report.epoch]
    row: dict[str, object] = {"epoch": report.epoch, "score": f"{report.score:.6f}"}
    row |= {f"exit_{n}": f"{v:.6f}" for n, v in report.per_exit.items()}
    row |= {"mean_angle": f"{report.mean_angle:.4f}", "share_of_conflicts": f"{report.share_of_conflicts:.5f}"}
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, row.keys())
        writer.writeheader()
        writer.writerows([*rows, row])
