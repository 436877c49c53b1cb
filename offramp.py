"""The command line.

Every command imports its side inside its own body, so that `offramp --help` loads neither torch nor ONNX Runtime and a
machine that only serves never needs what training needs. What goes wrong is one line on stderr: exit code 2 for wrong
usage, 1 for a failure, and a traceback only with `--debug`.
"""

import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from training.cli import UsageError
from training.cli import commands as training_commands

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

HELP_NAMES = {"help_option_names": ["-h", "--help"]}

# Plain help: rich's tables cut long option names at 80 columns.
app = typer.Typer(
    name="offramp",
    help="Train text classifiers that can answer early, and serve them so that every request pays only for its depth.",
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The console script `offramp`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code.

    An error becomes one line on stderr; with `--debug` an unexpected one is raised as it is.
    """
    arguments, debug = take_debug(arguments)
    try:
        result = app(arguments or ["--help"], prog_name="offramp", standalone_mode=False)
    except typer.Abort:
        return _fail("aborted", 1)
    except typer.TyperException as error:
        return _fail(error.format_message(), error.exit_code)
    except Exception as error:
        if debug:
            raise
        return _fail(_in_one_line(error), 1)
    if not arguments:
        return 2
    return result if isinstance(result, int) else 0


def take_debug(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Takes `--debug` out of the arguments, wherever it stands before a `--`."""
    options = list(arguments)
    end = options.index("--") if "--" in options else len(options)
    kept = [argument for argument in options[:end] if argument != "--debug"]
    return kept + options[end:], len(kept) < end


def _fail(message: str, code: int) -> int:
    typer.echo(f"offramp: error: {' '.join(message.split())}", err=True)
    return code


def _in_one_line(error: Exception) -> str:
    """What went wrong; where the message alone would not say it, the kind of error and how to see more."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install 'offramp[train]' brings what training needs"
    known = isinstance(error, (OSError, ValueError)) or type(error).__module__.split(".")[0] in {
        "models",
        "server",
        "training",
    }
    if known and str(error):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        typer.echo(f"offramp {metadata.version('offramp')}")
    except metadata.PackageNotFoundError:
        typer.echo("offramp, run from its sources without being installed")
    raise typer.Exit


@app.callback(context_settings=HELP_NAMES)
def _offramp(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    _debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (may stand anywhere).")] = False,
) -> None:
    pass


# The options of `serve` are the fields of server.config.Settings, so that each is declared and explained in one place.
# They are read when the command runs: a signature up here would load the server's side for every `offramp --help`.
@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(context: typer.Context) -> object:
    """Serve bundles over HTTP (none named: the shipped one)."""
    from server.config import Settings

    command = typer.Typer(add_completion=False, rich_markup_mode=None)
    command.command(context_settings=HELP_NAMES)(_with_options_of(Settings, _serve))
    return command(context.args, prog_name="offramp serve", standalone_mode=False)


def _serve(**flags: Any) -> None:
    """Serve bundles over HTTP until SIGTERM or Ctrl-C.

    Every option --like-this can also be given as the environment variable OFFRAMP_LIKE_THIS.
    """
    from server.config import StartError, load_settings

    try:
        settings = load_settings(**{name: value for name, value in flags.items() if value not in (None, [])})
    except StartError as error:
        raise UsageError(str(error)) from error
    require_one_runtime(installed_runtimes())
    from server.main import run as serve_until_told_to_stop

    raise typer.Exit(serve_until_told_to_stop(settings))


def _with_options_of(settings: "type[BaseSettings]", command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with one option for each field of ``settings``; ``bundles`` becomes the arguments, and fields of
    several values become options that can be repeated.

    Values are handed on as text: ``settings`` is what checks them.
    """

    def with_options(**flags: Any) -> None:
        command(**flags)

    parameters = []
    for name, field in settings.model_fields.items():
        default = "" if field.default in (None, ()) else f" [default: {field.default}]"
        text = f"{field.description}{default}"
        kind: Any = str | None
        info: Any = typer.Option(help=text, show_default=False, metavar=_metavar(field.annotation))
        if name == "bundles":
            kind, info = list[str] | None, typer.Argument(help=text, show_default=False, metavar="BUNDLE")
        elif get_origin(field.annotation) is tuple:
            kind = list[str] | None
        elif field.annotation is bool:
            kind, info = bool | None, typer.Option(help=text, show_default=False)
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])
        )
    with_options.__doc__ = command.__doc__
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_options


def _metavar(annotation: Any) -> str:
    """What stands for the value of an option in the help: the choices, or the kind of value."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    choices = [part for part in get_args(annotation) if part is not NoneType]
    if len(choices) == 1:
        return _metavar(choices[0])
    return {int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT")


@app.command()
def classify(
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="texts; - reads them from stdin, one a line")],
    quality: Annotated[
        float | None, typer.Option(help="agreement with the last exit that the answer must have")
    ] = None,
    speed: Annotated[float | None, typer.Option(help="mean speed-up on the bundle's measured curve")] = None,
    criterion: Annotated[
        Literal["agreement", "confidence", "entropy", "patience"] | None,
        typer.Option(help="what --threshold is compared with"),
    ] = None,
    threshold: Annotated[float | None, typer.Option(help="how sure an exit must be")] = None,
    min_exit: Annotated[int | None, typer.Option(help="pass the exits before this one")] = None,
    max_exit: Annotated[int | None, typer.Option(help="go no deeper than this exit")] = None,
    top_k: Annotated[int | None, typer.Option(help="how many labels to score [default: all]")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="with --json: add what every exit passed said")] = False,
    bundle: Annotated[Path | None, typer.Option(help="a bundle folder [default: the shipped one]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a text: a result of POST /classify")] = False,
) -> None:
    """Classify texts without a server.

    The answers are those that a server would give, from the same engine; OFFRAMP_ variables count as they do
    for a server. For a model that classifies pairs, a tab separates the two texts.
    """
    require_one_runtime(installed_runtimes())
    from server.config import StartError, load_settings
    from server.local import Line, WrongWish, classify_all

    wishes = {
        "quality": quality,
        "speed": speed,
        "criterion": criterion,
        "threshold": threshold,
        "min_exit": min_exit,
        "max_exit": max_exit,
        "top_k": top_k,
        "explain": explain,
    }
    lines = (Line(place, text) for place, text in _texts_of(texts))
    try:
        settings = load_settings(bundles=None if bundle is None else (bundle,))
    except StartError as error:
        raise UsageError(str(error)) from error
    try:
        for line, result in classify_all(lines, wishes, settings):
            typer.echo(json.dumps(result, ensure_ascii=False) if as_json else _in_words(result, line.text))
    except WrongWish as error:
        raise UsageError(str(error)) from error


def _texts_of(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Texts, each with the words that name it in an error; ``-`` stands for the lines of stdin."""
    for number, argument in enumerate(arguments, start=1):
        if argument != "-":
            yield f"text {number}", argument
            continue
        for line_number, line in enumerate(sys.stdin.buffer, start=1):
            # What is not UTF-8 is kept as surrogates, as in arguments, for one check to find both.
            yield f"line {line_number}", line.rstrip(b"\r\n").decode("utf-8", "surrogateescape")


def _in_words(result: dict[str, Any], text: str) -> str:
    """A result document in one line for a person."""
    left = result["exit"]
    promise = "" if left["tier"] is None else f", promised {left['tier']:g}"
    way = f"exit {left['number']} after {left['layer']} of {left['of']} layers, cost {left['cost']:.2f}"
    return f"{result['label']}  {result['score']:.4f}  ({way}, {left['reason']}{promise})  {text}"


@app.command()
def bench(
    url: Annotated[str, typer.Argument(help="of a running server, as http://localhost:8000")],
    rate: Annotated[
        float,
        typer.Option(
            help="requests a second; they fall due at random (Poisson), answered or not", min=0.001, max=100_000
        ),
    ] = 50.0,
    clients: Annotated[
        int | None, typer.Option(help="instead of --rate: clients that each wait for their answers", min=1, max=4096)
    ] = None,
    seconds: Annotated[float, typer.Option(help="how long requests are sent", min=0.001, max=86_400)] = 10.0,
    texts: Annotated[
        typer.FileText | None, typer.Option(help="texts to post, one a line, - for stdin [default: eight short ones]")
    ] = None,
    model: Annotated[str | None, typer.Option(help="a name from /models [default: the server's]")] = None,
    quality: Annotated[float | None, typer.Option(help="as in POST /classify, like the next two")] = None,
    speed: Annotated[float | None, typer.Option()] = None,
    deadline_ms: Annotated[float | None, typer.Option()] = None,
    header: Annotated[list[str] | None, typer.Option(metavar="NAME:VALUE", help="sent along; may be repeated")] = None,
    seed: Annotated[int, typer.Option(help="of the times at which requests fall due")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document")] = False,
) -> None:
    """Put load on a running server: percentiles, status codes, and the exits that its texts took.

    Latencies count from the time that a request was due, so that a server that stalls cannot hide it.
    """
    from server.bench import TEXTS, Plan, in_words
    from server.bench import bench as put_load_on

    lines = TEXTS if texts is None else [line.rstrip("\r\n") for line in texts if line.strip()]
    if not lines:
        raise UsageError("--texts: no text in it")
    headers = dict(_name_and_value(one) for one in header or ())
    asked = {"model": model, "quality": quality, "speed": speed, "deadline_ms": deadline_ms}
    wishes = {name: value for name, value in asked.items() if value is not None}
    plan = Plan(seconds=seconds, rate=None if clients else rate, clients=clients, seed=seed)
    document = put_load_on(url, lines, wishes, headers, plan)
    typer.echo(json.dumps(document, ensure_ascii=False) if as_json else in_words(document))


def _name_and_value(header: str) -> tuple[str, str]:
    name, colon, value = header.partition(":")
    if not colon or not name.strip():
        raise UsageError(f"--header: {name!r} is not NAME:VALUE")
    return name.strip(), value.strip()


@app.command("inspect")
def inspect_bundle(
    bundle: Annotated[Path | None, typer.Argument(help="a bundle folder [default: the shipped one]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="manifest and calibration as one JSON document")] = False,
) -> None:
    """Verify a bundle and show what is in it.

    Its manifest, the scores of its exits, the qualities that are certified for it, and its sizes.
    """
    from models.bundle import Bundle
    from models.describe import describe, summary

    loaded = Bundle.load(bundle or shipped_bundle())
    typer.echo(json.dumps(summary(loaded), ensure_ascii=False, indent=1) if as_json else describe(loaded))


def shipped_bundle() -> Path:
    """The bundle that comes with the package."""
    from models.bundle import SHIPPED_BUNDLE

    return SHIPPED_BUNDLE


def installed_runtimes() -> list[str]:
    """Which of the packages that bring the module ``onnxruntime`` are installed."""
    names = {(dist.metadata["Name"] or "").lower().replace("_", "-") for dist in metadata.distributions()}
    return sorted(names & {"onnxruntime", "onnxruntime-gpu"})


def require_one_runtime(installed: Collection[str]) -> None:
    """Raises :class:`typer.TyperException` unless exactly one ONNX Runtime is installed."""
    if not installed:
        raise typer.TyperException(
            "no ONNX Runtime is installed: pip install 'offramp[cpu]', or 'offramp[gpu]' where there is an NVIDIA GPU"
        )
    if len(installed) > 1:
        raise typer.TyperException(
            f"{' and '.join(installed)} are both installed and overwrite each other: "
            "pip uninstall both, then install one of 'offramp[cpu]' and 'offramp[gpu]'"
        )


app.add_typer(training_commands)

if __name__ == "__main__":
    main()
