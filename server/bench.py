"""`offramp bench`: load on a running server, and at which exits its texts left."""

import json
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.load import Exchange, LoadError, Summary, Target, closed_loop, open_loop, poisson, summarise

ROUTE = "/classify"
# For a first look: what a model of one's own makes of them says little, so `--texts` takes others.
TEXTS = (
    "a gripping and moving film",
    "two hours of nothing",
    "it starts slowly , but the second half more than makes up for it",
    "neither the script nor the acting ever finds a reason for this story to be told again",
    "fun",
    "the jokes are old , the plot is older , and yet these two are so much at ease that i left smiling",
    "dull and far too long",
    "not the masterpiece that its trailer promised , but an honest , warm and often very funny little picture",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Requests at ``rate`` a second, Poisson (open loop), or from ``clients`` at a time (closed loop); one of both."""

    seconds: float
    rate: float | None = None
    clients: int | None = None
    seed: int = 0

    def run(self, target: Target, requests: Sequence[bytes]) -> list[Exchange]:
        """Sends ``requests`` in turn; see :mod:`server.load`."""
        if self.rate is not None:
            return open_loop(target, requests, poisson(self.rate, self.seconds, self.seed))
        assert self.clients is not None
        return closed_loop(target, requests, clients=self.clients, seconds=self.seconds)


def bench(
    url: str, texts: Sequence[str], wishes: Mapping[str, Any], headers: Mapping[str, str], plan: Plan
) -> dict[str, Any]:
    """Posts ``texts`` singly, each with ``wishes`` (fields of ``schemas.ClassifyRequest``), and says what came of it.

    A tab separates the two texts of a pair, where the model takes pairs. Raises :class:`LoadError` where there is no
    Offramp at ``url``, or nothing was classified.
    """
    target = Target.parse(url)
    pairs = _model(url, headers, wishes.get("model"))["takes_pairs"]
    bodies = [json.dumps({"inputs": _input(text, pairs), **wishes}).encode() for text in texts]
    exchanges = plan.run(target, [target.post(ROUTE, body, headers) for body in bodies])
    summary = summarise(exchanges, plan.seconds)
    if not summary.ok:
        raise LoadError(f"{url}: nothing was classified: {_first_error(exchanges)}")
    return _document(url, plan, summary, exchanges)


def _model(url: str, headers: Mapping[str, str], name: str | None) -> dict[str, Any]:
    """What ``/models`` says of the model called ``name``, or of the default one."""
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/models", headers=dict(headers))
        with urllib.request.urlopen(request, timeout=10) as response:
            models: list[dict[str, Any]] = json.load(response)["models"]
    except urllib.error.HTTPError as error:
        raise LoadError(f"{url}/models: answered with {error.code}; is this an Offramp server?") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{url}: no Offramp server answers there ({error})") from None
    for model in models:
        if model["default"] if name is None else model["name"] == name:
            return model
    raise LoadError(f"{url}: no model {name}; it has {', '.join(model['name'] for model in models)}")


def _input(text: str, pairs: bool) -> str | dict[str, str]:
    if not pairs:
        return text
    first, tab, second = text.partition("\t")
    if not tab:
        raise LoadError(f"this model classifies pairs: a tab must separate the two texts, as not in {text[:40]!r}")
    return {"text": first, "text_pair": second}


def _first_error(exchanges: Sequence[Exchange]) -> str:
    if not exchanges:
        return "no request fell due; take more --seconds or a higher --rate"
    first = exchanges[0]
    if first.status == 0:
        return "the connection was closed without an answer"
    try:
        return f"{first.status}, {json.loads(first.body)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"status {first.status}"


def _document(url: str, plan: Plan, summary: Summary, exchanges: Sequence[Exchange]) -> dict[str, Any]:
    exits = [result["exit"] for one in exchanges if one.status == 200 for result in json.loads(one.body)["results"]]
    left = Counter((exit_["number"], exit_["layer"]) for exit_ in exits)
    return {
        "url": url,
        "seconds": plan.seconds,
        "rate": plan.rate,
        "clients": plan.clients,
        "requests": summary.requests,
        "statuses": {str(status): count for status, count in summary.statuses.items()},
        "throughput": summary.throughput,
        "latency_ms": {"p50": summary.p50, "p90": summary.p90, "p99": summary.p99, "max": summary.longest},
        "late_p99_ms": summary.late_p99,
        "mean_cost": sum(exit_["cost"] for exit_ in exits) / len(exits),
        "exits": [
            {"number": number, "layer": layer, "texts": count, "share": count / len(exits)}
            for (number, layer), count in sorted(left.items())
        ],
    }


def in_words(document: Mapping[str, Any]) -> str:
    """The document of :func:`bench` for a person."""
    latency = document["latency_ms"]
    load = f"{document['clients']} clients" if document["rate"] is None else f"{document['rate']:g} requests a second"
    statuses = ", ".join(
        f"{count} × {'no answer' if status == '0' else status}" for status, count in document["statuses"].items()
    )
    lines = [
        f"{load} for {document['seconds']:g} s: {document['requests']} sent, {statuses}",
        f"answered  {document['throughput']:.1f} a second",
        "latency   " + ", ".join(f"{name} {value:.2f} ms" for name, value in latency.items()),
        f"mean cost {document['mean_cost']:.2f} layers",
        *(
            f"exit {one['number']:<5}{100 * one['share']:5.1f} % of texts, after {one['layer']} layers"
            for one in document["exits"]
        ),
    ]
    # Above this, the load itself was late, and what it measured is not the server's alone.
    if document["rate"] is not None and document["late_p99_ms"] > max(1.0, latency["p99"] / 5):
        lines.append(
            f"beware: requests were sent up to {document['late_p99_ms']:.1f} ms late (p99); the load needs CPU"
        )
    return "\n".join(lines)
