"""A CSV file to a classifier, with plain Trainer.

    python examples/classify_csv.py reviews.csv --text review --label stars

The two columns may have any name, and the labels may be words or numbers. A tenth of the rows
chooses the best epoch, another tenth is the test. First comes what fine-tuning has to beat:
logistic regression on the vectors of the model as it is.
"""

import argparse
import sys

import pandas
import torch
from datasets import Dataset
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import classification_report, confusion_matrix, f1_score
from sklearn.model_selection import train_test_split
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed


def read(args):
    """(training, validation and test rows), names of the labels; each label is in every part."""
    rows = pandas.read_csv(args.csv, sep=args.separator, dtype=str)
    if missing := {args.text, args.label} - set(rows):
        sys.exit(f"{args.csv} has no column {sorted(missing)[0]!r}; it has {', '.join(rows)}")
    rows = rows[[args.text, args.label]].set_axis(["text", "label"], axis=1).dropna()
    counts = rows["label"].value_counts()
    if len(counts) < 2 or counts.min() < 10:
        rare = f", {counts.index[-1]!r} in {counts.min()} rows" if len(counts) else ""
        sys.exit(
            "at least two labels are needed, each in 10 rows or more; "
            f"column {args.label!r} of {args.csv} has {len(counts):,} labels{rare}"
        )
    try:
        names = sorted(counts.index, key=float)  # 1 to 10, and not 1, 10, 2
    except ValueError:
        names = sorted(counts.index)
    rows["label"] = rows["label"].map(names.index)
    shares = {"test_size": 0.2, "random_state": args.seed}
    train, rest = train_test_split(rows, stratify=rows["label"], **shares)
    shares["test_size"] = 0.5
    return (train, *train_test_split(rest, stratify=rest["label"], **shares)), names


@torch.inference_mode()
def mean_vectors(model, data):
    """Mean of the last hidden states of each text, (N, D)."""
    batches = (torch.tensor([ids], device=model.device) for ids in data["input_ids"])
    return [model.base_model(ids).last_hidden_state[0].mean(0).tolist() for ids in batches]


def metrics(output):
    truth, predicted = output.label_ids, output.predictions.argmax(-1)
    distance = float(abs(predicted - truth).mean())  # for ratings: how many steps off
    f1 = f1_score(truth, predicted, average="macro")
    return {"accuracy": float((predicted == truth).mean()), "f1": f1, "distance": distance}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv")
    parser.add_argument("--model", default="chandar-lab/NeoBERT")
    parser.add_argument("--learning-rate", type=float, help="by default by the model's width")
    options = {"text": "text", "label": "label", "separator": ",", "output": "runs/classify_csv"}
    options |= {"length": 512, "epochs": 3.0, "batch": 16, "seed": 0}
    for name, default in options.items():
        parser.add_argument(f"--{name}", default=default, type=type(default))
    args = parser.parse_args(argv)
    parts, names = read(args)

    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    loading = {"trust_remote_code": True, "dtype": torch.float32}
    model = Classifier.from_pretrained(args.model, **labels, **loading).eval()

    def encode(rows):
        return tokenizer(rows["text"], truncation=True, max_length=args.length)

    data = [Dataset.from_pandas(part, preserve_index=False) for part in parts]
    train, validation, test = (part.map(encode, batched=True) for part in data)
    baseline = LogisticRegression(max_iter=1000).fit(mean_vectors(model, train), train["label"])
    to_beat = baseline.score(mean_vectors(model, test), test["label"])
    print(f"logistic regression on the vectors of the model as it is: accuracy {to_beat:.2f}")
    width = model.config.hidden_size
    # 2e-5 is for the published model; small ones (192, 384) learn best at 5e-4 to 2e-3.
    rate = args.learning_rate or min(1e-3, 2e-5 * max(1, 768 / width) ** 5)
    print(f"learning rate {rate:.1e} for a model of width {width}; --learning-rate changes it")

    settings = {"num_train_epochs": args.epochs, "learning_rate": rate, "seed": args.seed}
    settings |= {"per_device_train_batch_size": args.batch, "report_to": "none"}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "f1", "save_total_limit": 1}
    best |= {"eval_strategy": "epoch", "save_strategy": "epoch"}
    settings = TrainingArguments(args.output, **settings, **best)
    data = {"train_dataset": train, "eval_dataset": validation, "compute_metrics": metrics}
    trainer = Trainer(model, settings, processing_class=tokenizer, **data)
    trainer.train()
    trainer.save_model(args.output)

    outcome = trainer.predict(test)
    truth, predicted = outcome.label_ids, outcome.predictions.argmax(-1)
    print(classification_report(truth, predicted, target_names=names, zero_division=0))
    matrix = pandas.DataFrame(confusion_matrix(truth, predicted), names, names)
    print(f"of each label (row), how many were taken for which (column):\n{matrix.to_string()}")
    accuracy = outcome.metrics["test_accuracy"]
    print(f"accuracy {accuracy:.2f}; logistic regression on the vectors had {to_beat:.2f}")
    if len(set(predicted)) == 1:
        name = names[predicted[0]]
        print(f"warning: all rows were taken for {name!r}; try another --learning-rate or --epochs")
    print(f"load it by pipeline('text-classification', {args.output!r}, trust_remote_code=True)")
    return outcome.metrics


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
