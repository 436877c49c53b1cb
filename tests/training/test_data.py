"""Reading, splitting and batching labelled texts."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from models.tokenization import Encoded, TextEncoder
from tests.tiny_backbones import tiny_tokenizer
from training.data import (
    DataError,
    Example,
    Splits,
    Table,
    Tokenized,
    check_labels,
    collate,
    label_names,
    length_grouped,
    read_table,
    same_text,
    sentence_of,
    split,
    subset,
    tokenize,
)

Write = Callable[[str, str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return to


def rows(table: Table) -> list[tuple[str, str, int]]:
    return [(e.text, e.label, e.row) for e in table.examples]


def refused(path: Path, *columns: str) -> str:
    """The one-line message with which ``path`` is refused, without the file's name, which it begins with."""
    with pytest.raises(DataError) as error:
        read_table(path, *columns)
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path)).removeprefix(":").removeprefix(",").strip()


# CSV.


def test_csv_has_named_columns_in_any_order(write: Write) -> None:
    path = write("a.csv", "id,label,text\n1,pos,good film\n2,neg,bad film\n")
    assert rows(read_table(path)) == [("good film", "pos", 2), ("bad film", "neg", 3)]


def test_columns_may_have_other_names_and_a_second_text(write: Write) -> None:
    path = write("a.csv", "a,b,c\nleft,right,yes\n")
    (example,) = read_table(path, "a", "c", "b").examples
    assert example == Example("left", "right", "yes", 2)


def test_a_byte_order_mark_is_no_part_of_the_first_name(write: Write) -> None:
    assert rows(read_table(write("a.csv", "\ufefftext,label\nx,y\n"))) == [("x", "y", 2)]
    assert rows(read_table(write("a.tsv", "\ufefftext\tlabel\nx\ty\n"))) == [("x", "y", 2)]
    assert rows(read_table(write("a.jsonl", '\ufeff{"text": "x", "label": "y"}\n'))) == [("x", "y", 1)]


def test_csv_quotes_hold_commas_quotes_and_line_breaks_and_rows_count_as_in_a_spreadsheet(write: Write) -> None:
    path = write("a.csv", 'text,label\n"one,\n""two""\nthree",x\n\nfour,y\n')
    # Row 3 is the blank one.
    assert rows(read_table(path)) == [('one,\n"two"\nthree', "x", 2), ("four", "y", 4)]


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
def test_lines_may_end_as_on_any_system_and_the_last_not_at_all(write: Write, ending: str) -> None:
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        content = ending.join([f"text{separator}label", f"a{separator}x", f"b{separator}y"])
        assert rows(read_table(write(name, content))) == [("a", "x", 2), ("b", "y", 3)]


def test_an_unclosed_quote_is_an_error_at_the_row_where_it_opens(write: Write) -> None:
    message = refused(write("a.csv", 'text,label\nfine,x\n"never closed,y\nmore,z\n'))
    assert message.startswith("row 3: ")
    assert "unexpected end of data" in message
    assert refused(write("b.csv", 'text,label\n"never closed,y\n')).startswith("row 2: ")
    assert refused(write("c.csv", '"text,label\nx,y\n')).startswith("row 1: ")


def test_text_after_a_closing_quote_is_an_error(write: Write) -> None:
    assert refused(write("a.csv", 'text,label\n"a"b,x\n')).startswith("row 2: ")


@pytest.mark.parametrize(("line", "count"), [("only one", 1), ("a,b,c", 3)])
def test_a_row_of_another_width_is_named(write: Write, line: str, count: int) -> None:
    assert refused(write("a.csv", f"text,label\nfine,x\n{line}\n")) == f"row 3: {count} cells where the header has 2"


def test_a_missing_column_names_those_there_are(write: Write) -> None:
    assert refused(write("a.csv", "sentence,label\nx,y\n")) == "row 1: no column 'text'; it has 'sentence', 'label'"
    assert "no column 'Label'" in refused(write("b.csv", "text,label\nx,y\n"), "text", "Label")
    assert "no column 'pair'" in refused(write("c.csv", "text,label\nx,y\n"), "text", "label", "pair")


def test_a_column_that_is_there_twice_is_refused_where_it_matters(write: Write) -> None:
    assert refused(write("a.csv", "text,label,text\na,x,b\n")) == "row 1: 2 columns are called 'text'"
    assert rows(read_table(write("b.csv", "text,note,label,note\na,1,x,2\n"))) == [("a", "x", 2)]


def test_text_and_label_must_be_two_columns(write: Write) -> None:
    assert "cannot be two of text, pair and label" in refused(write("a.csv", "text\na\n"), "text", "text")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "the file is empty"),
        ("a.tsv", "", "the file is empty"),
        ("a.csv", "\ufeff", "the file is empty"),
        ("a.jsonl", "", "no rows"),
        ("a.jsonl", "\n  \n", "no rows"),
        ("a.csv", "text,label\n", "no rows"),
        ("a.csv", "text,label\n\n\n", "no rows"),
        ("a.tsv", "text\tlabel", "no rows"),
        ("a.csv", "\ntext,label\na,x\n", "row 1: is blank, but must name the columns"),
    ],
)
def test_a_file_without_rows_is_refused(write: Write, name: str, content: str, message: str) -> None:
    assert refused(write(name, content)) == message


def test_an_empty_cell_is_named_by_column_and_row(write: Write) -> None:
    assert refused(write("a.csv", "text,label\na,x\n  ,y\n")) == "row 3: column 'text' is empty"
    assert refused(write("b.csv", "text,label\na,x\nb, \n")) == "row 3: column 'label' has no label"
    assert (
        refused(write("c.csv", "text,pair,label\na,,x\n"), "text", "label", "pair") == "row 2: column 'pair' is empty"
    )


def test_a_gigantic_field_is_a_broken_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.data.MAX_FIELD_CHARACTERS", 1000)
    message = refused(write("a.csv", f"text,label\nfine,x\n{'a' * 1001},y\n"))
    assert message.startswith("row 3: field larger than field limit")


# TSV.


def test_tsv_takes_quotes_as_they_stand(write: Write) -> None:
    path = write("a.tsv", 'text\tlabel\n"open, never closed\t0\na "b" c\t1\n""\t1\n')
    assert [r[0] for r in rows(read_table(path))] == ['"open, never closed', 'a "b" c', '""']


def test_tsv_rows_of_another_width_are_named(write: Write) -> None:
    assert refused(write("a.tsv", "text\tlabel\na\t0\nb\tc\t1\n")) == "row 3: 3 cells where the header has 2"


# JSON Lines.


def test_jsonl_labels_of_any_type_become_text(write: Write) -> None:
    labels = ["s", " padded ", 1, -3, 1.5, 1.0, True, False, 10**30]
    path = write("a.jsonl", "".join(json.dumps({"text": "t", "label": v}) + "\n" for v in labels))
    assert [r[1] for r in rows(read_table(path))] == [
        "s", "padded", "1", "-3", "1.5", "1.0", "true", "false", "1" + "0" * 30,
    ]  # fmt: skip


def test_jsonl_rows_are_lines_and_blank_lines_count(write: Write) -> None:
    path = write("a.jsonl", '{"text": "a", "label": 0}\n\n{"label": 1, "text": "b\\nc", "more": []}')
    assert rows(read_table(path)) == [("a", "0", 1), ("b\nc", "1", 3)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a", "label": null}', "row 2: column 'label' has no label"),
        ('{"text": "a", "label": ""}', "row 2: column 'label' has no label"),
        ('{"text": "a", "label": NaN}', "row 2: column 'label' has no label"),
        ('{"text": "a", "label": -Infinity}', "row 2: column 'label' has no label"),
        ('{"text": "a", "label": ["x"]}', "row 2: column 'label' is not a string, a number, true or false"),
        ('{"text": "a", "label": {}}', "row 2: column 'label' is not a string, a number, true or false"),
        ('{"text": null, "label": 1}', "row 2: column 'text' is empty"),
        ('{"text": " ", "label": 1}', "row 2: column 'text' is empty"),
        ('{"text": 7, "label": 1}', "row 2: column 'text' is not a string"),
        ('{"text": NaN, "label": 1}', "row 2: column 'text' is not a string"),
        ('{"text": ["a"], "label": 1}', "row 2: column 'text' is not a string"),
        ('{"label": 1, "body": 2}', "row 2: no column 'text'; it has 'label', 'body'"),
        ("[1, 2]", "row 2: not a JSON object"),
        ("null", "row 2: not a JSON object"),
        ('{"text": "half \\ud83d", "label": 1}', "row 2: column 'text' has a lone surrogate, which is not text"),
        ('{"text": "a", "label": "\\udc00"}', "row 2: column 'label' has a lone surrogate, which is not text"),
    ],
)
def test_a_bad_json_row_is_named(write: Write, line: str, message: str) -> None:
    assert refused(write("a.jsonl", '{"text": "fine", "label": 0}\n' + line + "\n")) == message


@pytest.mark.parametrize(
    "line",
    ["{", "text,label", '{"text": "a" "label": 1}', '{"text": "a", "label": ' + "9" * 5000 + "}", "[" * 200_000],
    ids=["open", "csv", "comma", "long integer", "deep"],
)
def test_a_row_that_is_not_json_is_named(write: Write, line: str) -> None:
    message = refused(write("a.jsonl", '{"text": "fine", "label": 0}\n' + line + "\n"))
    assert message.startswith("row 2: not JSON (")


def test_a_whole_surrogate_pair_is_text(write: Write) -> None:
    assert rows(read_table(write("a.jsonl", '{"text": "\\ud83d\\ude00", "label": 1}\n')))[0][0] == "\U0001f600"


# Files.


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
def test_bytes_that_are_not_utf8_are_named_by_line(write: Write, name: str) -> None:
    lines = {
        "a.csv": ["text,label", "fine,x", "caf\xe9,y", "fine,z"],
        "a.tsv": ["text\tlabel", "fine\tx", "caf\xe9\ty", "fine\tz"],
        "a.jsonl": ['{"text": "fine", "label": "x"}', '{"text": "b", "label": "y"}', '{"text": "caf\xe9"}'],
    }[name]
    message = refused(write(name, "\n".join(lines).encode("latin-1")))
    assert message == "line 3: not UTF-8 (byte 0xe9: invalid continuation byte)"


def test_a_bad_byte_far_into_a_file_is_found(write: Write) -> None:
    content = b"text,label\n" + b"fine,x\n" * 20_000 + b"b\xffd,y\n" + b"fine,x\n" * 20_000
    assert refused(write("a.csv", content)) == "line 20002: not UTF-8 (byte 0xff: invalid start byte)"


def test_utf16_and_a_torn_last_character_are_not_utf8(write: Write) -> None:
    assert refused(write("a.csv", "text,label\na,x\n".encode("utf-16"))).startswith("line 1: not UTF-8 (byte 0xff")
    torn = "text,label\na,x\nb,é".encode()[:-1]
    assert refused(write("b.csv", torn)) == "line 3: not UTF-8 (byte 0xc3: unexpected end of data)"


def test_a_file_of_another_kind_a_missing_one_and_a_folder_are_refused(write: Write, tmp_path: Path) -> None:
    assert refused(write("a.xlsx", "text,label\n")) == "the name must end in .csv, .tsv or .jsonl"
    assert refused(tmp_path / "none.csv") == "no such file"
    (tmp_path / "folder.csv").mkdir()
    assert refused(tmp_path / "folder.csv") == "Is a directory"


def test_the_ending_may_be_in_capitals(write: Write) -> None:
    assert len(read_table(write("A.CSV", "text,label\na,x\n"))) == 1


# Labels.


def examples_of(*labels: str) -> list[Example]:
    return [Example(f"t{i}", None, label, i + 2) for i, label in enumerate(labels)]


def test_labels_are_ordered_by_number_or_else_by_name() -> None:
    assert label_names(examples_of("10", "9", "-1", "9"), "f") == ("-1", "9", "10")
    assert label_names(examples_of("b", "a", "b"), "f") == ("a", "b")
    assert label_names(examples_of("10", "9", "x"), "f") == ("10", "9", "x")
    assert label_names(examples_of("01", "1"), "f") == ("01", "1")
    assert len(label_names(examples_of("1" * 5000, "2"), "f")) == 2


def test_one_class_alone_is_refused() -> None:
    with pytest.raises(DataError, match=r"f\.csv: all 3 rows have the label 'a'; two are needed"):
        label_names(examples_of("a", "a", "a"), "f.csv")


def test_a_label_that_training_did_not_see_is_named_by_row() -> None:
    check_labels(examples_of("a", "b"), ("a", "b"), "dev.csv")
    with pytest.raises(DataError, match=r"dev\.csv, row 4: label 'c' is not among the training labels"):
        check_labels(examples_of("a", "b", "c", "d"), ("a", "b"), "dev.csv")


# Splits.


def texts(*many: str) -> list[Example]:
    return [Example(t, None, str(i % 2), i + 2) for i, t in enumerate(many)]


def test_texts_that_differ_in_case_and_spaces_are_the_same() -> None:
    groups = same_text(texts("A  film ", "a film", "a film!", "a\tfilm"))
    assert groups[0] == groups[1] == groups[3] != groups[2]


def test_a_pair_is_the_same_only_on_both_sides() -> None:
    pairs = [
        Example("a", "b", "0", 2),
        Example("a", "B", "1", 3),
        Example("a", "c", "0", 4),
        Example("ab", None, "0", 5),
    ]
    groups = same_text(pairs)
    assert groups[0] == groups[1]
    assert len({groups[0], groups[2], groups[3]}) == 3


def test_a_fragment_belongs_to_every_sentence_that_holds_it_as_a_run_of_words() -> None:
    many = ["a very good film", "good film", "good", "not a good film at all", "very film", "od fi"]
    owners = dict(zip(many, sentence_of(texts(*many)), strict=True))
    whole = [owners[t] for t in ("a very good film", "not a good film at all", "very film", "od fi")]
    assert all(len(w) == 1 for w in whole)
    assert len({*whole}) == 4
    assert set(owners["good film"]) == set(owners["good"]) == {*whole[0], *whole[1]}


def holds(sentence: str, fragment: str) -> bool:
    return f" {' '.join(fragment.lower().split())} " in f" {' '.join(sentence.lower().split())} "


words = st.lists(st.sampled_from(["a", "b", "c", "B ", "d"]), min_size=1, max_size=6).map(" ".join)


@given(st.lists(words, min_size=1, max_size=20))
@hypothesis_settings(max_examples=50)
def test_owners_are_the_whole_sentences_that_hold_a_text(many: list[str]) -> None:
    owners = sentence_of(texts(*many))
    owner_of = dict(zip(many, owners, strict=True))
    whole = {o[0] for o in owners if len(o) == 1}
    for text, mine in zip(many, owners, strict=True):
        longer = [t for t in many if holds(t, text) and not holds(text, t)]
        if not longer:
            assert len(mine) == 1
        # Exactly the owners of the maximal texts around it.
        maximal = [t for t in longer if not any(holds(u, t) and not holds(t, u) for u in many)]
        expected = {owner_of[t][0] for t in maximal} or {mine[0]}
        assert set(mine) == expected
        assert set(mine) <= whole


@given(st.lists(words, min_size=1, max_size=15), st.integers(0, 99))
@hypothesis_settings(max_examples=25)
def test_owners_do_not_depend_on_the_order_of_rows(many: list[str], seed: int) -> None:
    before = dict(zip(many, sentence_of(texts(*many)), strict=True))
    shuffled = [many[i] for i in np.random.default_rng(seed).permutation(len(many))]
    assert dict(zip(shuffled, sentence_of(texts(*shuffled)), strict=True)) == before


@given(st.lists(words, min_size=8, max_size=40), st.integers(0, 3), st.integers(0, 3), st.integers(0, 1000))
@hypothesis_settings(max_examples=80)
def test_no_fragment_of_a_held_out_sentence_trains_unless_a_training_sentence_holds_it(
    many: list[str], calibration: int, validation: int, seed: int
) -> None:
    examples = texts(*many)
    try:
        parts = split(
            Table("f", tuple(examples)), calibration=calibration, validation=validation, seed=seed, grouping=sentence_of
        )
    except DataError:
        return  # too few different texts, or a class would be gone
    held = [e.text for e in (*parts.validation, *parts.calibration)]
    assert (len(parts.calibration), len(parts.validation)) == (calibration, validation)
    # Each held-out text is a whole sentence, and once.
    for text in held:
        assert not any(holds(t, text) and not holds(text, t) for t in many)
    assert len({" ".join(t.lower().split()) for t in held}) == len(held)
    trained = [e.text for e in parts.train]
    whole = [t for t in trained if not any(holds(u, t) and not holds(t, u) for u in many)]
    for text in trained:
        assert not any(holds(text, h) for h in held)
        assert any(holds(t, text) for t in whole)
    # And nothing more is lost than that: what a training sentence holds does train.
    for example in examples:
        if any(holds(t, example.text) for t in whole):
            assert example in parts.train


def numbered(count: int, copies: int = 1) -> Table:
    return Table("f.csv", tuple(Example(f"text {i // copies}", None, str(i % 3), i + 2) for i in range(count)))


def split_rows(parts: Splits) -> list[set[int]]:
    return [{e.row for e in part} for part in (parts.train, parts.validation, parts.calibration)]


@given(st.integers(20, 80), st.integers(0, 5), st.integers(0, 5), st.integers(0, 99), st.integers(1, 2))
@hypothesis_settings(max_examples=50)
def test_splits_have_their_sizes_and_never_share_a_text(
    count: int, calibration: int, validation: int, seed: int, copies: int
) -> None:
    table = numbered(count, copies)
    parts = split(table, calibration=calibration, validation=validation, seed=seed)
    train, held_validation, held_calibration = split_rows(parts)
    assert (len(held_calibration), len(held_validation)) == (calibration, validation)
    text_sets = [{e.text for e in part} for part in (parts.train, parts.validation, parts.calibration)]
    assert sum(map(len, text_sets)) == len(set.union(*text_sets))
    # A copy of a held-out text is in no part at all; every other row trains.
    held_texts = text_sets[1] | text_sets[2]
    assert train == {e.row for e in table.examples if e.text not in held_texts}
    assert parts.labels == ("0", "1", "2")


def test_splits_follow_the_seed() -> None:
    first, again, other = (split(numbered(60), calibration=9, validation=7, seed=s) for s in (1, 1, 2))
    assert first == again
    assert split_rows(first) != split_rows(other)


def test_held_out_rows_come_in_random_order() -> None:
    held = [e.row for e in split(numbered(200), calibration=60, validation=20, seed=0).calibration]
    assert held != sorted(held)


@pytest.mark.parametrize(
    ("table", "calibration", "validation", "message"),
    [
        (numbered(20), 8, 3, "20 rows are too few to hold out 8 for calibration and 3 for validation"),
        (numbered(20, copies=10), 2, 1, "20 rows hold 2 different texts, too few to hold out 2"),
        (numbered(20), -1, 3, "must be at least 0 rows, not -1"),
        (Table("f.csv", tuple(examples_of("a", "a", "a"))), 1, 0, "all 3 rows have the label 'a'"),
    ],
)
def test_too_little_data_is_refused(table: Table, calibration: int, validation: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        split(table, calibration=calibration, validation=validation, seed=0)


def test_a_class_that_would_be_held_out_whole_is_refused() -> None:
    rare = Table("f.csv", (*numbered(40).examples, Example("alone", None, "rare", 99)))
    # Fifteen of 41 texts are held out: one of thirty seeds hits the only rare one, and one does not.
    refusals = []
    for seed in range(30):
        try:
            parts = split(rare, calibration=10, validation=5, seed=seed)
        except DataError as error:
            refusals.append(str(error))
        else:
            assert "rare" in {e.label for e in parts.train}
    assert 0 < len(refusals) < 30
    assert set(refusals) == {"f.csv: label 'rare' has too few rows to be held out from training"}


# Subsets.


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.integers(0, 60), st.integers(0, 50))
def test_a_subset_keeps_every_class_in_its_share(labels: list[str], size: int, seed: int) -> None:
    examples = examples_of(*labels)
    chosen = subset(examples, size, seed)
    assert len(chosen) == min(size, len(examples))
    assert len({e.row for e in chosen}) == len(chosen)
    assert set(chosen) <= set(examples)
    have, want = Counter(e.label for e in chosen), Counter(labels)
    for label, count in want.items():
        assert abs(have[label] - len(chosen) * count / len(examples)) < 1


def test_a_subset_follows_its_seed_and_is_shuffled() -> None:
    examples = examples_of(*("ab" * 100))
    assert subset(examples, 50, 3) == subset(examples, 50, 3)
    assert {e.row for e in subset(examples, 50, 3)} != {e.row for e in subset(examples, 50, 4)}
    drawn = [e.label for e in subset(examples, 50, 3)]
    assert drawn != sorted(drawn)
    assert [e.row for e in subset(examples, 50, 3)] != sorted(e.row for e in subset(examples, 50, 3))


# Batches.


def tokenized(lengths: Sequence[int]) -> Tokenized:
    made = tuple(Encoded(list(range(1, n + 1)), [0] * (n - 1) + [1], n) for n in lengths)
    return Tokenized(made, np.arange(len(lengths)) % 3)


@given(
    st.lists(st.integers(1, 20), min_size=2, max_size=120),
    st.integers(2, 9),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(1, 4),
)
def test_every_row_is_in_exactly_one_batch_and_no_batch_is_one_row(
    lengths: list[int], batch_size: int, seed: int, epoch: int, window: int
) -> None:
    data = tokenized(lengths)
    batches = length_grouped(data, batch_size, seed=seed, epoch=epoch, window=window)
    assert sorted(r for b in batches for r in b) == list(range(len(lengths)))
    assert all(2 <= len(b) <= batch_size + 1 for b in batches)
    assert sum(len(b) > batch_size for b in batches) <= 1
    assert batches == length_grouped(data, batch_size, seed=seed, epoch=epoch, window=window)


@given(st.integers(2, 100), st.integers(2, 9))
@hypothesis_settings(max_examples=30)
def test_every_epoch_has_the_same_number_of_batches(count: int, batch_size: int) -> None:
    data = tokenized([1 + i % 7 for i in range(count)])
    assert len({len(length_grouped(data, batch_size, seed=s, epoch=e)) for s in range(3) for e in range(3)}) == 1


def test_epochs_and_seeds_shuffle_anew() -> None:
    data = tokenized([1 + i % 11 for i in range(64)])
    orders = [length_grouped(data, 8, seed=s, epoch=e) for s, e in ((0, 0), (0, 1), (1, 0), (1, 1))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_batches_hold_like_lengths_but_come_in_mixed_order() -> None:
    rng = np.random.default_rng(0)
    data = tokenized(rng.integers(1, 100, size=800).tolist())
    batches = length_grouped(data, 16, seed=0, epoch=0)
    padded = sum(len(b) * max(len(data.texts[r]) for r in b) for b in batches)
    assert padded < 1.1 * sum(map(len, data.texts))
    longest = [max(len(data.texts[r]) for r in b) for b in batches]
    assert longest != sorted(longest)


def test_a_single_row_is_a_batch_of_its_own() -> None:
    assert length_grouped(tokenized([5]), 4, seed=0, epoch=0) == [[0]]


def test_collate_pads_on_the_right_to_the_longest_of_its_rows() -> None:
    batch = collate(tokenized([2, 9, 4, 1]), [2, 0, 3])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [1, 2, 0, 0], [1, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch.token_type_ids.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 0, 0]]
    assert batch.labels.tolist() == [2, 0, 0]


def test_tokenize_gives_ids_and_class_indices() -> None:
    encoder = TextEncoder(tiny_tokenizer("bert"), 8)
    data = tokenize([Example("w1 w2", None, "b", 2), Example("w1", "w2", "a", 3)], ("a", "b"), encoder)
    assert [t.ids for t in data.texts] == [[2, 5, 6, 3], [2, 5, 3, 6, 3]]
    assert data.texts[1].type_ids == [0, 0, 0, 1, 1]
    assert data.labels.tolist() == [1, 0]
