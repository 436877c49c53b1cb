"""Exits for a classifier that exists already: its weights stay, and its own answers are what the exits learn.

Unlabelled texts are answered by the classifier once (``answers.jsonl`` in the run's folder). From there on a retrofit
is a run like any other, whose labels are those answers: every score is agreement with the classifier.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from models.bundle import Bundle
from models.tokenization import TextEncoder
from training.checkpoint import replace_text
from training.classifier import Classifier, load_classifier
from training.data import DataError, Tokenized
from training.parallel import launched_count
from training.pipeline import Observer, PipelineError, RunSettings, run
from training.trainer import exit_logits

ANSWERS = "answers.jsonl"
SILENT = Observer()


def retrofit(
    settings: RunSettings,
    texts: Path,
    folder: Path,
    *,
    pairs: bool = False,
    labels: Sequence[str] | None = None,
    resume: bool = False,
    observer: Observer = SILENT,
) -> Bundle:
    """Answers ``texts``, trains exits on the answers, exports and calibrates; the bundle is at ``folder/bundle``.

    ``settings.backbone`` names the classifier, ``settings.data`` only the sizes of the splits; ``labels`` are other
    names for its classes, in its order. Raises :class:`PipelineError` for names that do not fit the classifier, and
    what :func:`read_texts`, :func:`load_classifier` and :func:`training.pipeline.run` raise.
    """
    if launched_count() > 1:
        raise PipelineError("offramp retrofit runs in one process; start it without accelerate launch")
    classifier = load_classifier(settings.backbone)
    names = classifier.labels if labels is None else tuple(labels)
    if len(names) != len(classifier.labels) or len(set(names)) < len(names):
        raise PipelineError(
            f"labels must be {len(classifier.labels)} different names, one for each of "
            f"{', '.join(classifier.labels)}, not {', '.join(names)}"
        )
    answers = folder / ANSWERS
    if not (resume and answers.exists()):
        if (folder / "run.json").exists() and not resume:
            raise PipelineError(f"{folder}: holds a run already; go on with --resume, or choose another output")
        lines = list(read_texts(texts, pairs=pairs))
        observer.stage("answer", len(lines))
        chosen = answer(classifier, lines, settings.max_length)
        folder.mkdir(parents=True, exist_ok=True)
        rows = [_row(*line, names[k]) for line, k in zip(lines, chosen, strict=True)]
        replace_text(answers, "".join(rows))
    data = replace(
        settings.data,
        train_file=str(answers),
        pair_column="pair" if pairs else None,
        metric="agreement",
        labels=names,
        source=f"{texts.name}, answered by {settings.backbone}",
    )
    training = replace(settings.training, method="exits-only", metric="agreement")
    bundle = run(
        replace(settings, data=data, training=training, last_head="cls"), folder, resume=resume, observer=observer
    )
    assert bundle is not None
    return bundle


def read_texts(path: Path, *, pairs: bool) -> Iterator[tuple[str, str | None]]:
    """One text a line, blank lines left out; with ``pairs`` a tab separates the two texts of a line.

    Raises :class:`DataError` naming the file and the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    found = False
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number}: not UTF-8 ({error.reason})") from None
        if not text:
            continue
        found = True
        parts = [part.strip() for part in text.split("\t")] if pairs else [text]
        if len(parts) != 1 + pairs or not all(parts):
            raise DataError(f"{path}, line {number}: must be two texts with one tab between")
        yield parts[0], parts[1] if pairs else None
    if not found:
        raise DataError(f"{path}: no texts")


def answer(classifier: Classifier, lines: Sequence[tuple[str, str | None]], max_length: int) -> list[int]:
    """The class that the classifier gives each text."""
    network = classifier.alone(max_length)
    encoder = TextEncoder(Tokenizer.from_str(classifier.backbone.tokenizer_json), network.architecture.max_length)
    data = Tokenized(tuple(encoder.encode(*line) for line in lines), np.zeros(len(lines), dtype=np.int64))
    return exit_logits(network, data)[1].argmax(-1).tolist()


def _row(text: str, pair: str | None, label: str) -> str:
    row = {"text": text, **({} if pair is None else {"pair": pair}), "label": label}
    return json.dumps(row, ensure_ascii=False) + "\n"
