"""Vectors that may be cut (Kusupati et al. 2022) with sentence-transformers.

    python examples/matryoshka.py --model MODEL --data FOLDER

FOLDER holds train.jsonl and test.jsonl with rows {"anchor": "a question", "positive": "its answer",
"negative": "another text"}.
`python examples/make_pairs.py` makes such a folder.
"""

import argparse

import torch
from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from transformers import set_seed


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="chandar-lab/NeoBERT")
    parser.add_argument("--data", required=True)
    parser.add_argument(
        "--dims",
        type=int,
        nargs="+",
        help="widths to train for; default: the model's, a quarter, a sixteenth",
    )
    for name, default in (
        ("--output", "runs/matryoshka"),
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
    model = SentenceTransformer(
        args.model, trust_remote_code=True, model_kwargs={"dtype": torch.float32}
    )
    width = model.get_embedding_dimension()
    dims = args.dims or [width, width // 4, width // 16]
    schedule = {
        "num_train_epochs": args.epochs,
        "learning_rate": args.learning_rate,
        "per_device_train_batch_size": args.batch,
    }
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            args.output, save_strategy="no", report_to="none", warmup_steps=0.1, **schedule
        ),
        train_dataset=data["train"].select_columns(["anchor", "positive", "negative"]),
        loss=MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), dims),
    )
    trainer.train()
    model.save_pretrained(args.output)

    test, metrics = data["test"], {}
    for width in dims:
        again = SentenceTransformer(args.output, trust_remote_code=True, truncate_dim=width)
        queries, documents = again.encode(test["anchor"]), again.encode(test["positive"])
        found = again.similarity(queries, documents).argmax(dim=1)
        metrics[f"recall_{queries.shape[1]}"] = float(
            (found == torch.arange(len(test))).float().mean()
        )
    cells = ", ".join(f"{value:.3f} at {name.partition('_')[2]}" for name, value in metrics.items())
    print(
        f"recall@1 among {len(test)} texts by the width of the vectors: {cells}; saved to "
        f"{args.output}"
    )
    return metrics


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
