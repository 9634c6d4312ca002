"""Fine-tune NeoBERT to label words (names, parts of speech) with the Trainer of transformers.

    python examples/token_classification.py --model examples/sentence-encoder --data DATA

DATA is a directory with train.jsonl and test.jsonl, whose rows are {"tokens": ["Ada", "lives",
"here"], "tags": ["PERSON", "O", "O"]}. The first token of a word carries its tag.
"""

from collections import Counter

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
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


def load_words(path: str) -> list[dict]:
    """Return the rows of a file, each with as many tags as tokens. Tags are text."""
    rows = load_rows(path, ["tokens", "tags"], texts=[])
    for number, row in enumerate(rows, 1):
        lists = isinstance(row["tokens"], list) and isinstance(row["tags"], list)
        if not lists or len(row["tokens"]) != len(row["tags"]):
            raise UserError(
                f"{path}, row {number:,}: `tokens` and `tags` must be lists of equal length."
            )
        if not all(isinstance(token, str) for token in row["tokens"]):
            raise UserError(f"{path}, row {number:,}: `tokens` must be a list of text.")
        if None in row["tags"]:
            raise UserError(
                f"{path}, row {number:,}: `tags` must be text or numbers, got null. Add a tag for "
                "every token, or remove the row."
            )
        # Tags may be numbers in the file, and the configuration stores names.
        row["tags"] = [str(tag) for tag in row["tags"]]
    return rows


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate the model, and return its accuracy and that of a baseline."""
    args = training_parser(__doc__, "runs/token_classification", batch_size=16).parse_args(argv)
    # Fail before the training rather than after it.
    check_new(args.output)
    check_model(args.model)

    train_rows = load_words(f"{args.data}/train.jsonl")
    test_rows = load_words(f"{args.data}/test.jsonl")
    tag_names = sorted({tag for row in train_rows + test_rows for tag in row["tags"]})

    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForTokenClassification.from_pretrained(
        args.model,
        id2label=dict(enumerate(tag_names)),
        label2id={name: index for index, name in enumerate(tag_names)},
        dtype=torch.float32,
    )

    def encode(batch: dict[str, list]) -> dict[str, list]:
        """Tokenize words and give the tag of a word to its first token."""
        encoded = tokenizer(
            batch["tokens"], is_split_into_words=True, truncation=True, max_length=512
        )

        # The loss and the accuracy ignore the label -100: special tokens, and all tokens of a word
        # but its first.
        labels = []
        for index, tags in enumerate(batch["tags"]):
            words = encoded.word_ids(index)
            labels.append(
                [
                    tag_names.index(tags[word]) if word is not None and word != previous else -100
                    for previous, word in zip([None, *words], words)
                ]
            )
        return {**encoded, "labels": labels}

    columns = ["tokens", "tags"]
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
        data_collator=DataCollatorForTokenClassification(tokenizer),
        train_dataset=train_dataset,
        eval_dataset=test_dataset,
    )
    trainer.train()
    trainer.save_model(args.output)

    output = trainer.predict(test_dataset)
    is_word = output.label_ids != -100
    labels = output.label_ids[is_word]
    predicted = output.predictions.argmax(-1)[is_word]
    accuracy = float(np.mean(predicted == labels))

    # In most data one tag, such as "O", is so frequent that accuracy alone says little.
    most_frequent, _ = Counter(tag for row in train_rows for tag in row["tags"]).most_common(1)[0]
    baseline = float(np.mean(labels == tag_names.index(most_frequent)))
    print(f"accuracy {accuracy:.3f} on {len(labels):,} words of {len(test_rows):,} test texts")
    print(f"accuracy {baseline:.3f} with the most frequent tag, {most_frequent!r}, for every word")
    if len(set(predicted)) == 1 or accuracy <= baseline:
        print("warning: the model is not better. Change --learning-rate or --epochs.")
    print(f"saved to {args.output}")
    return {"accuracy": accuracy, "baseline": baseline}


if __name__ == "__main__":
    run_script(main)
