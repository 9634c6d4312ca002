"""A CSV file to a classifier, with plain Trainer.

    python examples/classify_csv.py reviews.csv --text review --label stars

The two columns may have any name, and the labels may be words or numbers. A tenth of the rows
chooses the best epoch, another tenth is the test.
"""

import argparse

import pandas
import torch
from datasets import Dataset
from sklearn.metrics import accuracy_score, classification_report, f1_score
from sklearn.model_selection import train_test_split
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)


def read(parser, args):
    """(training, validation and test rows, names of the labels in order); each label has its share
    of each part."""
    rows = pandas.read_csv(args.csv, sep=args.separator, dtype=str)
    if missing := {args.text, args.label} - set(rows):
        parser.error(f"{args.csv} has no column {sorted(missing)[0]!r}; it has {', '.join(rows)}")
    rows = rows[[args.text, args.label]].set_axis(["text", "label"], axis=1).dropna()
    counts = rows["label"].value_counts()
    if len(counts) < 2 or counts.min() < 10:
        parser.error(
            f"two labels of 10 rows each are needed at least; {args.csv} has {counts.to_dict()}"
        )
    try:
        names = sorted(counts.index, key=float)  # 1 to 10, and not 1, 10, 2
    except ValueError:
        names = sorted(counts.index)
    rows["label"] = rows["label"].map(names.index)
    train, rest = train_test_split(
        rows, test_size=0.2, stratify=rows["label"], random_state=args.seed
    )
    return (
        train,
        *train_test_split(rest, test_size=0.5, stratify=rest["label"], random_state=args.seed),
    ), names


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv")
    parser.add_argument("--model", default="chandar-lab/NeoBERT")
    defaults = {
        "text": "text",
        "label": "label",
        "separator": ",",
        "output": "runs/classify_csv",
        "length": 512,
    }
    for name, default in {
        **defaults,
        "epochs": 3.0,
        "learning-rate": 2e-5,
        "batch": 16,
        "seed": 0,
    }.items():
        parser.add_argument(f"--{name}", default=default, type=type(default))
    args = parser.parse_args(argv)
    parts, names = read(parser, args)

    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
    labels = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }
    loading = {"trust_remote_code": True, "dtype": torch.float32}
    model = AutoModelForSequenceClassification.from_pretrained(args.model, **labels, **loading)

    def encode(rows):
        return tokenizer(rows["text"], truncation=True, max_length=args.length)

    def metrics(output):
        found = output.predictions.argmax(-1)
        return {
            "accuracy": accuracy_score(output.label_ids, found),
            "f1": f1_score(output.label_ids, found, average="macro"),
            "distance": float(
                abs(found - output.label_ids).mean()
            ),  # for ratings: how many steps off
        }

    train, validation, test = (
        Dataset.from_pandas(part, preserve_index=False).map(encode, batched=True) for part in parts
    )
    settings = {
        "num_train_epochs": args.epochs,
        "learning_rate": args.learning_rate,
        "per_device_train_batch_size": args.batch,
    }
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "f1",
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
    }
    settings = TrainingArguments(
        args.output, save_total_limit=1, seed=args.seed, report_to="none", **settings, **best
    )
    data = {"train_dataset": train, "eval_dataset": validation}
    trainer = Trainer(model, settings, processing_class=tokenizer, compute_metrics=metrics, **data)
    trainer.train()
    trainer.save_model(args.output)
    outcome = trainer.predict(test)
    print(
        classification_report(
            outcome.label_ids, outcome.predictions.argmax(-1), target_names=names, zero_division=0
        )
    )
    print(
        f"saved; load it: pipeline('text-classification', {args.output!r}, trust_remote_code=True)"
    )
    return outcome.metrics


if __name__ == "__main__":
    main()
