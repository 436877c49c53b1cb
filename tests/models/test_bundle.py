"""A bundle is whole, unaltered and of a known format, or it is refused with one error that names the file."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from models import bundle as bundles
from models.architecture import Architecture, ExitSpec
from models.bundle import (
    Bundle,
    BundleError,
    Calibration,
    CurvePoint,
    PrecisionCalibration,
    RefusedTier,
    Tier,
    segment_io,
    sha256_of,
    write_bundle,
)

ARCHITECTURE = Architecture(
    backbone="tiny",
    num_layers=2,
    hidden_size=32,
    embedding_size=32,
    num_heads=4,
    intermediate_size=64,
    vocab_size=8,
    max_length=16,
    layer_norm_eps=1e-12,
    num_labels=2,
    exits=(
        ExitSpec(number=1, after_layer=0, head="peek"),
        ExitSpec(number=2, after_layer=1, head="mean"),
        ExitSpec(number=3, after_layer=2, head="mean"),
    ),
)


def calibration(temperatures: tuple[float, ...] = (1.5, 1.0, 1.25)) -> Calibration:
    point = CurvePoint(
        threshold=0.9731, metric=0.9, agreement=0.99, mean_cost=1.2, speedup=1.7, exit_shares=(0.5, 0.25, 0.25)
    )
    tier = Tier(
        quality=0.98,
        criterion="confidence",
        threshold=0.9731,
        n=1300,
        disagreements=3,
        p_value=1.25e-7,
        mean_cost=1.2,
        speedup=1.7,
    )
    precision = PrecisionCalibration(
        temperatures=temperatures,
        agreement_temperatures=temperatures,
        calibration_error_before=(0.1,) * 3,
        calibration_error_after=(0.05,) * 3,
        curves={"confidence": (point,)},
        certified=(tier,),
        refused=(RefusedTier(quality=0.999, why="too few texts", n_needed=2995),),
    )
    return Calibration(
        metric="accuracy",
        delta=0.05,
        n_temperature=500,
        n_risk=1300,
        n_validation=800,
        data_sha256="0" * 64,
        precisions={"fp32": precision},
    )


def manifest(**changes: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "version": "1",
        "task": "sst2",
        "labels": ["negative", "positive"],
        "takes_pairs": False,
        "architecture": ARCHITECTURE.model_dump(mode="json"),
        "exit_costs": [0.2, 1.2, 2.2],
        "mean_tokens": 8.5,
        "default_precision": "fp32",
        "scores": [
            {
                "split": "validation",
                "n": 800,
                "per_exit": {
                    "fp32": [
                        {"exit": n, "cost_in_layers": n - 0.8, "metrics": {"accuracy": 0.7 + n / 10}} for n in (1, 2, 3)
                    ]
                },
            }
        ],
        "provenance": {"method": "jt", "seeds": [1]},
        "licence": "Apache-2.0",
        **changes,
    }


@pytest.fixture
def graphs(tmp_path: Path) -> list[Path]:
    """Three files that stand for graphs: a bundle checks their bytes, whoever opens them their inputs and outputs."""
    folder = tmp_path / "made"
    folder.mkdir()
    paths = [folder / f"{number}.onnx" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    return paths


def write(target: Path, graphs: list[Path], **changes: Any) -> Bundle:
    arguments: dict[str, Any] = {
        "manifest": manifest(),
        "calibration": calibration(),
        "tokenizer_json": Tokenizer(WordLevel({"[UNK]": 0, "good": 1}, unk_token="[UNK]")).to_str(),
        "graphs": {"fp32": graphs},
        "readme": "# tiny\n",
        **changes,
    }
    return write_bundle(target, **arguments)


@pytest.fixture
def path(tmp_path: Path, graphs: list[Path]) -> Path:
    return write(tmp_path / "tiny", graphs, extra={"plots/curve.png": b"png"}).path


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((path / "manifest.json").read_text())
    change(document)
    (path / "manifest.json").write_text(json.dumps(document))


def refused(path: Path, *words: str) -> None:
    """Loading fails with one line that holds every one of ``words``."""
    with pytest.raises(BundleError) as caught:
        Bundle.load(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_what_is_written_is_what_is_read(path: Path, graphs: list[Path]) -> None:
    loaded = Bundle.load(path)
    assert loaded.calibration == calibration()
    assert loaded.manifest.architecture == ARCHITECTURE
    assert loaded.manifest.labels == ("negative", "positive")
    assert loaded.manifest.provenance == {"method": "jt", "seeds": [1]}
    assert loaded.encoder.encode("good").ids == [1]
    assert loaded.encoder.max_length == 16
    for number, source in enumerate(graphs, start=1):
        assert loaded.graph(number).read_bytes() == source.read_bytes()
    assert (path / "README.md").read_text() == "# tiny\n"
    assert (path / "plots" / "curve.png").read_bytes() == b"png"


def test_a_bundle_may_move(path: Path, tmp_path: Path) -> None:
    moved = path.rename(tmp_path / "elsewhere")
    assert Bundle.load(moved).graph(1).is_file()


@pytest.mark.parametrize("file", ["graphs/fp32/segment_2.onnx", "tokenizer.json", "calibration.json"])
def test_a_changed_byte_is_found(path: Path, file: str) -> None:
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (path / file).write_bytes(content)
    refused(path, str(path / file), "sha256")


@pytest.mark.parametrize("file", ["graphs/fp32/segment_3.onnx", "tokenizer.json"])
def test_a_file_cut_short_is_found(path: Path, file: str) -> None:
    (path / file).write_bytes((path / file).read_bytes()[:-1])
    refused(path, str(path / file), "cut short")


@pytest.mark.parametrize("file", ["manifest.json", "graphs/fp32/segment_1.onnx", "tokenizer.json", "calibration.json"])
def test_a_missing_file_is_named(path: Path, file: str) -> None:
    (path / file).unlink()
    refused(path, str(path / file), "missing")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"), "no such bundle folder")


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_another_format_version_is_refused_before_anything_else_is_read(path: Path, version: object) -> None:
    def future(document: dict[str, Any]) -> None:
        document.clear()
        document["format_version"] = version

    edit(path, future)
    refused(path, str(path / "manifest.json"), f"format_version {version!r} is not 1")


def test_labels_that_do_not_match_the_logits_are_refused(path: Path) -> None:
    edit(path, lambda document: document.update(labels=["negative", "neutral", "positive"]))
    refused(path, str(path / "manifest.json"), "3 labels, but logits of width 2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": ["same", "same"]}, "labels repeat"),
        ({"exit_costs": [1.0]}, "exit_costs has 1 entries for 3 exits"),
        ({"default_precision": "int8"}, "default_precision int8 is not among precisions"),
        ({"name": "../tiny"}, "name"),
        ({"surprise": 1}, "surprise"),
        ({"mean_tokens": "many"}, "mean_tokens"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(path: Path, change: dict[str, Any], message: str) -> None:
    edit(path, lambda document: document.update(change))
    refused(path, str(path / "manifest.json"), message)


def test_a_graph_too_few_is_refused(path: Path) -> None:
    edit(path, lambda document: document["precisions"]["fp32"].pop())
    refused(path, str(path / "manifest.json"), "precision fp32 has 2 graphs for 3 exits")


@pytest.mark.parametrize("absolute", [True, False], ids=["absolute", "with dots"])
def test_a_path_out_of_the_bundle_is_refused_unread(path: Path, tmp_path: Path, absolute: bool) -> None:
    outside = tmp_path / "outside.onnx"
    shutil.copy(path / "graphs/fp32/segment_1.onnx", outside)
    name = str(outside) if absolute else "graphs/../../outside.onnx"

    def escape(document: dict[str, Any]) -> None:
        document["precisions"]["fp32"][0].update(file=name, sha256=sha256_of(outside))

    edit(path, escape)
    refused(path, str(path / "manifest.json"), "lies outside the bundle")


def test_a_link_out_of_the_bundle_is_refused(path: Path, tmp_path: Path) -> None:
    graph = path / "graphs/fp32/segment_1.onnx"
    shutil.move(graph, tmp_path / "outside.onnx")
    graph.symlink_to(tmp_path / "outside.onnx")
    refused(path, "lies outside the bundle")


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]", b"null"])
def test_a_manifest_that_is_not_one_is_refused(path: Path, content: bytes) -> None:
    (path / "manifest.json").write_bytes(content)
    refused(path, str(path / "manifest.json"))


def rewrite(path: Path, name: str, text: str) -> None:
    """Replaces a file and its sha256, as a faulty tool would."""
    (path / name).write_text(text)
    edit(path, lambda document: document["files"].update({name: sha256_of(path / name)}))


def test_a_tokenizer_that_is_not_one_is_refused(path: Path) -> None:
    rewrite(path, "tokenizer.json", "{}")
    refused(path, str(path / "tokenizer.json"), "not a tokenizer")


def test_a_calibration_for_other_exits_or_precisions_is_refused(path: Path) -> None:
    rewrite(path, "calibration.json", calibration(temperatures=(1.0, 1.0)).model_dump_json())
    refused(path, str(path / "calibration.json"), "2 temperatures for 3 exits (fp32)")
    document = calibration().model_dump(mode="json")
    document["precisions"] = {"int8": document["precisions"]["fp32"]}
    rewrite(path, "calibration.json", json.dumps(document))
    refused(path, str(path / "calibration.json"), "precision fp32 is not calibrated")


def edit_calibration(path: Path, keys: tuple[Any, ...], value: object) -> None:
    """Changes one place in calibration.json, and its checksum with it."""
    document = json.loads((path / "calibration.json").read_text())
    place = document
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (path / "calibration.json").write_text(json.dumps(document))
    edit(path, lambda m: m["files"].update({"calibration.json": sha256_of(path / "calibration.json")}))


FP32 = ("precisions", "fp32")
POINT = (*FP32, "curves", "confidence", 0)
TIER = (*FP32, "certified", 0)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        *(((*FP32, "temperatures", 0), bad) for bad in (float("nan"), float("inf"), 0, -1, 1e-300, 1e300, True)),
        *(((*POINT, "threshold"), bad) for bad in (float("nan"), -0.1, 1.1)),
        *(((*TIER, "threshold"), bad) for bad in (float("nan"), -0.1, 1.1)),
        ((*TIER, "criterion"), "patience"),
        ((*POINT, "agreement"), 1.1),
        ((*POINT, "speedup"), 0),
        ((*POINT, "mean_cost"), float("inf")),
        ((*POINT, "exit_shares"), [1.0]),
        ((*TIER, "mean_cost"), -1),
        ((*TIER, "disagreements"), 9999),
        ((*TIER, "p_value"), 2),
        ((*FP32, "calibration_error_after"), [0.1]),
        (("delta",), 5),
        (("n_risk",), -1),
    ],
)
def test_a_calibration_that_no_request_could_run_under_is_refused(
    path: Path, keys: tuple[Any, ...], value: object
) -> None:
    """Each of these once loaded, and failed at requests: with 500, or with NaN in place of a score."""
    edit_calibration(path, keys, value)
    refused(path, "calibration.json")


def test_certified_tiers_out_of_order_are_refused(path: Path) -> None:
    tier = calibration().precisions["fp32"].certified[0].model_dump()
    edit_calibration(path, (*FP32, "certified"), [tier, {**tier, "quality": 0.99}])
    refused(path, "calibration.json", "highest first")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"exit_costs": [float("nan")] * 3}, "exit_costs.0"),
        ({"exit_costs": [3, 2, 1]}, "must rise"),
        ({"exit_costs": [-1, 0, 1]}, "exit_costs.0"),
        ({"mean_tokens": float("inf")}, "mean_tokens"),
        ({"provenance": {"loss": float("nan")}}, "NaN"),
        ({"labels": ["a", " "]}, "blank"),
        ({"format_version": True}, "format_version"),
        ({"format_version": 1.0}, "format_version"),
        ({"architecture": ARCHITECTURE.model_dump() | {"hidden_size": 4 * 10**400}}, "hidden_size"),
        ({"architecture": ARCHITECTURE.model_dump() | {"max_length": 10**9}}, "max_length"),
        ({"files": {"tokenizer.json": "0" * 64, "calibration.json": "0" * 64, "../x": "0" * 64}}, "json"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_field(path: Path, change: dict[str, Any], words: str) -> None:
    edit(path, lambda m: m.update(change))
    refused(path, words)


@pytest.mark.parametrize("digits", [b"1e400", b"9" * 5000, b"[" * 5000 + b"]" * 5000, b"[" * 100_000])
def test_json_that_python_chokes_on_is_one_line(path: Path, digits: bytes) -> None:
    text = (path / "manifest.json").read_bytes()
    (path / "manifest.json").write_bytes(text.replace(b"8.5", digits))
    refused(path, "manifest.json")


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "", ".", "graphs"])
def test_a_graph_named_like_no_file_is_refused(path: Path, name: str) -> None:
    edit(path, lambda m: m["precisions"]["fp32"][0].update(file=name))
    refused(path)


def test_a_wrong_size_is_refused(path: Path) -> None:
    edit(path, lambda m: m["precisions"]["fp32"][1].update(bytes=7))
    refused(path, "segment_2.onnx", "7 bytes")


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path, graphs: list[Path]) -> None:
    """An id beyond the embedding table fails the whole micro-batch of whoever sent that word."""
    words = {"[UNK]": 0, "good": ARCHITECTURE.vocab_size}
    with pytest.raises(BundleError, match="token id 8, but the model's vocab_size is 8"):
        write(tmp_path / "b", graphs, tokenizer_json=Tokenizer(WordLevel(words, unk_token="[UNK]")).to_str())


@pytest.mark.parametrize(("ids", "times", "words"), [(5000, 1, "token id 5000"), (0, 16, "16 special tokens")])
def test_special_tokens_that_do_not_fit_are_refused(
    tmp_path: Path, graphs: list[Path], ids: int, times: int, words: str
) -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "good": 1}, unk_token="[UNK]"))
    tokenizer.post_processor = TemplateProcessing(single="[X] " * times + "$A", special_tokens=[("[X]", ids)])
    with pytest.raises(BundleError, match=words):
        write(tmp_path / "b", graphs, tokenizer_json=tokenizer.to_str())


def test_a_file_without_a_checksum_is_refused(path: Path) -> None:
    edit(path, lambda document: document["files"].pop("tokenizer.json"))
    refused(path, str(path / "manifest.json"), "no sha256 for tokenizer.json")


# --- writing ---------------------------------------------------------------------------------------------------------


def test_an_existing_bundle_is_only_replaced_when_asked(path: Path, graphs: list[Path]) -> None:
    with pytest.raises(BundleError, match="exists already"):
        write(path, graphs, manifest=manifest(version="2"))
    assert Bundle.load(path).manifest.version == "1"
    assert write(path, graphs, manifest=manifest(version="2"), replace=True).manifest.version == "2"
    assert not (path / "plots").exists()


def left_beside(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir() if entry.name not in ("made", path.name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"manifest": manifest(labels=["one", "two", "three"])}, "manifest.json: document: .*3 labels"),
        ({"manifest": manifest(scores="none")}, "manifest.json: scores"),
        ({"tokenizer_json": "{}"}, "tokenizer.json: not a tokenizer"),
        ({"calibration": calibration(temperatures=(1.0,))}, "calibration.json: 1 temperatures for 3 exits"),
    ],
)
def test_a_write_that_fails_leaves_the_old_bundle_and_nothing_beside_it(
    path: Path, graphs: list[Path], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        write(path, graphs, replace=True, **changes)
    assert Bundle.load(path).manifest.version == "1"
    assert left_beside(path) == []


@pytest.mark.parametrize("folder", [False, True])
def test_what_is_no_bundle_is_never_replaced(tmp_path: Path, graphs: list[Path], folder: bool) -> None:
    """`offramp calibrate --output texts.csv` once swapped a person's data for a bundle."""
    target = tmp_path / "mine"
    precious = target / "texts.csv" if folder else target
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("text,label\n")
    with pytest.raises(BundleError, match="is no bundle"):
        write(target, graphs, replace=True)
    assert precious.read_text() == "text,label\n"


def test_an_empty_folder_may_become_a_bundle(tmp_path: Path, graphs: list[Path]) -> None:
    (tmp_path / "new").mkdir()
    assert write(tmp_path / "new", graphs, replace=True).manifest.name == "tiny"


def test_a_graph_that_is_not_there_leaves_the_old_bundle_and_is_named(path: Path, graphs: list[Path]) -> None:
    graphs[2].unlink()
    with pytest.raises(FileNotFoundError, match=r"3\.onnx"):
        write(path, graphs, replace=True)
    assert Bundle.load(path).manifest.version == "1"
    assert left_beside(path) == []


def test_a_swap_that_fails_half_way_puts_the_old_bundle_back(
    path: Path, graphs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if Path(target) == path and Path(source).name != "bundle":
            raise OSError("disk full")
        rename(source, target)

    monkeypatch.setattr(bundles.os, "rename", failing)
    with pytest.raises(OSError, match="disk full"):
        write(path, graphs, manifest=manifest(version="2"), replace=True)
    assert Bundle.load(path).manifest.version == "1"
    assert left_beside(path) == []


def test_a_half_written_bundle_is_never_visible(
    tmp_path: Path, graphs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "new"
    seen = []
    copy, rename = shutil.copyfile, os.rename

    def watched_copy(*arguments: Any) -> Any:
        seen.append(target.exists())
        return copy(*arguments)

    def watched_rename(source: Path, destination: Path) -> None:
        # What is about to become visible is whole: it loads.
        Bundle.load(source)
        seen.append(target.exists())
        rename(source, destination)

    monkeypatch.setattr(bundles.shutil, "copyfile", watched_copy)
    monkeypatch.setattr(bundles.os, "rename", watched_rename)
    write(target, graphs)
    assert seen == [False] * 4
    assert Bundle.load(target)


def test_a_written_bundle_can_be_read_by_others(path: Path) -> None:
    assert path.stat().st_mode & 0o055 == 0o055


# --- the seams between segments --------------------------------------------------------------------------------------


def test_segments_pass_on_keys_and_values_after_a_peek_only() -> None:
    assert segment_io(ARCHITECTURE, 1) == (
        ("input_ids", "position_ids", "attention_mask", "token_type_ids"),
        ("logits", "next_hidden", "next_key", "next_value"),
    )
    assert segment_io(ARCHITECTURE, 2) == (("hidden", "key", "value", "attention_mask"), ("logits", "next_hidden"))
    assert segment_io(ARCHITECTURE, 3) == (("hidden", "attention_mask"), ("logits",))


def test_a_model_without_token_types_has_no_input_for_them() -> None:
    roberta = ARCHITECTURE.model_copy(update={"uses_token_type_ids": False})
    assert "token_type_ids" not in segment_io(roberta, 1)[0]
