"""Text classification with plain Trainer.

    python examples/text_classification.py --model MODEL --data FOLDER

FOLDER holds train.jsonl and test.jsonl with rows {"text": "a dull film", "label": "negative"}.
"""

import argparse

import numpy as np
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

import neobert  # noqa: F401  the Auto classes know NeoBERT from here on


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="chandar-lab/NeoBERT")
    parser.add_argument("--data", required=True)
    for name, default in (
        ("--output", "runs/text_classification"),
        ("--epochs", 3.0),
        ("--learning-rate", 2e-5),
    ):
        parser.add_argument(name, default=default, type=type(default))
    args = parser.parse_args(argv)

    set_seed(0)
    data = load_dataset(
        "json", data_files={split: f"{args.data}/{split}.jsonl" for split in ("train", "test")}
    )
    names, tested = (
        sorted({str(label) for label in data[split]["label"]}) for split in ("train", "test")
    )
    if unknown := sorted(set(tested) - set(names)):
        parser.error(
            f"test.jsonl has the label {unknown[0]!r}, which no row of train.jsonl has (it has "
            f"{', '.join(names)})"
        )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    labelling = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model, **labelling, dtype=torch.float32
    )

    def encode(rows):
        encoded = tokenizer(rows["text"], truncation=True, max_length=512)
        return {**encoded, "labels": [names.index(str(label)) for label in rows["label"]]}

    data = data.map(encode, batched=True, remove_columns=data["train"].column_names)
    schedule = {
        "num_train_epochs": args.epochs,
        "learning_rate": args.learning_rate,
        "save_strategy": "no",
        "report_to": "none",
    }
    trainer = Trainer(
        model,
        TrainingArguments(args.output, **schedule),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        compute_metrics=lambda output: {
            "accuracy": float(np.mean(output.predictions.argmax(-1) == output.label_ids))
        },
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(args.output)
    print(
        f"accuracy {metrics['eval_accuracy']:.3f} on {len(data['test'])} texts; saved to "
        f"{args.output}"
    )
    return metrics


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
