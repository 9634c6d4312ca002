"""Named-entity recognition with plain Trainer, entity F1 by seqeval.

    python examples/named_entities.py --model MODEL --data FOLDER

FOLDER holds train.jsonl and test.jsonl with rows {"tokens": ["Ada", "Byron", "wrote"], "tags":
["B-PER", "I-PER", "O"]}. A word's first piece carries its tag. `python examples/make_names.py`
makes such a folder. What the uncased vocabulary costs names: docs/finetuning.md.
"""

import argparse

import numpy as np
import torch
from datasets import load_dataset
from seqeval.metrics import classification_report, f1_score
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers import DataCollatorForTokenClassification as Collator


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="chandar-lab/NeoBERT")
    parser.add_argument("--data", required=True)
    for name, default in (
        ("--output", "runs/named_entities"),
        ("--epochs", 3.0),
        ("--batch", 32),
        ("--seed", 0),
    ):
        parser.add_argument(name, default=default, type=type(default))
    parser.add_argument("--learning-rate", type=float, help="by default by the model's width")
    args = parser.parse_args(argv)

    set_seed(args.seed)
    data = load_dataset(
        "json", data_files={split: f"{args.data}/{split}.jsonl" for split in ("train", "test")}
    )
    names = sorted({tag for split in data.values() for tags in split["tags"] for tag in tags})
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=True)
    labelling = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: i for i, name in enumerate(names)},
    }
    loading = {"trust_remote_code": True, "dtype": torch.float32}
    model = AutoModelForTokenClassification.from_pretrained(args.model, **labelling, **loading)
    width = model.config.hidden_size
    # 2e-5 is for the published model; small ones (192, 384) learn best at 5e-4 to 2e-3.
    rate = args.learning_rate or min(1e-3, 2e-5 * max(1, 768 / width) ** 5)
    print(f"learning rate {rate:.1e} for a model of width {width}; --learning-rate changes it")

    def encode(rows):
        encoded = tokenizer(
            rows["tokens"], is_split_into_words=True, truncation=True, max_length=512
        )
        words = [encoded.word_ids(i) for i in range(len(rows["tokens"]))]
        # Pieces after a word's first, and special tokens, are ignored by the loss and the score.
        first = [
            [w is not None and w != before for before, w in zip([None, *row], row)] for row in words
        ]
        labels = [
            [names.index(tags[w]) if f else -100 for f, w in zip(*pair)]
            for *pair, tags in zip(first, words, rows["tags"])
        ]
        return {**encoded, "labels": labels}

    def texts_of(numbers, labels):
        """Tags of the words of every text."""
        return [
            [names[n] for n, label in zip(*row) if label != -100] for row in zip(numbers, labels)
        ]

    def metrics(output):
        numbers = np.argmax(output.predictions, axis=-1)
        truth, found = (texts_of(x, output.label_ids) for x in (output.label_ids, numbers))
        if not any(tag != "O" for row in found for tag in row):
            print("warning: no name was found; try another --learning-rate or --epochs")
        print(classification_report(truth, found, digits=3, zero_division=0))
        return {"f1": float(f1_score(truth, found, zero_division=0))}

    data = data.map(encode, batched=True, remove_columns=data["train"].column_names)
    schedule = {
        "num_train_epochs": args.epochs,
        "learning_rate": rate,
        "per_device_train_batch_size": args.batch,
    }
    settings = TrainingArguments(
        args.output, save_strategy="no", report_to="none", seed=args.seed, **schedule
    )
    common = {
        "processing_class": tokenizer,
        "data_collator": Collator(tokenizer),
        "compute_metrics": metrics,
    }
    trainer = Trainer(model, settings, train_dataset=data["train"], **common)
    trainer.train()
    trainer.save_model(args.output)

    again = AutoModelForTokenClassification.from_pretrained(args.output, **loading)
    found = Trainer(again, settings, eval_dataset=data["test"], **common).evaluate()
    print(
        f"entity F1 {found['eval_f1']:.3f} over {len(data['test'])} texts; saved to {args.output}"
    )
    return found


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
