"""The seven classification tasks of GLUE (Wang et al. 2019), from a folder in GLUE's own layout or from the hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.data import (
    DataError,
    Example,
    Grouping,
    Table,
    check_labels,
    read_table,
    rename_labels,
    same_first_text,
    same_text,
    sentence_of,
)


@dataclass(frozen=True, slots=True)
class Task:
    """A known data set: its files and columns, the metric, and what its labels mean, in class order.

    ``header`` names the columns of files that have no header row. ``drops_broken_rows``: GLUE's own files have some.
    ``calibration`` and ``validation`` are held out of the training file, counted in texts. ``hub_columns`` are those of
    the texts in the hub's data set, where they have other names there.
    """

    name: str
    text_column: str
    label_column: str
    labels: Mapping[str, str]
    calibration: int
    validation: int
    source: str
    pair_column: str | None = None
    metric: str = "accuracy"
    grouping: Grouping = same_text
    train_file: str = "train.tsv"
    eval_files: tuple[str, ...] = ("dev.tsv",)
    header: tuple[str, ...] | None = None
    drops_broken_rows: bool = False
    hub_columns: tuple[str, ...] | None = None

    def read(self, folder: Path, file: str) -> Table:
        """The labelled rows of ``file`` in ``folder``; raises :class:`training.data.DataError` naming file and row."""
        table = read_table(
            folder / file,
            self.text_column,
            self.label_column,
            self.pair_column,
            header=self.header,
            drop_broken=self.drops_broken_rows,
        )
        return rename_labels(table, self.labels)

    def read_hub(self, repository: str, split: str) -> Table:
        """The rows of ``split`` in a data set laid out as ``nyu-mll/glue``: a hub name, or a folder that holds one.

        Raises :class:`training.data.DataError` where the package ``datasets`` is missing, the data set can't be had, or
        a label is none of the task's.
        """
        try:
            import datasets
        except ModuleNotFoundError:
            raise DataError(f"{repository}: reading from the hub needs the package datasets: pip install it") from None
        datasets.disable_progress_bars()
        try:
            rows = datasets.load_dataset(repository, self.name, split=split)
            names = rows.features["label"].names
            columns = self.hub_columns or tuple(c for c in (self.text_column, self.pair_column) if c is not None)
            # As a spreadsheet counts: after a header.
            examples = tuple(
                Example(row[columns[0]], row[columns[1]] if columns[1:] else None, names[row["label"]], at)
                for at, row in enumerate(rows, start=2)
            )
        # What the hub's client and its readers raise shares no base.
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DataError(f"{repository}, {self.name}, {split}: could not be read ({reason})") from error
        table = Table(f"{repository}/{split}", examples)
        check_labels(examples, tuple(self.labels.values()), table.source)
        return table

    @property
    def hub_splits(self) -> tuple[str, ...]:
        """The hub's names of :attr:`eval_files`."""
        return tuple(file.removesuffix(".tsv").replace("dev", "validation") for file in self.eval_files)


_ENTAILMENT = {"not_entailment": "not_entailment", "entailment": "entailment"}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="cola",
            text_column="sentence",
            label_column="label",
            labels={"0": "unacceptable", "1": "acceptable"},
            metric="matthews",
            header=("source", "label", "mark", "sentence"),
            calibration=1500,
            validation=500,
            source="Corpus of Linguistic Acceptability (Warstadt et al. 2019), as in GLUE",
        ),
        Task(
            name="sst2",
            text_column="sentence",
            label_column="label",
            labels={"0": "negative", "1": "positive"},
            grouping=sentence_of,
            # Whole sentences: the fragments of a held-out sentence are kept from training, about seven each.
            calibration=1400,
            validation=500,
            source="Stanford Sentiment Treebank (Socher et al. 2013), as in GLUE",
        ),
        Task(
            name="mrpc",
            text_column="#1 String",
            pair_column="#2 String",
            label_column="Quality",
            hub_columns=("sentence1", "sentence2"),
            labels={"0": "not_equivalent", "1": "equivalent"},
            metric="f1",
            calibration=700,
            validation=300,
            source="Microsoft Research Paraphrase Corpus (Dolan and Brockett 2005), as in GLUE",
        ),
        Task(
            name="qqp",
            text_column="question1",
            pair_column="question2",
            label_column="is_duplicate",
            labels={"0": "not_duplicate", "1": "duplicate"},
            metric="f1",
            drops_broken_rows=True,
            calibration=4000,
            validation=2000,
            source="Quora Question Pairs, as in GLUE",
        ),
        Task(
            name="mnli",
            text_column="sentence1",
            pair_column="sentence2",
            label_column="gold_label",
            hub_columns=("premise", "hypothesis"),
            labels={name: name for name in ("entailment", "neutral", "contradiction")},
            eval_files=("dev_matched.tsv", "dev_mismatched.tsv"),
            # About three hypotheses a premise; a premise is held out with all of them.
            grouping=same_first_text,
            calibration=4000,
            validation=2000,
            source="MultiNLI (Williams et al. 2018), as in GLUE",
        ),
        Task(
            name="qnli",
            text_column="question",
            pair_column="sentence",
            label_column="label",
            labels=_ENTAILMENT,
            grouping=same_first_text,
            calibration=4000,
            validation=2000,
            source="Question NLI from SQuAD (Rajpurkar et al. 2016), as in GLUE",
        ),
        Task(
            name="rte",
            text_column="sentence1",
            pair_column="sentence2",
            label_column="label",
            labels=_ENTAILMENT,
            grouping=same_first_text,
            calibration=500,
            validation=250,
            source="Recognizing Textual Entailment 1, 2, 3 and 5 (Dagan et al. 2006 and others), as in GLUE",
        ),
    )
}
