"""Token classification (names, parts of speech) with plain Trainer.

    python examples/token_classification.py --model MODEL --data FOLDER

FOLDER holds train.jsonl and test.jsonl with rows {"tokens": ["Ada", "lives", "here"], "tags":
["PERSON", "O", "O"]}.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers import DataCollatorForTokenClassification as Collator

import neobert  # noqa: F401  the Auto classes know NeoBERT from here on


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="chandar-lab/NeoBERT")
    parser.add_argument("--data", required=True)
    for name, default in (
        ("--output", "runs/token_classification"),
        ("--epochs", 3.0),
        ("--learning-rate", 2e-5),
    ):
        parser.add_argument(name, default=default, type=type(default))
    args = parser.parse_args(argv)

    set_seed(0)
    data = load_dataset(
        "json", data_files={split: f"{args.data}/{split}.jsonl" for split in ("train", "test")}
    )
    names = sorted({tag for split in data.values() for tags in split["tags"] for tag in tags})
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    labelling = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }
    model = AutoModelForTokenClassification.from_pretrained(
        args.model, **labelling, dtype=torch.float32
    )

    def labels(tags, words):
        """The first piece of every word carries its tag; -100 is ignored by the loss."""
        return [
            names.index(tags[w]) if w is not None and w != before else -100
            for before, w in zip([None, *words], words)
        ]

    def encode(rows):
        encoded = tokenizer(
            rows["tokens"], is_split_into_words=True, truncation=True, max_length=512
        )
        return {
            **encoded,
            "labels": [labels(tags, encoded.word_ids(i)) for i, tags in enumerate(rows["tags"])],
        }

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
        data_collator=Collator(tokenizer),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        compute_metrics=lambda out: {
            "accuracy": float(
                (out.predictions.argmax(-1) == out.label_ids)[out.label_ids != -100].mean()
            )
        },
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(args.output)
    print(
        f"accuracy {metrics['eval_accuracy']:.3f} over the words of {len(data['test'])} texts; "
        f"saved to {args.output}"
    )
    return metrics


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
