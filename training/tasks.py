"""The seven classification tasks of GLUE (Wang et al. 2019), read from a folder in GLUE's own layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.data import Grouping, Table, read_table, rename_labels, same_first_text, same_text, sentence_of


@dataclass(frozen=True, slots=True)
class Task:
    """A known data set: its files and columns, the metric, and what its labels mean, in class order.

    ``header`` names the columns of files that have no header row. ``drops_broken_rows``: GLUE's own files have some.
    ``calibration`` and ``validation`` are held out of the training file, counted in texts.
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
