"""Writes the dashboard of Offramp as Grafana's JSON: ``python deploy/grafana/generate.py``.

Needs ``grafana-foundation-sdk`` (the extra ``dev``). The JSON beside it is committed, so that Grafana needs no Python;
a test keeps both equal, and another asks every query of a real Prometheus.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.heatmap import Panel as Heatmap
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

TARGET = Path(__file__).parent / "dashboards" / "offramp.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

HERE = 'model=~"$model", instance=~"$instance"'
"""What queries are limited to. All models are ``.+``: ``model`` is empty off the classification routes."""


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Plot:
    """One panel. ``stack``: lines on top of each other; ``share``: as parts of 100 %."""

    title: str
    tells: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Literal["lines", "stack", "share", "heatmap", "buckets", "number"] = "lines"
    span: int = 8


def rate(metric: str, by: str) -> str:
    """Sum of the rates of a counter, for each combination of the labels ``by``."""
    return f"sum by ({by}) (rate(offramp_{metric}{{{HERE}}}[$__rate_interval]))"


def quantile(q: float, metric: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', labels)})"


def ratio(part: str, whole: str) -> str:
    """``part`` of ``whole``, and nothing where there is no traffic."""
    return f"{part} / ({whole} > 0)"


ROWS: dict[str, tuple[Plot, ...]] = {
    "Traffic and latency": (
        Plot(
            "Requests",
            "Classification requests by status; 499: the client left before its answer.",
            (Query(rate("requests_total", "code"), "{{code}}"),),
            "reqps",
            "stack",
        ),
        Plot(
            "Latency",
            "First byte in to last byte out.",
            tuple(Query(quantile(q, "request_duration_seconds"), f"p{round(q * 100)}") for q in (0.5, 0.9, 0.99)),
            "s",
        ),
        Plot(
            "Where the time goes",
            "95th percentile. A growing queue means too few CPUs for the traffic.",
            tuple(
                Query(quantile(0.95, f"{stage}_duration_seconds"), stage)
                for stage in ("tokenize", "queue", "inference")
            ),
            "s",
        ),
        Plot(
            "Latency over time",
            "Requests by their duration.",
            (Query(rate("request_duration_seconds_bucket", "le"), "{{le}}"),),
            "s",
            "buckets",
            12,
        ),
        Plot("Requests in work", "Now.", (Query('sum(offramp_inflight_requests{instance=~"$instance"})', "in work"),)),
        Plot(
            "Ready",
            "Instances that take requests.",
            (Query('sum(offramp_ready{instance=~"$instance"})', "ready"),),
            kind="number",
            span=4,
        ),
    ),
    "Exits": (
        Plot(
            "Share of texts by exit",
            "Where texts leave. A shift means other texts than the model was calibrated on, or other wishes.",
            (Query(rate("exits_total", "exit"), "exit {{exit}}"),),
            "short",
            "share",
            12,
        ),
        Plot(
            "Exits over time",
            "Texts a second that leave at each exit.",
            (Query(rate("exits_total", "exit"), "{{exit}}"),),
            "short",
            "heatmap",
            12,
        ),
        Plot(
            "Reasons",
            "Why texts left: sure enough, the last exit, or a limit of their request.",
            (Query(rate("exits_total", "reason"), "{{reason}}"),),
            "short",
            "share",
        ),
        Plot(
            "Certified quality of the answers",
            "none: nothing was promised; 1: the last exit.",
            (Query(rate("tier_total", "tier"), "{{tier}}"),),
            "short",
            "share",
        ),
        Plot(
            "Distance from the calibration",
            "Share of texts that would have to leave elsewhere for the exits of a tier to be those of its calibration "
            "(total variation distance, one hour).",
            (Query('model_tier:offramp_exit_shift:distance_1h{model=~"$model"}', "{{model}} {{tier}}"),),
            "percentunit",
        ),
    ),
    "Work saved": (
        Plot(
            "Layers saved",
            "Of all layers that full depth would have computed.",
            (
                Query(
                    ratio(
                        rate("layers_saved_total", "model"),
                        f"({rate('layers_saved_total', 'model')} + {rate('layers_run_total', 'model')})",
                    ),
                    "{{model}}",
                ),
            ),
            "percentunit",
        ),
        Plot(
            "FLOPs saved",
            "Estimated from each text's length and exit: matrix products, two operations a multiply-accumulate.",
            (
                Query(
                    ratio(
                        rate("flops_saved_total", "model"),
                        f"({rate('flops_saved_total', 'model')} + {rate('flops_run_total', 'model')})",
                    ),
                    "{{model}}",
                ),
            ),
            "percentunit",
        ),
        Plot(
            "FLOPs a second",
            "The same estimate, as work done and work saved.",
            (
                Query(rate("flops_run_total", "model"), "run {{model}}"),
                Query(rate("flops_saved_total", "model"), "saved {{model}}"),
            ),
            "flops",
            "stack",
        ),
    ),
    "Promises": (
        Plot(
            "Answers that the last exit agrees with",
            "Of those that were sampled for a shadow check. Few checks an hour make a rough line.",
            (
                Query(
                    f'sum by (tier) (increase(offramp_shadow_total{{{HERE}, agrees="true"}}[1h])) '
                    f"/ (sum by (tier) (increase(offramp_shadow_total{{{HERE}}}[1h])) > 0)",
                    "{{tier}}",
                ),
            ),
            "percentunit",
        ),
        Plot(
            "Evidence against a promise",
            "Of all checks since the model was loaded. 1 is none; a promise that holds hardly ever gets to 20.",
            (Query(f"max by (tier) (offramp_promise_evidence{{{HERE}}})", "{{tier}}"),),
        ),
        Plot(
            "Texts answered below the quality asked for",
            "Under load, and by their request's quality_floor; by the quality that they got.",
            (Query(rate("lowered_total", "tier"), "{{tier}}"),),
        ),
    ),
    "Queues and batches": (
        Plot(
            "Texts waiting, by segment",
            "Read at each scrape.",
            (Query(f"sum by (segment) (offramp_queue_depth{{{HERE}}})", "segment {{segment}}"),),
        ),
        Plot(
            "Mean batch, by segment",
            "Texts in one run. Deep segments see fewer texts, so their batches fill less.",
            (
                Query(
                    ratio(rate("segment_batch_size_sum", "segment"), rate("segment_batch_size_count", "segment")),
                    "segment {{segment}}",
                ),
            ),
        ),
        Plot(
            "Time of a run, by segment",
            "95th percentile.",
            (Query(quantile(0.95, "segment_duration_seconds", "segment"), "segment {{segment}}"),),
            "s",
        ),
    ),
    "Confidence": (
        Plot(
            "Confidence, by exit",
            "Median of the largest probability of those who left there.",
            (Query(quantile(0.5, "exit_confidence", "exit"), "exit {{exit}}"),),
            "percentunit",
            span=12,
        ),
        Plot(
            "Confidence over time",
            "Texts by the confidence that they left with.",
            (Query(rate("exit_confidence_bucket", "le"), "{{le}}"),),
            "percentunit",
            "buckets",
            12,
        ),
    ),
    "Refused, cut, lost": (
        Plot(
            "Rejections",
            "Requests by reason: queue_full, wait, concurrency and late are 429, deadline is 504, not_running is 503.",
            (Query(rate("rejected_total", "reason"), "{{reason}}"),),
            "reqps",
        ),
        Plot(
            "Texts cut to the model's length",
            "Of all texts that were answered.",
            (Query(ratio(rate("truncated_total", "model"), rate("exits_total", "model")), "{{model}}"),),
            "percentunit",
        ),
        Plot(
            "Texts given up",
            "Their client had gone, or their scores were not finite (a broken model).",
            (
                Query(rate("cancelled_total", "model"), "client gone {{model}}"),
                Query(rate("nonfinite_total", "model"), "not finite {{model}}"),
            ),
        ),
    ),
    "Process": (
        Plot(
            "Reloads",
            "In the last quarter of an hour, each process its own. After a failure the old version serves on, and the "
            "log says why.",
            (
                Query(
                    f"sum by (outcome) (increase(offramp_model_reloads_total{{{HERE}}}[15m]))",
                    "{{outcome}}",
                ),
            ),
        ),
        Plot(
            "Versions",
            "Instances that serve each version of a model. Two for longer than a rollout takes are one too many.",
            (
                Query(
                    f"sum by (model, version) (offramp_model_info{{{HERE}}})",
                    "{{model}} {{version}}",
                ),
            ),
            span=16,
        ),
        Plot(
            "CPUs",
            "Seconds of CPU a second, of all processes that serve.",
            (
                Query(
                    'rate(process_cpu_seconds_total{job="offramp", instance=~"$instance"}[$__rate_interval])',
                    "{{instance}}",
                ),
            ),
            span=12,
        ),
        Plot(
            "Memory",
            "Resident, of all processes that serve; what they share counts in each.",
            (Query('process_resident_memory_bytes{job="offramp", instance=~"$instance"}', "{{instance}}"),),
            "bytes",
            span=12,
        ),
    ),
}


def panel(plot: Plot) -> Any:
    made: Any
    if plot.kind in ("heatmap", "buckets"):
        made = Heatmap().calculate(False)
    elif plot.kind == "number":
        made = Stat().graph_mode(BigValueGraphMode.NONE)
    else:
        legend = common_builders.VizLegendOptions().show_legend(True)
        legend = legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        made = TimeSeries().legend(legend)
        made = made.tooltip(common_builders.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
        if plot.kind != "lines":
            mode = StackingMode.PERCENT if plot.kind == "share" else StackingMode.NORMAL
            made = made.stacking(common_builders.StackingConfig().mode(mode)).fill_opacity(60)
    made = made.title(plot.title).description(plot.tells).unit(plot.unit).datasource(SOURCE).span(plot.span).height(8)
    for letter, query in zip("ABCDEF", plot.queries, strict=False):
        target = Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend).range().datasource(SOURCE)
        made = made.with_target(target.format(PromQueryFormat.HEATMAP) if plot.kind == "buckets" else target)
    return made


def variable(name: str, label: str) -> QueryVariable:
    made = QueryVariable(name).label(label).datasource(SOURCE).query(f"label_values(offramp_model_info, {name})")
    return made.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True).all_value(".+")


def dashboard(rows: dict[str, Sequence[Plot]]) -> Dashboard:
    made = (
        Dashboard("Offramp")
        .uid("offramp")
        .description("Traffic, exits and saved work of Offramp servers")
        .tags(["offramp"])
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(DatasourceVariable("datasource").label("Source").type("prometheus"))
        .with_variable(variable("model", "Model"))
        .with_variable(variable("instance", "Instance"))
    )
    numbers = itertools.count(1)
    for title, plots in rows.items():
        made = made.with_row(Row(title).id(next(numbers)))
        for plot in plots:
            made = made.with_panel(panel(plot).id(next(numbers)))
    return made


def to_json() -> str:
    """The dashboard as the text of its file."""
    return json.dumps(dashboard(dict(ROWS)).build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    TARGET.write_text(to_json(), encoding="utf-8")
