"""A reranker with sentence-transformers' CrossEncoder.

    python examples/reranker.py --model MODEL --data FOLDER

FOLDER holds train.jsonl and test.jsonl with rows {"anchor": "a question", "positive": "its answer",
"negative": "another text"}.
`python examples/make_pairs.py` makes such a folder.

6 blocks of 384 rank a query's 20 passages of unequal lengths in 0.27 s of one core, 2.5 times as
fast as the same model with its padding (results/rerank.md).
"""

import argparse

import torch
from datasets import Dataset, load_dataset
from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from transformers import set_seed


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="chandar-lab/NeoBERT")
    parser.add_argument("--data", required=True)
    for name, default in (
        ("--output", "runs/reranker"),
        ("--epochs", 3.0),
        ("--learning-rate", 2e-5),
        ("--batch", 32),
    ):
        parser.add_argument(name, default=default, type=type(default))
    args = parser.parse_args(argv)

    set_seed(0)
    data = load_dataset(
        "json", data_files={split: f"{args.data}/{split}.jsonl" for split in ("train", "test")}
    )
    pairs = [
        {"query": row["anchor"], "document": row[side], "label": float(side == "positive")}
        for row in data["train"]
        for side in ("positive", "negative")
    ]
    # The new head reads the mean over the tokens, as sentence encoders do.
    kwargs = {
        "model_kwargs": {"dtype": torch.float32},
        "config_kwargs": {"classifier_pooling": "mean"},
    }
    model = CrossEncoder(args.model, num_labels=1, trust_remote_code=True, **kwargs)
    schedule = {
        "num_train_epochs": args.epochs,
        "learning_rate": args.learning_rate,
        "per_device_train_batch_size": args.batch,
    }
    trainer = CrossEncoderTrainer(
        model=model,
        args=CrossEncoderTrainingArguments(
            args.output, save_strategy="no", report_to="none", warmup_steps=0.1, **schedule
        ),
        train_dataset=Dataset.from_list(pairs),
        loss=BinaryCrossEntropyLoss(model),
    )
    trainer.train()
    model.save_pretrained(args.output)

    again = CrossEncoder(args.output, trust_remote_code=True)
    test = data["test"]
    scores = again.predict(
        [(row["anchor"], row[side]) for row in test for side in ("positive", "negative")]
    ).reshape(-1, 2)
    accuracy = float((scores[:, 0] > scores[:, 1]).mean())
    best = again.rank(test[0]["anchor"], test["positive"][:20], top_k=3)
    print(
        f"the answer scores above the other text in {accuracy:.3f} of {len(test)} rows; saved to "
        f"{args.output}"
    )
    print(
        f"{test[0]['anchor']!r}: "
        + ", ".join(
            f"{test[int(found['corpus_id'])]['positive']!r} {found['score']:.2f}" for found in best
        )
    )
    return {"accuracy": accuracy}


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
