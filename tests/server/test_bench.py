"""`offramp bench` against a real server of a tiny model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import offramp
from models.bundle import Bundle
from server.bench import TEXTS, Plan, bench
from server.load import LoadError
from tests.server.conftest import some_texts
from tests.server.test_process import process


@pytest.fixture(scope="module")
def url(tiny_bundle: Bundle) -> Iterator[str]:
    with process(tiny_bundle, threads=1, runs=1) as server:
        yield "http://{}:{}".format(*server.address)


def test_open_loop_counts_every_request_and_every_exit(url: str, tiny_bundle: Bundle) -> None:
    document = bench(url, some_texts(20), {"quality": 0.95}, {}, Plan(seconds=0.5, rate=60))
    exits = tiny_bundle.manifest.architecture.exits
    assert document["statuses"] == {"200": document["requests"]}
    assert sum(one["texts"] for one in document["exits"]) == document["requests"] > 0
    assert sum(one["share"] for one in document["exits"]) == pytest.approx(1)
    assert {(one["number"], one["layer"]) for one in document["exits"]} <= {(e.number, e.after_layer) for e in exits}
    assert 0 < document["latency_ms"]["p50"] <= document["latency_ms"]["p99"] <= document["latency_ms"]["max"]


def test_full_depth_leaves_at_the_last_exit_at_the_cost_of_the_last_exit(url: str) -> None:
    document = bench(url, TEXTS, {"quality": 1.0}, {}, Plan(seconds=0.3, clients=2))
    assert [one["number"] for one in document["exits"]] == [4]
    assert document["mean_cost"] > 3


def test_a_wish_that_the_server_refuses_is_told_in_its_words(url: str) -> None:
    with pytest.raises(LoadError, match=r"nothing was classified: 422, .*0\.995"):
        bench(url, TEXTS, {"quality": 0.995}, {}, Plan(seconds=0.2, clients=1))


def test_an_unknown_model_is_named_before_any_load(url: str) -> None:
    with pytest.raises(LoadError, match="no model other; it has tiny"):
        bench(url, TEXTS, {"model": "other"}, {}, Plan(seconds=0.2, clients=1))


def test_pairs_are_split_at_the_tab(pair_bundle: Bundle) -> None:
    with process(pair_bundle, threads=1, runs=1) as server:
        url = "http://{}:{}".format(*server.address)
        document = bench(url, ["a man is slow\ta man is not fast"], {}, {}, Plan(seconds=0.2, clients=1))
        assert set(document["statuses"]) == {"200"}
        with pytest.raises(LoadError, match="a tab must separate the two texts"):
            bench(url, ["no pair"], {}, {}, Plan(seconds=0.2, clients=1))


def test_the_command_prints_percentiles_and_exits(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("the film was good\n\ntwo hours of nothing\n", encoding="utf-8")
    arguments = ["bench", url, "--texts", str(texts), "--clients", "2", "--seconds", "0.3", "--quality", "1.0"]
    assert offramp.run(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2 clients for 0.3 s: ")
    assert "p99" in shown
    assert "exit 4" in shown
    assert offramp.run([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exits"] == [
        {"number": 4, "layer": 4, "texts": document["requests"], "share": 1.0},
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["http://127.0.0.1:1"], 1, "http://127.0.0.1:1: no Offramp server answers there"),
        (["127.0.0.1:8000"], 1, "127.0.0.1:8000: not a URL like http://localhost:8000"),
        (["http://127.0.0.1:1", "--header", "x"], 2, "--header: 'x' is not NAME:VALUE"),
        (["http://127.0.0.1:1", "--clients", "0"], 2, "--clients"),
        (["http://127.0.0.1:1", "--texts", "/dev/null"], 2, "--texts: no text in it"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert offramp.run(["bench", *arguments]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
