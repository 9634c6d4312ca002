"""Fine-tune NeoBERT for text classification with the Trainer of transformers.

    python examples/text_classification.py --model examples/sentence-encoder --data DATA

DATA is a directory with train.jsonl and test.jsonl, whose rows are {"text": "a dull film", "label":
"negative"}.
"""

from collections import Counter

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

# Importing neobert also registers the model in transformers, so no remote code is needed.
from neobert import default_learning_rate
from neobert.scripts import (
    UserError,
    check_model,
    check_new,
    load_rows,
    run_script,
    training_parser,
    warmup_options,
)


def load_labeled(path: str) -> list[dict]:
    """Return the rows of a file, each with a text and a label. Labels become text."""
    rows = load_rows(path, ["text", "label"], texts=["text"])
    for number, row in enumerate(rows, 1):
        if row["label"] is None:
            raise UserError(
                f"{path}, row {number:,}: `label` must be text or a number, got null. Add a label, "
                "or remove the row."
            )
        row["label"] = str(row["label"])
    return rows


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate the model, and return its accuracy and that of a baseline."""
    args = training_parser(__doc__, "runs/text_classification", batch_size=16).parse_args(argv)
    # Fail before the training rather than after it.
    check_new(args.output)
    check_model(args.model)

    train_rows = load_labeled(f"{args.data}/train.jsonl")
    test_rows = load_labeled(f"{args.data}/test.jsonl")

    label_names = sorted({row["label"] for row in train_rows})
    for row in test_rows:
        if row["label"] not in label_names:
            raise UserError(
                f"test.jsonl has the label {row['label']!r}, which no row of train.jsonl has. The "
                f"labels of train.jsonl are: {', '.join(label_names)}."
            )

    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(
        args.model,
        id2label=dict(enumerate(label_names)),
        label2id={name: index for index, name in enumerate(label_names)},
        dtype=torch.float32,
    )

    def encode(batch: dict[str, list]) -> dict[str, list]:
        """Tokenize texts and replace their labels by numbers."""
        encoded = tokenizer(batch["text"], truncation=True, max_length=512)
        return {**encoded, "labels": [label_names.index(label) for label in batch["label"]]}

    columns = ["text", "label"]
    train_dataset = Dataset.from_list(train_rows).map(encode, batched=True, remove_columns=columns)
    test_dataset = Dataset.from_list(test_rows).map(encode, batched=True, remove_columns=columns)

    # Small encoders need a higher learning rate than the 2e-5 of BERT-sized models.
    learning_rate = args.learning_rate or default_learning_rate(model.config.hidden_size)
    print(f"learning rate: {learning_rate:.1e} (hidden size {model.config.hidden_size})")

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output,
            num_train_epochs=args.epochs,
            learning_rate=learning_rate,
            # The warmup takes a tenth of all steps.
            **warmup_options(0.1),
            per_device_train_batch_size=args.batch_size,
            dataloader_pin_memory=torch.accelerator.is_available(),
            save_strategy="no",
            report_to="none",
        ),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=train_dataset,
        eval_dataset=test_dataset,
    )
    trainer.train()
    trainer.save_model(args.output)

    output = trainer.predict(test_dataset)
    predicted = output.predictions.argmax(-1)
    accuracy = float(np.mean(predicted == output.label_ids))
    error = float(np.sqrt(accuracy * (1 - accuracy) / len(test_rows)))

    # A classifier is only useful if it beats always answering with the most frequent label.
    most_frequent, _ = Counter(row["label"] for row in train_rows).most_common(1)[0]
    baseline = float(np.mean(output.label_ids == label_names.index(most_frequent)))
    print(f"accuracy {accuracy:.3f} ± {error:.3f} on {len(test_rows):,} test texts")
    print(
        f"accuracy {baseline:.3f} with the most frequent label, {most_frequent!r}, for every text"
    )
    if len(set(predicted)) == 1 or accuracy <= baseline:
        print("warning: the model is not better. Change --learning-rate or --epochs.")
    print(f"saved to {args.output}")
    return {"accuracy": accuracy, "baseline": baseline}


if __name__ == "__main__":
    run_script(main)
