"""Fine-tune NeoBERT for named-entity recognition, and measure entity F1 with seqeval.

    python examples/named_entities.py --model examples/sentence-encoder --data tests/data/names

The folder of --data contains train.jsonl and test.jsonl with rows {"tokens": ["Ada", "Byron",
"wrote"], "tags": ["B-PER", "I-PER", "O"]}. The first token of a word carries the tag of the word.
`python examples/make_names.py` writes such a folder. The output folder contains the model,
README.md and metrics.json.
"""

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from seqeval.metrics import classification_report, f1_score
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

from neobert import default_learning_rate  # this import also registers NeoBERT in transformers
from neobert.common.environment import shorten_path
from neobert.common.errors import UserError
from neobert.common.folders import check_new, new_folder
from neobert.common.loading import check_model
from neobert.common.model_card import base_model_metadata, front_matter, license_metadata, read_card
from neobert.common.scripts import load_rows, run_script


Tags = list[list[str]]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="chandar-lab/NeoBERT", help="Folder or Hub name.")
    parser.add_argument("--data", required=True, help="Folder with train.jsonl and test.jsonl.")
    parser.add_argument("--output", default="runs/named_entities", help="New folder.")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch-size", "--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--learning-rate", type=float, help="Peak learning rate. (default: by the hidden size)"
    )
    return parser.parse_args(argv)


def load_sentences(path: str) -> list[dict[str, list[str]]]:
    """Return the rows of a file, with as many tags as words."""
    rows = load_rows(path, ["tokens", "tags"], texts=[])
    for number, row in enumerate(rows, start=1):
        are_lists = isinstance(row["tokens"], list) and isinstance(row["tags"], list)
        if not are_lists or len(row["tokens"]) != len(row["tags"]):
            raise UserError(
                f"{path}, row {number:,}: `tokens` and `tags` must be lists of the same length."
            )
    return rows


def most_frequent_tags(train_rows: list[dict], test_rows: list[dict]) -> Tags:
    """Predict the most frequent tag of every word in the training rows, "O" for unknown words."""
    counts = defaultdict(Counter)
    for row in train_rows:
        for word, tag in zip(row["tokens"], row["tags"], strict=True):
            counts[word][tag] += 1
    best = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}
    return [[best.get(word, "O") for word in row["tokens"]] for row in test_rows]


def f1_and_error(truth: Tags, predicted: Tags, samples: int = 100) -> tuple[float, float]:
    """Return entity F1 and its standard error, bootstrapped over sentences."""
    generator = np.random.default_rng(0)
    values = []
    for _ in range(samples):
        rows = generator.integers(len(truth), size=len(truth))
        sample = [truth[i] for i in rows], [predicted[i] for i in rows]
        values.append(f1_score(*sample, zero_division=0))
    return float(f1_score(truth, predicted, zero_division=0)), float(np.std(values, ddof=1))


def main(argv: list[str] | None = None) -> dict[str, float]:
    args = parse_args(argv)
    check_new(args.output)
    check_model(args.model)
    train_rows = load_sentences(f"{args.data}/train.jsonl")
    test_rows = load_sentences(f"{args.data}/test.jsonl")
    tag_names = sorted({tag for row in train_rows + test_rows for tag in row["tags"]})

    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForTokenClassification.from_pretrained(
        args.model,
        id2label=dict(enumerate(tag_names)),
        label2id={name: index for index, name in enumerate(tag_names)},
        dtype=torch.float32,
    )

    def encode(batch):
        encoded = tokenizer(
            batch["tokens"], is_split_into_words=True, truncation=True, max_length=512
        )
        labels = []
        for i, tags in enumerate(batch["tags"]):
            word_ids = encoded.word_ids(i)
            row = []
            for previous, word in zip([None, *word_ids], word_ids):
                # The loss ignores special tokens, and all but the first token of a word.
                is_first = word is not None and word != previous
                row.append(tag_names.index(tags[word]) if is_first else -100)
            labels.append(row)
        return {**encoded, "labels": labels}

    columns = ["tokens", "tags"]
    train_dataset = Dataset.from_list(train_rows).map(encode, batched=True, remove_columns=columns)
    test_dataset = Dataset.from_list(test_rows).map(encode, batched=True, remove_columns=columns)

    # Small encoders need a higher learning rate than the 2e-5 of BERT-sized models.
    learning_rate = args.learning_rate or default_learning_rate(model.config.hidden_size)
    print(f"learning rate: {learning_rate:.1e} (hidden size {model.config.hidden_size})")

    with new_folder(args.output) as folder:
        settings = TrainingArguments(
            output_dir=folder,
            num_train_epochs=args.epochs,
            learning_rate=learning_rate,
            warmup_steps=0.1,  # a fraction of the steps
            per_device_train_batch_size=args.batch_size,
            dataloader_pin_memory=torch.accelerator.is_available(),
            save_strategy="no",
            seed=args.seed,
            report_to="none",
        )
        trainer = Trainer(
            model=model,
            args=settings,
            processing_class=tokenizer,
            data_collator=DataCollatorForTokenClassification(tokenizer),
            train_dataset=train_dataset,
        )
        trainer.train()
        trainer.save_model(folder)

        # Words that a long sentence loses by truncation count as "O".
        output = trainer.predict(test_dataset)
        predicted = []
        for logits, labels, row in zip(output.predictions, output.label_ids, test_rows):
            tags = [tag_names[i] for i in logits.argmax(-1)[labels != -100]]
            predicted.append(tags + ["O"] * (len(row["tags"]) - len(tags)))

        truth = [row["tags"] for row in test_rows]
        f1, error = f1_and_error(truth, predicted)
        baseline, baseline_error = f1_and_error(truth, most_frequent_tags(train_rows, test_rows))
        metrics = {
            "f1": f1,
            "standard_error": error,
            "baseline_f1": baseline,
            "baseline_standard_error": baseline_error,
            "test_rows": len(test_rows),
            "learning_rate": learning_rate,
        }
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        write_card(folder, args, metrics)

    print(classification_report(truth, predicted, digits=3, zero_division=0))
    print(f"entity F1 {f1:.3f} ± {error:.3f} on {len(test_rows):,} test sentences")
    print(
        f"entity F1 {baseline:.3f} ± {baseline_error:.3f} with the most frequent tag of every word"
    )
    if all(tag == "O" for row in predicted for tag in row):
        print('warning: the model predicts "O" only. Change --learning-rate or --epochs.')
    if f1 <= baseline:
        print("warning: the model is not better than the baseline.")
    print(f"saved to {args.output}")
    return metrics


def write_card(folder: Path, args: argparse.Namespace, metrics: dict[str, float]) -> None:
    """Write README.md, the model card."""
    metadata = front_matter(
        **license_metadata(None, read_card(args.model)),
        **base_model_metadata(None, args.model),
        library_name="transformers",
        pipeline_tag="token-classification",
        tags=["neobert", "token-classification"],
    )
    text = (
        f"\n# {Path(args.output).name}\n\nA tagger of named entities, fine-tuned from "
        f"`{shorten_path(args.model)}` with `examples/named_entities.py`.\n\nEntity F1 on "
        f"{metrics['test_rows']:,} test sentences: {metrics['f1']:.3f} ± "
        f"{metrics['standard_error']:.3f}. The most frequent tag of every word has "
        f"{metrics['baseline_f1']:.3f} ± {metrics['baseline_standard_error']:.3f}.\n"
    )
    (folder / "README.md").write_text(metadata + text, encoding="utf-8")


if __name__ == "__main__":
    run_script(main)
