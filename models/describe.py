"""A bundle in words and numbers, for whoever is about to deploy it: what `offramp inspect` prints."""

from collections.abc import Iterable, Sequence
from typing import Any

from models.bundle import Bundle, ExitScore, Precision, PrecisionCalibration


def summary(bundle: Bundle) -> dict[str, Any]:
    """The whole bundle as JSON-ready data: ``path``, ``bytes`` on disk (total and graphs by precision), manifest and
    calibration."""
    return {
        "path": str(bundle.path),
        "bytes": {"total": size_on_disk(bundle), "graphs": {p: graph_bytes(bundle, p) for p in _precisions(bundle)}},
        "manifest": bundle.manifest.model_dump(mode="json"),
        "calibration": bundle.calibration.model_dump(mode="json"),
    }


def describe(bundle: Bundle) -> str:
    """The same for a person: identity, then for each precision the exits and what quality they are certified for."""
    manifest, architecture = bundle.manifest, bundle.manifest.architecture
    inputs = "pairs of texts" if manifest.takes_pairs else "single texts"
    lines = [
        f"{manifest.name}, version {manifest.version} ({bundle.path})",
        f"  task       {manifest.task}, {inputs} of at most {architecture.max_length} tokens",
        f"  labels     {', '.join(manifest.labels)}",
        f"  backbone   {architecture.backbone}: {architecture.num_layers} layers of width {architecture.hidden_size}",
        f"  licence    {manifest.licence}",
        f"  size       {megabytes(size_on_disk(bundle))}; every file matches its sha256",
        *(f"  {key:<10} {value}" for key, value in manifest.provenance.items() if isinstance(value, str | int | float)),
    ]
    for precision in _precisions(bundle):
        default = ", the default" if precision == manifest.default_precision else ""
        lines += ["", f"{precision}{default}: {megabytes(graph_bytes(bundle, precision))} of graphs", ""]
        lines += _table(_exit_rows(bundle, precision))
        lines += ["", *_promises(bundle, bundle.calibration.precisions[precision])]
    return "\n".join(lines)


def size_on_disk(bundle: Bundle) -> int:
    """Bytes of all files of the bundle."""
    return sum(file.stat().st_size for file in bundle.path.rglob("*") if file.is_file())


def graph_bytes(bundle: Bundle, precision: Precision) -> int:
    """Bytes of the graphs of one precision."""
    return sum(graph.bytes for graph in bundle.manifest.precisions[precision])


def megabytes(count: int) -> str:
    """``count`` bytes as megabytes (10⁶), for a person."""
    return f"{count / 1e6:.1f} MB"


def _precisions(bundle: Bundle) -> list[Precision]:
    """The default first."""
    default = bundle.manifest.default_precision
    return [default, *(p for p in bundle.manifest.precisions if p != default)]


def _exit_rows(bundle: Bundle, precision: Precision) -> Iterable[list[str]]:
    """One row per exit; a column for each metric of each split that the exits were scored on."""
    scored: list[tuple[str, str, dict[int, ExitScore]]] = []
    for scores in bundle.manifest.scores:
        exits = scores.per_exit.get(precision, ())
        metrics = dict.fromkeys(name for score in exits for name in score.metrics)
        scored += [(name, f"{name}, {scores.split} ({scores.n})", {s.exit: s for s in exits}) for name in metrics]
    yield [
        "exit",
        "after layer",
        "head",
        "cost in layers",
        "temperature",
        "for agreement",
        *(title for _, title, _ in scored),
    ]
    calibrated = bundle.calibration.precisions[precision]
    for spec, cost, *temperatures in zip(
        bundle.manifest.architecture.exits,
        bundle.manifest.exit_costs,
        calibrated.temperatures,
        calibrated.agreement_temperatures,
        strict=True,
    ):
        row = [str(spec.number), str(spec.after_layer), spec.head, f"{cost:.2f}", *(f"{t:.2f}" for t in temperatures)]
        for name, _, by_exit in scored:
            score = by_exit.get(spec.number)
            row.append("-" if score is None or name not in score.metrics else f"{score.metrics[name]:.4f}")
        yield row


def _promises(bundle: Bundle, calibration: PrecisionCalibration) -> list[str]:
    """The certified table, and what could not be certified and why."""
    everything = bundle.calibration
    lines: list[str] = []
    if calibration.certified:
        together = f"confidence {1 - everything.delta:.0%} for all rows of all precisions together"
        lines += [f"certified agreement with the last exit ({together}, {everything.n_risk} calibration texts)", ""]
        rows = [["quality", "criterion", "threshold", "disagreements", "mean cost", "speed-up"]]
        rows += [
            [
                f"{tier.quality:g}",
                tier.criterion,
                f"{tier.threshold:.4g}",
                f"{tier.disagreements} of {tier.n}",
                f"{tier.mean_cost:.2f}",
                f"{tier.speedup:.2f}",
            ]
            for tier in calibration.certified
        ]
        lines += _table(rows)
    else:
        lines.append("no certified quality below 1.0")
    lines += [
        f"  not certified: quality {refused.quality:g}: {refused.why} (needs {refused.n_needed} texts)"
        for refused in calibration.refused
    ]
    return lines


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows in columns, the first row being the titles; numbers stand right, words left."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    numeric = [
        all(row[column][:1].isdigit() or row[column] == "-" for row in rows[1:]) for column in range(len(widths))
    ]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    ]
