"""A classifier fine-tuned by transformers alone, as people have one in production: what `offramp retrofit` begins from.

    PYTHONPATH=. python benchmarks/plain_classifier.py train --task sst2 --data-dir SST-2 --examples 8000 \\
        --output runs/plain --texts runs/unlabelled.txt
    offramp retrofit runs/plain --texts runs/unlabelled.txt --output runs/retrofit
    PYTHONPATH=. python benchmarks/plain_classifier.py compare runs/plain runs/retrofit/bundle \\
        --file SST-2/dev.tsv --text-column sentence
    PYTHONPATH=. python benchmarks/plain_classifier.py cut --layers 3 --output runs/minilm-l3
    offramp train --backbone runs/minilm-l3 --method ce --head mean --exits 3 ...

``train`` knows nothing of exits: AutoModelForSequenceClassification and transformers' own Trainer. ``cut`` keeps the
first layers of an encoder, the rival that spends on every text what exits spend on the mean.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from models.bundle import Bundle
from models.network import backbone_source
from training.data import DataError, Example, read_table
from training.evaluate import run_bundle
from training.pipeline import DataSettings, PipelineError, prepare
from training.sweep import training_part


def train(arguments: argparse.Namespace) -> None:
    """Fine-tunes on the task's training part, saves the classifier, and writes texts without labels for a retrofit."""
    prepared = prepare(DataSettings(task=arguments.task, data_dir=arguments.data_dir), seed=0)
    labels = prepared.splits.labels
    part = training_part(prepared.splits.train, arguments.examples, arguments.seed)
    source = backbone_source(arguments.backbone)
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(arguments.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        source, num_labels=len(labels), id2label=dict(enumerate(labels)), label2id={n: i for i, n in enumerate(labels)}
    )

    def rows(examples: Sequence[Example]) -> list[dict[str, Any]]:
        encoded = [tokenizer(e.text, e.pair, truncation=True, max_length=arguments.max_length) for e in examples]
        return [{**row, "labels": labels.index(e.label)} for row, e in zip(encoded, examples, strict=True)]

    settings = TrainingArguments(
        output_dir=str(arguments.output / "trainer"),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=128,
        learning_rate=arguments.learning_rate,
        warmup_steps=0.06,
        weight_decay=0.01,
        train_sampling_strategy="group_by_length",
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_steps=50,
        seed=arguments.seed,
    )
    trainer = Trainer(
        model=model, args=settings, train_dataset=rows(part), data_collator=DataCollatorWithPadding(tokenizer)
    )
    trainer.train()
    found = trainer.predict(rows(prepared.evaluation))
    right = found.predictions.argmax(-1) == found.label_ids
    print(f"{len(part)} examples; accuracy on the evaluation file: {100 * right.mean():.1f} %, n = {len(right)}")
    trainer.save_model(str(arguments.output))
    tokenizer.save_pretrained(arguments.output)
    if arguments.texts is not None:
        # The classifier's own training texts are left out: it knows their answers by heart.
        known = {(e.text, e.pair) for e in part}
        others = tuple(e for e in prepared.splits.train if (e.text, e.pair) not in known)
        chosen = training_part(others, arguments.texts_count, arguments.seed)
        lines = ["\t".join(t for t in (e.text.strip(), e.pair) if t is not None) for e in chosen]
        arguments.texts.write_text("\n".join(lines) + "\n", encoding="utf-8")


def compare(arguments: argparse.Namespace) -> None:
    """The largest difference between the classifier's logits and those of a bundle's last exit."""
    table = read_table(arguments.file, arguments.text_column, arguments.label_column, arguments.pair_column)
    bundle = Bundle.load(arguments.bundle)
    model = AutoModelForSequenceClassification.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    with torch.inference_mode():
        reference = np.stack(
            [model(**tokenizer(e.text, e.pair, return_tensors="pt")).logits[0].numpy() for e in table.examples]
        )
    texts = [bundle.encoder.encode(e.text, e.pair) for e in table.examples]
    print(f"n = {len(texts)}, largest logit of the classifier {np.abs(reference).max():.2f}")
    for precision in bundle.manifest.precisions:
        ours = run_bundle(bundle, precision, texts)[-1]
        same = (ours.argmax(-1) == reference.argmax(-1)).mean()
        print(f"{precision}: largest difference {np.abs(ours - reference).max():.1e}, same answer {100 * same:.2f} %")


def cut(arguments: argparse.Namespace) -> None:
    """Saves the first layers of an encoder as an encoder of its own."""
    source = backbone_source(arguments.backbone)
    model = AutoModel.from_pretrained(source)
    if not 1 <= arguments.layers <= model.config.num_hidden_layers:
        sys.exit(f"--layers must lie between 1 and {model.config.num_hidden_layers}, not {arguments.layers}")
    AutoModel.from_pretrained(source, num_hidden_layers=arguments.layers).save_pretrained(arguments.output)
    AutoTokenizer.from_pretrained(source).save_pretrained(arguments.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train", help=train.__doc__)
    one.add_argument("--task", default="sst2")
    one.add_argument("--data-dir", required=True)
    one.add_argument("--examples", type=int, help="train on so many, drawn by the seed [default: all]")
    one.add_argument("--backbone", default="minilm-l6")
    one.add_argument("--epochs", type=int, default=2)
    one.add_argument("--batch-size", type=int, default=32)
    one.add_argument("--learning-rate", type=float, default=8e-5)
    one.add_argument("--max-length", type=int, default=128)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--threads", type=int)
    one.add_argument("--texts", type=Path, help="write texts without labels there, none of those trained on")
    one.add_argument("--texts-count", type=int, default=8000)
    one.add_argument("--output", type=Path, required=True)
    one.set_defaults(run=train)
    two = commands.add_parser("compare", help=compare.__doc__)
    two.add_argument("model")
    two.add_argument("bundle")
    two.add_argument("--file", required=True)
    two.add_argument("--text-column", default="text")
    two.add_argument("--pair-column")
    two.add_argument("--label-column", default="label")
    two.set_defaults(run=compare)
    three = commands.add_parser("cut", help=cut.__doc__)
    three.add_argument("--backbone", default="minilm-l6")
    three.add_argument("--layers", type=int, required=True)
    three.add_argument("--output", type=Path, required=True)
    three.set_defaults(run=cut)
    arguments = parser.parse_args()
    if getattr(arguments, "threads", None):
        torch.set_num_threads(arguments.threads)
    try:
        arguments.run(arguments)
    except (DataError, PipelineError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
