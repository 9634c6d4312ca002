"""Fine-tune NeoBERT as a classifier on a CSV file, and compare it with simple baselines.

    python examples/classify_csv.py reviews.csv --text review --label stars

The two columns may have any name. Labels may be words or numbers. Of the rows, 80 % are trained on,
10 % choose the best epoch and 10 % are the test set. Fine-tuning is worth its cost if it beats the
majority class, logistic regression on TF-IDF features, and logistic regression on the embeddings
of the model before fine-tuning. The output folder contains the model, README.md and metrics.json.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import pandas
import torch
from datasets import Dataset
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import classification_report, confusion_matrix, f1_score
from sklearn.model_selection import train_test_split
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    PreTrainedModel,
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
from neobert.common.scripts import run_script
from neobert.common.tables import markdown_table
from neobert.finetuning.baselines import fit_baselines, value_and_error


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", help="CSV file in UTF-8 with a header.")
    parser.add_argument("--text", default="text", help="Column of the texts.")
    parser.add_argument("--label", default="label", help="Column of the labels.")
    parser.add_argument("--separator", default=",", help="Separator of the columns.")
    parser.add_argument("--model", default="chandar-lab/NeoBERT", help="Folder or Hub name.")
    parser.add_argument("--output", default="runs/classify_csv", help="New folder.")
    parser.add_argument("--length", type=int, default=512, help="Maximum length in tokens.")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--batch-size", "--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--learning-rate", type=float, help="Peak learning rate. (default: by the hidden size)"
    )
    return parser.parse_args(argv)


def read_table(args: argparse.Namespace) -> pandas.DataFrame:
    """Return the rows with a text and a label, in columns "text" and "label"."""
    try:
        table = pandas.read_csv(args.csv, sep=args.separator, dtype=str)
    except FileNotFoundError:
        raise UserError(f"{args.csv} does not exist.") from None
    except pandas.errors.EmptyDataError:
        raise UserError(f"{args.csv} is empty. The first line must be a header.") from None
    except UnicodeDecodeError:
        raise UserError(
            f"{args.csv} must be encoded in UTF-8. Convert it, for example by: "
            f"iconv -f latin1 -t utf-8 {args.csv}"
        ) from None
    except pandas.errors.ParserError as error:
        raise UserError(f"{args.csv} is not a valid CSV file: {error}") from error

    for name in (args.text, args.label):
        if name not in table.columns:
            raise UserError(
                f"{args.csv} has no column {name!r}. Its columns are: {', '.join(table.columns)}. "
                "Pass --text and --label."
            )
    columns = {"text": table[args.text], "label": table[args.label]}
    return pandas.DataFrame(columns).dropna()


def ordered_labels(rows: pandas.DataFrame, args: argparse.Namespace) -> tuple[list[str], bool]:
    """Return the names of the labels, and whether they are numbers, which have an order."""
    counts = rows["label"].value_counts()
    if len(counts) < 2 or counts.min() < 10:
        rarest = f", of which {counts.index[-1]!r} is in {counts.min()} rows" if len(counts) else ""
        raise UserError(
            f"column {args.label!r} of {args.csv} must have at least two labels with 10 rows or "
            f"more each, got {len(counts):,} labels{rarest}."
        )
    try:
        return sorted(counts.index, key=float), True
    except ValueError:
        return sorted(counts.index), False


@torch.inference_mode()
def mean_embeddings(model: PreTrainedModel, dataset: Dataset) -> np.ndarray:
    """Return the mean of the last hidden states of every text, of shape (N, D)."""
    embeddings = []
    for input_ids in dataset["input_ids"]:
        batch = torch.tensor([input_ids], device=model.device)
        embeddings.append(model.base_model(batch).last_hidden_state[0].mean(0).cpu().numpy())
    return np.stack(embeddings)


def main(argv: list[str] | None = None) -> dict:
    args = parse_args(argv)
    check_new(args.output)
    check_model(args.model)
    rows = read_table(args)
    label_names, has_order = ordered_labels(rows, args)
    rows["label"] = rows["label"].map(label_names.index)
    train_rows, others = train_test_split(
        rows, test_size=0.2, stratify=rows["label"], random_state=args.seed
    )
    validation_rows, test_rows = train_test_split(
        others, test_size=0.5, stratify=others["label"], random_state=args.seed
    )
    test_labels = test_rows["label"].to_numpy()

    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model,
        id2label=dict(enumerate(label_names)),
        label2id={name: index for index, name in enumerate(label_names)},
        dtype=torch.float32,
    ).eval()

    def encode(part: pandas.DataFrame) -> Dataset:
        return Dataset.from_pandas(part, preserve_index=False).map(
            lambda batch: tokenizer(batch["text"], truncation=True, max_length=args.length),
            batched=True,
            remove_columns=["text"],
        )

    train_dataset = encode(train_rows)
    test_dataset = encode(test_rows)

    # All baselines are fitted on the training rows and measured on the test rows.
    accuracies = {}
    predictions = {}
    for baseline in fit_baselines(
        train_rows["text"].tolist(), train_rows["label"].tolist(), test_rows["text"].tolist()
    ):
        predictions[baseline.name] = baseline.predictions
    classifier = LogisticRegression(max_iter=1000)
    classifier.fit(mean_embeddings(model, train_dataset), train_rows["label"])
    predictions["embeddings + logistic regression"] = classifier.predict(
        mean_embeddings(model, test_dataset)
    )

    # Small encoders need a higher learning rate than the 2e-5 of BERT-sized models.
    learning_rate = args.learning_rate or default_learning_rate(model.config.hidden_size)
    print(f"learning rate: {learning_rate:.1e} (hidden size {model.config.hidden_size})")

    def compute_metrics(output) -> dict[str, float]:
        predicted = output.predictions.argmax(-1)
        return {"f1": f1_score(output.label_ids, predicted, average="macro", zero_division=0.0)}

    with new_folder(args.output) as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder / "checkpoints",
                num_train_epochs=args.epochs,
                learning_rate=learning_rate,
                warmup_steps=0.1,  # a fraction of the steps
                per_device_train_batch_size=args.batch_size,
                dataloader_pin_memory=torch.accelerator.is_available(),
                eval_strategy="epoch",
                save_strategy="epoch",
                save_total_limit=1,
                load_best_model_at_end=True,
                metric_for_best_model="f1",
                seed=args.seed,
                report_to="none",
            ),
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer),
            train_dataset=train_dataset,
            eval_dataset=encode(validation_rows),
            compute_metrics=compute_metrics,
        )
        trainer.train()
        trainer.save_model(folder)
        shutil.rmtree(folder / "checkpoints")

        predicted = trainer.predict(test_dataset).predictions.argmax(-1)
        predictions = {"fine-tuned": predicted, **predictions}
        for name, values in predictions.items():
            accuracies[name] = value_and_error("accuracy", test_labels, values)

        metrics = {
            "accuracy": accuracies["fine-tuned"][0],
            "standard_error": accuracies["fine-tuned"][1],
            "macro_f1": f1_score(test_labels, predicted, average="macro", zero_division=0.0),
            "baselines": {
                name: {"accuracy": value, "standard_error": error}
                for name, (value, error) in accuracies.items()
                if name != "fine-tuned"
            },
            "rows": {"train": len(train_rows), "test": len(test_rows)},
            "learning_rate": learning_rate,
        }
        if has_order:
            # Labels are ratings: the mean number of ratings between prediction and label.
            metrics["distance"] = float(np.abs(predicted - test_labels).mean())
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        write_card(folder, args, accuracies, len(test_rows))

    print_report(args, label_names, test_labels, predictions, accuracies)
    return metrics


def write_card(
    folder: Path, args: argparse.Namespace, accuracies: dict[str, tuple], test_rows: int
) -> None:
    """Write README.md, the model card."""
    metadata = front_matter(
        **license_metadata(None, read_card(args.model)),
        **base_model_metadata(None, args.model),
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["neobert", "text-classification"],
    )
    table = markdown_table(["model", "accuracy"], accuracy_rows(accuracies))
    text = (
        f"\n# {Path(args.output).name}\n\nA text classifier, fine-tuned from "
        f"`{shorten_path(args.model)}` with `examples/classify_csv.py`.\n\nAccuracy on "
        f"{test_rows:,} test rows, ± standard error:\n\n{table}"
    )
    (folder / "README.md").write_text(metadata + text, encoding="utf-8")


def accuracy_rows(accuracies: dict[str, tuple]) -> list[list[str]]:
    return [[name, f"{value:.3f} ± {error:.3f}"] for name, (value, error) in accuracies.items()]


def print_report(
    args: argparse.Namespace,
    label_names: list[str],
    test_labels: np.ndarray,
    predictions: dict[str, np.ndarray],
    accuracies: dict[str, tuple],
) -> None:
    """Print the metrics per label, the comparison, and which model to use."""
    predicted = predictions["fine-tuned"]
    print(classification_report(test_labels, predicted, target_names=label_names, zero_division=0))
    matrix = pandas.DataFrame(confusion_matrix(test_labels, predicted), label_names, label_names)
    print(f"number of test rows per label (row) and prediction (column):\n{matrix.to_string()}")
    for name, text in accuracy_rows(accuracies):
        print(f"accuracy {text}  {name}")

    if len(set(predicted)) == 1:
        print(
            f"warning: the model predicts {label_names[predicted[0]]!r} for every row. Change "
            "--learning-rate or --epochs."
        )
    best = max((name for name in accuracies if name != "fine-tuned"), key=accuracies.get)
    is_right = (predicted == test_labels).astype(float)
    difference = is_right - (predictions[best] == test_labels)
    mean = difference.mean()
    comparison = f"{mean:+.3f} ± {difference.std() / len(difference) ** 0.5:.3f}"
    if mean <= 0:
        print(
            f"warning: the fine-tuned model is not better than {best} ({comparison}). Use the "
            "baseline, or change --learning-rate or --epochs."
        )
    else:
        print(f"the fine-tuned model is better than the best baseline, {best} ({comparison})")
    print(f"saved to {args.output}; load it with pipeline('text-classification', {args.output!r})")


if __name__ == "__main__":
    run_script(main)
