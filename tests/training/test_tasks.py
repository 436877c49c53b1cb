"""The tasks of GLUE from small files of their own layout."""

from pathlib import Path

import pytest

from training.data import DataError
from training.pipeline import DataSettings, Prepared, prepare
from training.tasks import TASKS

ROWS = 60


def lines(*rows: str, header: str | None = None, mark: str = "") -> bytes:
    return (mark + "\n".join([*([] if header is None else [header]), *rows]) + "\n").encode()


def write_task(folder: Path, name: str) -> Path:
    """``ROWS`` training rows (labels by turns) and four evaluation rows, laid out as GLUE lays out ``name``."""

    def rows(count: int, start: int) -> dict[str, list[str]]:
        made: dict[str, list[str]] = {task: [] for task in TASKS}
        for i in range(start, start + count):
            k = i % 2
            named = ("not_entailment", "entailment")[k]
            three = ("contradiction", "entailment", "neutral")[i % 3]
            made["cola"].append(f'gj04\t{k}\t{"*" if not k else ""}\tHe said "number {i}.')
            made["sst2"].append(f"a{i} b{i} c{i} \t{k}")
            made["mrpc"].append(f'{k}\t{i}\t{i + 900}\tThe "first {i} .\tThe second , {i} .')
            made["qqp"].append(f"{i}\t{i}\t{i + 900}\tHow is {i}?\tWhat is {i}?\t{k}")
            made["qnli"].append(f"{i}\tWhat is {i}?\tIt is {i}.\t{named}")
            made["rte"].append(f"{i}\tPremise {i}.\tHypothesis {i}.\t{named}")
            # Three hypotheses a premise.
            parses = "\t".join(["x"] * 5)
            made["mnli"].append(f"{i}\t{i}\t{i}e\t{parses}\tPremise {i // 3}.\tHypothesis {i}.\t{three}\t{three}")
        return made

    headers = {
        "sst2": "sentence\tlabel",
        "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "qnli": "index\tquestion\tsentence\tlabel",
        "rte": "index\tsentence1\tsentence2\tlabel",
        "mnli": "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
        "sentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
    }
    mark = "\ufeff" if name == "mrpc" else ""
    training = rows(ROWS, 0)[name]
    if name == "qqp":
        training[3:3] = ["700\t700\t1700\tA row that breaks off", "701\t701\t1701\tIs it empty?\t\t0"]
    (folder / "train.tsv").write_bytes(lines(*training, header=headers.get(name), mark=mark))
    for number, file in enumerate(TASKS[name].eval_files):
        evaluation = rows(4, 300 + 10 * number)[name]
        (folder / file).write_bytes(lines(*evaluation, header=headers.get(name), mark=mark))
    return folder


def prepared_task(folder: Path, name: str, **changes: object) -> Prepared:
    sizes = {"calibration_size": 6, "validation_size": 4, **changes}
    return prepare(DataSettings(task=name, data_dir=str(write_task(folder, name)), **sizes), seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "labels", "metric", "pairs"),
    [
        ("cola", ("unacceptable", "acceptable"), "matthews", False),
        ("sst2", ("negative", "positive"), "accuracy", False),
        ("mrpc", ("not_equivalent", "equivalent"), "f1", True),
        ("qqp", ("not_duplicate", "duplicate"), "f1", True),
        ("mnli", ("entailment", "neutral", "contradiction"), "accuracy", True),
        ("qnli", ("not_entailment", "entailment"), "accuracy", True),
        ("rte", ("not_entailment", "entailment"), "accuracy", True),
    ],
)
def test_every_task_is_read_and_split_in_glues_layout(
    tmp_path: Path, name: str, labels: tuple[str, ...], metric: str, pairs: bool
) -> None:
    prepared = prepared_task(tmp_path, name)
    splits = prepared.splits
    # Class 1 is the one whose F1 counts: the order is the task's, not the alphabet's.
    assert (splits.labels, prepared.metric, prepared.takes_pairs) == (labels, metric, pairs)
    assert (len(splits.calibration), len(splits.validation)) == (6, 4)
    assert {e.label for e in splits.train} == set(labels)
    assert all((e.pair is not None) == pairs for e in splits.train)
    assert list(prepared.evaluations) == list(TASKS[name].eval_files)
    assert all(len(part) == 4 for part in prepared.evaluations.values())


def test_cola_has_no_header_and_its_quotes_are_literal(tmp_path: Path) -> None:
    first = TASKS["cola"].read(write_task(tmp_path, "cola"), "train.tsv").examples[0]
    assert (first.text, first.label, first.row) == ('He said "number 0.', "unacceptable", 1)


def test_mrpc_begins_with_a_byte_order_mark_and_its_quotes_are_literal(tmp_path: Path) -> None:
    first = TASKS["mrpc"].read(write_task(tmp_path, "mrpc"), "train.tsv").examples[1]
    assert (first.text, first.pair, first.label) == ('The "first 1 .', "The second , 1 .", "equivalent")


def test_the_broken_rows_of_qqp_are_left_out_and_those_of_others_named(tmp_path: Path) -> None:
    assert len(TASKS["qqp"].read(write_task(tmp_path, "qqp"), "train.tsv")) == ROWS
    path = write_task(tmp_path, "rte") / "train.tsv"
    path.write_bytes(path.read_bytes() + b"99\tbroken\n")
    with pytest.raises(DataError, match=rf"row {ROWS + 2}: 2 cells where the header has 4"):
        TASKS["rte"].read(tmp_path, "train.tsv")


def test_a_label_that_the_task_does_not_have_is_named(tmp_path: Path) -> None:
    path = write_task(tmp_path, "mnli") / "dev_matched.tsv"
    path.write_bytes(path.read_bytes().replace(b"\tneutral\n", b"\t-\n", 1))
    with pytest.raises(DataError, match=r"dev_matched\.tsv, row \d+: label '-'"):
        TASKS["mnli"].read(tmp_path, "dev_matched.tsv")


def test_a_premise_of_mnli_stands_on_one_side_of_the_split_only(tmp_path: Path) -> None:
    splits = prepared_task(tmp_path, "mnli").splits
    held = [e.text for e in (*splits.calibration, *splits.validation)]
    assert len(set(held)) == len(held) == 10
    assert not set(held) & {e.text for e in splits.train}
    assert len(splits.train) == ROWS - 3 * 10


def test_mnli_is_scored_on_matched_and_on_mismatched_texts(tmp_path: Path) -> None:
    prepared = prepared_task(tmp_path, "mnli")
    matched, mismatched = prepared.evaluations.values()
    assert prepared.evaluation == matched
    assert {e.text for e in matched}.isdisjoint(e.text for e in mismatched)


def test_without_a_folder_the_message_names_the_files_and_where_they_are_from() -> None:
    with pytest.raises(Exception, match=r"dev_matched\.tsv, dev_mismatched\.tsv in GLUE's layout \(https://"):
        prepare(DataSettings(task="mnli"), seed=0)
