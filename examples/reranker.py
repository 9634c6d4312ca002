"""Train a reranker with the CrossEncoder of sentence-transformers.

    python examples/reranker.py --model examples/sentence-encoder --data DATA

DATA is a directory with train.jsonl and test.jsonl, whose rows are {"anchor": "a question",
"positive": "its answer"}. If a row has a column "negative", it contains a wrong answer; otherwise
the answer to another question, sampled at random, is the wrong one.
`python examples/make_pairs.py --output DATA` writes such a directory.
"""

import random

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import set_seed

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


def add_random_negatives(rows: list[dict], seed: int = 0) -> list[dict]:
    """Return the rows with a random answer to another question where "negative" is missing."""
    # A question may have several answers, and none of them is a negative.
    correct: dict[str, set[str]] = {}
    for row in rows:
        correct.setdefault(row["anchor"], set()).add(row["positive"])
    answers = sorted({row["positive"] for row in rows})
    incomplete = {row["anchor"] for row in rows if not row.get("negative")}
    if any(len(correct[anchor]) == len(answers) for anchor in incomplete):
        raise UserError(
            "every question must have a wrong answer. Add rows, or a column `negative`."
        )

    generator = random.Random(seed)
    result = []
    for row in rows:
        negative = row.get("negative")
        if not negative:
            negative = row["positive"]
            while negative in correct[row["anchor"]]:
                negative = generator.choice(answers)
        result.append({**row, "negative": negative})
    return result


def load_triplets(path: str) -> list[dict]:
    """Return the rows of a file with random negatives for the rows that have none."""
    texts = ["anchor", "positive"]
    rows = load_rows(path, texts, optional=["negative"], texts=texts)
    for number, row in enumerate(rows, 1):
        negative = row.get("negative")
        if negative is not None and not isinstance(negative, str):
            raise UserError(
                f"{path}, row {number:,}: `negative` must be text, got {negative!r:.60}. Use one "
                "wrong answer per row."
            )
    return add_random_negatives(rows)


def accuracy_of(model: CrossEncoder, rows: list[dict]) -> float:
    """Return the fraction of questions whose answer scores above the wrong answer."""
    positive = model.predict([(row["anchor"], row["positive"]) for row in rows])
    negative = model.predict([(row["anchor"], row["negative"]) for row in rows])
    return float(np.mean(positive > negative))


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate a reranker, and return its accuracy before and after training."""
    args = training_parser(__doc__, "runs/reranker", batch_size=32).parse_args(argv)
    # Fail before the training rather than after it.
    check_new(args.output)
    check_model(args.model)

    train_rows = load_triplets(f"{args.data}/train.jsonl")
    test_rows = load_triplets(f"{args.data}/test.jsonl")

    set_seed(0)
    # The new head reads the mean over the tokens, as sentence encoders do.
    model = CrossEncoder(
        args.model,
        num_labels=1,
        model_kwargs={"dtype": torch.float32},
        config_kwargs={"classifier_pooling": "mean"},
    )
    before = accuracy_of(model, test_rows)

    # Small encoders need a higher learning rate than the 2e-5 of BERT-sized models.
    hidden_size = model.model.config.hidden_size
    learning_rate = args.learning_rate or default_learning_rate(hidden_size)
    print(f"learning rate: {learning_rate:.1e} (hidden size {hidden_size})")

    # The loss is that of a binary classifier, so every pair has a label.
    pairs = []
    for row in train_rows:
        pairs.append({"query": row["anchor"], "document": row["positive"], "label": 1.0})
        pairs.append({"query": row["anchor"], "document": row["negative"], "label": 0.0})
    trainer = CrossEncoderTrainer(
        model=model,
        args=CrossEncoderTrainingArguments(
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
        train_dataset=Dataset.from_list(pairs),
        loss=BinaryCrossEntropyLoss(model),
    )
    trainer.train()
    model.save_pretrained(args.output)

    # Load the saved model, to evaluate what other programs will load.
    model = CrossEncoder(args.output)
    accuracy = accuracy_of(model, test_rows)
    error = float(np.sqrt(accuracy * (1 - accuracy) / len(test_rows)))
    print(
        f"the right answer scores above the wrong one for {accuracy:.3f} ± {error:.3f} of "
        f"{len(test_rows):,} test questions (chance 0.500, before training {before:.3f})"
    )
    if accuracy <= max(0.5, before):
        print("warning: the model has not improved. Change --learning-rate or --epochs.")
    print(f"saved to {args.output}")

    question = test_rows[0]["anchor"]
    documents = [row["positive"] for row in test_rows[:20]]
    for match in model.rank(question, documents, top_k=3, return_documents=True):
        print(f"{match['score']:.2f}  {match['text']!r} for {question!r}")
    return {"accuracy": accuracy, "before": before}


if __name__ == "__main__":
    run_script(main)
