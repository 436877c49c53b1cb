"""Labelled texts: reading them, splitting them without leaks, batching them by length."""

import csv
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.tokenization import Encoded, TextEncoder


class DataError(Exception):
    """Data that cannot be used; the message names the file, and the row or column."""


@dataclass(frozen=True, slots=True)
class Example:
    """One text (or pair) with its label's name; ``row`` is its place in the source file.

    Rows are numbered as a spreadsheet does: the header is row 1, blank lines count, and a CSV record with line breaks
    inside quotes is one row. In JSON Lines a row is a line.
    """

    text: str
    pair: str | None
    label: str
    row: int


@dataclass(frozen=True, slots=True)
class Table:
    """All examples of one file, in file order."""

    source: str
    examples: tuple[Example, ...]

    def __len__(self) -> int:
        return len(self.examples)


@dataclass(frozen=True, slots=True)
class Splits:
    """Disjoint parts: ``train`` fits weights, ``validation`` picks the model, temperatures and criterion,
    ``calibration`` certifies; beyond that it only picks the precision served by default. ``labels`` in class order."""

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    calibration: tuple[Example, ...]
    labels: tuple[str, ...]


# A field of more than this many characters is a broken file (an unclosed quote), not a text.
MAX_FIELD_CHARACTERS = 10_000_000
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_table(
    path: str | Path,
    text_column: str = "text",
    label_column: str = "label",
    pair_column: str | None = None,
    *,
    header: Sequence[str] | None = None,
    drop_broken: bool = False,
) -> Table:
    """Reads .csv, .tsv (GLUE's layout: quotes are literal) or .jsonl with named columns.

    ``header`` names the columns of a .csv or .tsv that has no header row. ``drop_broken`` leaves out its rows of too
    few or too many cells, or with an empty text or label, which are an error otherwise.

    Labels become their text, without outer spaces; JSON's numbers and booleans become what JSON writes (``1``, ``1.0``,
    ``true``). Raises :class:`DataError` naming the file and the row for a missing column, an empty file, text that is
    empty or not a string, a missing label, bad encoding.
    """
    path = Path(path)
    columns = [c for c in (text_column, pair_column, label_column) if c is not None]
    twice = [c for c, times in Counter(columns).items() if times > 1]
    if twice:
        raise DataError(f"{path}: column {twice[0]!r} cannot be two of text, pair and label")
    examples: list[Example] = []
    for row, record in _records(path, columns, header, drop_broken=drop_broken):
        text, label = record[text_column], record[label_column]
        pair = record[pair_column] if pair_column is not None else None
        if drop_broken and not all(v is None or str(v).strip() for v in (text, pair, label)):
            continue
        for name, value in ((text_column, text), (pair_column, pair)):
            if name is not None and (not isinstance(value, str) or not value.strip()):
                kind = "is empty" if value is None or isinstance(value, str) else "is not a string"
                raise DataError(f"{path}, row {row}: column {name!r} {kind}")
        if isinstance(label, bool):
            label = str(label).lower()
        if label is None or (isinstance(label, float) and not math.isfinite(label)) or not str(label).strip():
            raise DataError(f"{path}, row {row}: column {label_column!r} has no label")
        if not isinstance(label, str | int | float):
            raise DataError(f"{path}, row {row}: column {label_column!r} is not a string, a number, true or false")
        assert isinstance(text, str)
        assert pair is None or isinstance(pair, str)
        label = str(label).strip()
        for name, value in ((text_column, text), (pair_column, pair), (label_column, label)):
            # JSON can write half of a surrogate pair, which no tokenizer takes and no file can hold.
            if value is not None and _SURROGATE.search(value):
                raise DataError(f"{path}, row {row}: column {name!r} has a lone surrogate, which is not text")
        examples.append(Example(text, pair, label, row))
    if not examples:
        raise DataError(f"{path}: no rows")
    return Table(str(path), tuple(examples))


def _records(
    path: Path, columns: Sequence[str], header: Sequence[str] | None, *, drop_broken: bool
) -> Iterator[tuple[int, dict[str, object]]]:
    kind = path.suffix.lower()
    if kind not in (".csv", ".tsv", ".jsonl"):
        raise DataError(f"{path}: the name must end in .csv, .tsv or .jsonl")
    try:
        # utf-8-sig: spreadsheets (and GLUE's MRPC) begin with a byte-order mark.
        with path.open(encoding="utf-8-sig", newline="") as stream:
            yield from (
                _json_records(path, stream, columns)
                if kind == ".jsonl"
                else _csv_records(path, stream, columns, header, tabs=kind == ".tsv", drop_broken=drop_broken)
            )
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(f"{path}, line {_bad_line(path)}: not UTF-8 (byte 0x{byte:02x}: {error.reason})") from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def _bad_line(path: Path) -> int:
    """The first line that is not UTF-8. The text stream can't tell: it decodes ahead, in blocks."""
    lines = path.read_bytes().splitlines(keepends=True)
    return next(number for number, line in enumerate(lines, start=1) if not _decodes(line))


def _decodes(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _json_records(path: Path, lines: Iterable[str], columns: Sequence[str]) -> Iterator[tuple[int, dict[str, object]]]:
    for row, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits, too
            raise DataError(f"{path}, row {row}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}, row {row}: not a JSON object")
        for column in columns:
            if column not in record:
                raise DataError(f"{path}, row {row}: no column {column!r}; it has {', '.join(map(repr, record))}")
        yield row, record


def _csv_records(
    path: Path,
    lines: Iterable[str],
    columns: Sequence[str],
    header: Sequence[str] | None,
    *,
    tabs: bool,
    drop_broken: bool,
) -> Iterator[tuple[int, dict[str, object]]]:
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    reader = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE) if tabs else csv.reader(lines, strict=True)
    row = 0
    try:
        if header is None:
            header = next(reader, None)
            if header is None:
                raise DataError(f"{path}: the file is empty")
            row = 1
            if not header:
                raise DataError(f"{path}, row 1: is blank, but must name the columns")
        for column in columns:
            if column not in header:
                raise DataError(f"{path}, row 1: no column {column!r}; it has {', '.join(map(repr, header))}")
            if header.count(column) > 1:
                raise DataError(f"{path}, row 1: {header.count(column)} columns are called {column!r}")
        first = row + 1
        for row, cells in enumerate(reader, start=first):
            if not cells:
                continue
            if len(cells) != len(header):
                if drop_broken:
                    continue
                raise DataError(f"{path}, row {row}: {len(cells)} cells where the header has {len(header)}")
            yield row, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, row {row + 1}: {error}") from None


def label_names(examples: Sequence[Example], source: str) -> tuple[str, ...]:
    """Classes in order: by number where every label is one, else alphabetically. One class alone is an error."""
    names = {e.label for e in examples}
    if len(names) < 2:
        raise DataError(f"{source}: all {len(examples)} rows have the label {next(iter(names))!r}; two are needed")
    numeric = all(re.fullmatch(r"-?\d{1,18}", n) for n in names)
    return tuple(sorted(names, key=lambda n: (int(n), n) if numeric else (0, n)))


def check_labels(examples: Sequence[Example], labels: Sequence[str], source: str) -> None:
    """Raises :class:`DataError` naming the first row whose label training did not see."""
    known = set(labels)
    for example in examples:
        if example.label not in known:
            raise DataError(f"{source}, row {example.row}: label {example.label!r} is not among the training labels")


def rename_labels(table: Table, names: Mapping[str, str]) -> Table:
    """``table`` with each label as ``names`` has it; raises :class:`DataError` naming the first row with another."""
    check_labels(table.examples, tuple(names), table.source)
    return Table(table.source, tuple(replace(e, label=names[e.label]) for e in table.examples))


Grouping = Callable[[Sequence[Example]], list[tuple[int, ...]]]


def same_text(examples: Sequence[Example]) -> list[tuple[int, ...]]:
    """Groups texts that are the same but for case and spaces: one of them must not certify what the other trained.

    Returns for each example the owners (ids of groups) that it belongs to; here always exactly one.
    """
    ids: dict[tuple[str, ...], int] = {}
    keys = [tuple(" ".join(part.lower().split()) for part in (e.text, e.pair or "")) for e in examples]
    return [(ids.setdefault(key, len(ids)),) for key in keys]


def same_first_text(examples: Sequence[Example]) -> list[tuple[int, ...]]:
    """Groups pairs by their first text alone: a premise or question that stands in many of them."""
    return same_text([replace(e, pair=None) for e in examples])


def sentence_of(examples: Sequence[Example]) -> list[tuple[int, ...]]:
    """Groups for SST-2, whose training rows are mostly fragments of one another: the whole sentences that hold a text.

    A whole sentence is a row that lies in no other row; it owns itself. A fragment is owned by every whole sentence
    that holds it as a run of words. Owners are numbers of whole sentences, which do not depend on the rows' order.
    """
    words = [tuple(e.text.lower().split()) for e in examples]
    # A word at a time: only sentences that hold a fragment's rarest word can hold the fragment.
    holding: dict[str, list[int]] = defaultdict(list)
    sentences: list[str] = []
    owner_of: dict[tuple[str, ...], tuple[int, ...]] = {}
    for text in sorted(set(words), key=lambda w: (-len(w), w)):
        joined = " " + " ".join(text) + " "
        rarest = min((holding[w] for w in text), key=len, default=[])
        owners = tuple(i for i in rarest if joined in sentences[i])
        if not owners:
            owners = (len(sentences),)
            sentences.append(joined)
            for word in set(text):
                holding[word].append(owners[0])
        owner_of[text] = owners
    return [owner_of[w] for w in words]


def split(
    table: Table,
    *,
    calibration: int,
    validation: int,
    seed: int,
    grouping: Grouping = same_text,
    labels: Sequence[str] | None = None,
) -> Splits:
    """Carves ``calibration`` and ``validation`` examples out of ``table``, whole groups at a time.

    Owners (see :func:`sentence_of`) are drawn at random. A text owned by any sentence left to training trains; one
    owned only by held-out sentences is kept from training, and stands in the split itself only if it is its own owner's
    first (longest) row, so that each held-out sentence counts once. ``labels`` are the classes in order where they are
    known, rows of each or not. Raises :class:`DataError` where training keeps too little.
    """
    examples = table.examples
    found = label_names(examples, table.source)
    if min(calibration, validation) < 0:
        raise DataError(f"calibration and validation must be at least 0 rows, not {min(calibration, validation)}")
    if calibration + validation > len(examples) // 2:
        raise DataError(
            f"{table.source}: {len(examples)} rows are too few to hold out {calibration} for calibration and "
            f"{validation} for validation; at most half may be held out"
        )
    owners = grouping(examples)
    longest: dict[int, int] = {}
    for index, mine in enumerate(owners):
        if len(mine) == 1:
            best = longest.get(mine[0])
            if best is None or len(examples[index].text.split()) > len(examples[best].text.split()):
                longest[mine[0]] = index
    if calibration + validation > len(longest):
        raise DataError(
            f"{table.source}: {len(examples)} rows hold {len(longest)} different texts, too few to hold out "
            f"{calibration} for calibration and {validation} for validation"
        )
    order = np.random.default_rng(seed).permutation(sorted(longest))
    held_calibration = order[:calibration].tolist()
    held_validation = order[calibration : calibration + validation].tolist()
    held = {*held_calibration, *held_validation}
    train = [e for e, mine in zip(examples, owners, strict=True) if not held.issuperset(mine)]
    # In the order drawn: whoever halves a split must not find it sorted by length.
    parts = [tuple(examples[longest[o]] for o in chosen) for chosen in (held_validation, held_calibration)]
    missing = set(found) - {e.label for e in train}
    if labels is None and missing:
        raise DataError(f"{table.source}: label {min(missing)!r} has too few rows to be held out from training")
    return Splits(tuple(train), parts[0], parts[1], found if labels is None else tuple(labels))


def subset(examples: Sequence[Example], size: int, seed: int) -> tuple[Example, ...]:
    """``size`` examples drawn without replacement, each class in its share (largest remainders), in random order."""
    if size >= len(examples):
        return tuple(examples)
    rng = np.random.default_rng(seed)
    by_label: dict[str, list[int]] = defaultdict(list)
    for index in rng.permutation(len(examples)).tolist():
        by_label[examples[index].label].append(index)
    quota = {label: size * len(rows) / len(examples) for label, rows in by_label.items()}
    take = Counter({label: int(q) for label, q in quota.items()})
    for label in sorted(quota, key=lambda name: (take[name] - quota[name], name))[: size - take.total()]:
        take[label] += 1
    chosen = [i for label in sorted(by_label) for i in by_label[label][: take[label]]]
    return tuple(examples[i] for i in rng.permutation(chosen).tolist())


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Encoded texts with their class indices, ``[N]`` each."""

    texts: tuple[Encoded, ...]
    labels: np.ndarray = field(repr=False)

    def __len__(self) -> int:
        return len(self.texts)


def tokenize(examples: Sequence[Example], labels: Sequence[str], encoder: TextEncoder) -> Tokenized:
    """Encodes ``examples``, whose labels must be among ``labels``."""
    index = {name: i for i, name in enumerate(labels)}
    texts = tuple(encoder.encode(e.text, e.pair) for e in examples)
    return Tokenized(texts, np.asarray([index[e.label] for e in examples], dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded on the right: ``input_ids``, ``attention_mask``, ``token_type_ids`` ``[B, S]``, ``labels [B]``."""

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor
    labels: Tensor


def collate(data: Tokenized, rows: Sequence[int]) -> Batch:
    """Pads the texts at ``rows`` to the longest of them."""
    width = max(len(data.texts[r]) for r in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    mask, types = np.zeros_like(ids), np.zeros_like(ids)
    for at, r in enumerate(rows):
        text = data.texts[r]
        ids[at, : len(text)] = text.ids
        types[at, : len(text)] = text.type_ids
        mask[at, : len(text)] = 1
    arrays = (torch.from_numpy(a) for a in (ids, mask, types, data.labels[list(rows)]))
    return Batch(*arrays)


def length_grouped(data: Tokenized, batch_size: int, *, seed: int, epoch: int, window: int = 50) -> list[list[int]]:
    """Rows of every batch of one epoch, in order: shuffled, then sorted by length within windows of ``window`` batches.

    The same ``seed`` and ``epoch`` give the same batches, which is what makes a resumed run end where an unbroken one
    would. A last batch of fewer than two rows joins the one before it: a contrast needs company.
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(data))
    batches: list[list[int]] = []
    for start in range(0, len(order), window * batch_size):
        chunk = sorted(order[start : start + window * batch_size].tolist(), key=lambda r: len(data.texts[r]))
        batches += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    if len(batches) > 1:
        short = min(range(len(batches)), key=lambda i: len(batches[i]))
        if len(batches[short]) < 2:
            rest = batches.pop(short)
            batches[min(short, len(batches) - 1)] += rest
    return [batches[i] for i in rng.permutation(len(batches)).tolist()]
