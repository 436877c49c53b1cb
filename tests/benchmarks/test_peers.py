"""The whole benchmark on a tiny model, with the peers that need no environment of their own."""

import json
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import main, split
from tests.server.conftest import some_texts
from tests.tiny import write_tiny_bundle


def test_one_command_measures_everyone_and_prints_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exits = ({"number": 1, "after_layer": 1, "head": "peek"}, {"number": 2, "after_layer": 4, "head": "mean"})
    bundle = write_tiny_bundle(tmp_path, poison=(), exits=exits, precisions=("int8",))
    rows = [f"{text}\t{number % 2}" for number, text in enumerate(some_texts(20))]
    (tmp_path / "dev.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    output = tmp_path / "peers.json"
    arguments = ["--bundle", str(bundle.path), "--file", str(tmp_path / "dev.tsv"), "--output", str(output)]
    arguments += ["--only", "offramp,fastapi int8,bare", "--qualities", "0.95,1.0", "--rounds", "1", "--no-wrk"]
    arguments += ["--seconds", "0.2", "--open-seconds", "0.3", "--overload-seconds", "0.5"]
    main(arguments)
    printed = capsys.readouterr().out
    document = json.loads(output.read_text(encoding="utf-8"))
    measured = {(row["case"], row["load"]) for row in document["rows"]}
    closed = {"1 client", "16 clients"}
    assert measured >= {(f"bare {name}", load) for name in ("0.95", "1", "whole graph") for load in closed}
    assert measured >= {("fastapi int8", load) for load in {*closed, "accuracy", "open 50 %", "open 90 %"}}
    assert measured >= {(f"offramp {name}", load) for name in ("0.95", "1") for load in {*closed, "accuracy"}}
    accuracy = {row["case"]: row["accuracy"] for row in document["rows"] if row["load"] == "accuracy"}
    assert accuracy["fastapi int8"] == accuracy["offramp 1"]
    overload = next(row for row in document["rows"] if row["load"] == "overload")
    assert overload["requests"] == overload["ok"] + overload["refused"]
    assert (overload["failed"], overload["wrong"]) == (0, 0)
    assert "| fastapi int8 |" in printed
    main(["--tables", str(output)])
    assert capsys.readouterr().out == printed


def test_memory_is_compared_between_the_second_and_the_last_quarter() -> None:
    rss = [(1, 100), (3, 500), (6, 110), (9, 120), (13, 700), (16, 130), (19, 125), (21, 900)]
    assert split(rss, 20) == (120, 130)


def test_without_labelled_texts_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "--file is needed" in capsys.readouterr().err
