"""A vector for every token, ColBERT style, with sentence-transformers' MultiVectorEncoder.

    python examples/late_interaction.py --model MODEL --data FOLDER

FOLDER holds train.jsonl and test.jsonl with rows {"anchor": "a question", "positive": "its answer",
"negative": "another text"}.
`python examples/make_pairs.py` makes such a folder.
"""

import argparse

import torch
from datasets import load_dataset
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder.losses import (
    MultiVectorMultipleNegativesRankingLoss,
)
from transformers import set_seed


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="chandar-lab/NeoBERT")
    parser.add_argument("--data", required=True)
    for name, default in (
        ("--output", "runs/late_interaction"),
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
    # A projection to 128 numbers a token comes with it.
    model = MultiVectorEncoder(
        args.model, trust_remote_code=True, model_kwargs={"dtype": torch.float32}
    )
    schedule = {
        "num_train_epochs": args.epochs,
        "learning_rate": args.learning_rate,
        "per_device_train_batch_size": args.batch,
    }
    trainer = MultiVectorEncoderTrainer(
        model=model,
        args=MultiVectorEncoderTrainingArguments(
            args.output, save_strategy="no", report_to="none", warmup_steps=0.1, **schedule
        ),
        train_dataset=data["train"].select_columns(["anchor", "positive", "negative"]),
        loss=MultiVectorMultipleNegativesRankingLoss(model),
    )
    trainer.train()
    model.save_pretrained(args.output)

    again = MultiVectorEncoder(args.output, trust_remote_code=True)
    test = data["test"]
    queries, documents = again.encode_query(test["anchor"]), again.encode_document(test["positive"])
    found = again.similarity(queries, documents).argmax(dim=1).cpu()
    recall = float((found == torch.arange(len(test))).float().mean())
    shape = " x ".join(map(str, queries[0].shape))
    print(
        f"recall@1 {recall:.3f} among {len(test)} texts; the first query is {shape} numbers; saved "
        f"to {args.output}"
    )
    return {"recall": recall}


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
