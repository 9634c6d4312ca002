"""Sparse vectors over the vocabulary, SPLADE on the masked-LM head.

    python examples/sparse_encoder.py --model MODEL --data FOLDER

MODEL has a masked-LM head. FOLDER holds train.jsonl and test.jsonl with rows {"anchor": "a
question", "positive": "its answer"}.
`python examples/make_pairs.py` makes such a folder.
"""

import argparse

import torch
from datasets import load_dataset
from sentence_transformers import (
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
)
from sentence_transformers.sparse_encoder.losses import (
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer
from transformers import set_seed


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="chandar-lab/NeoBERT")
    parser.add_argument("--data", required=True)
    for name, default in (
        ("--output", "runs/sparse_encoder"),
        ("--epochs", 3.0),
        ("--learning-rate", 2e-5),
        ("--batch", 32),
    ):
        parser.add_argument(name, default=default, type=type(default))
    parser.add_argument(
        "--regularizer", type=float, default=3e-3, help="more makes the vectors sparser"
    )
    args = parser.parse_args(argv)

    set_seed(0)
    data = load_dataset(
        "json", data_files={split: f"{args.data}/{split}.jsonl" for split in ("train", "test")}
    )
    remote = {"trust_remote_code": True}
    head = Transformer(
        args.model,
        transformer_task="fill-mask",
        model_kwargs={"dtype": torch.float32, **remote},
        config_kwargs=remote,
        processor_kwargs=remote,
    )
    model = SparseEncoder(modules=[head, SpladePooling(pooling_strategy="max")])
    ranking = SparseMultipleNegativesRankingLoss(model)
    schedule = {
        "num_train_epochs": args.epochs,
        "learning_rate": args.learning_rate,
        "per_device_train_batch_size": args.batch,
    }
    trainer = SparseEncoderTrainer(
        model=model,
        args=SparseEncoderTrainingArguments(
            args.output, save_strategy="no", report_to="none", warmup_steps=0.1, **schedule
        ),
        train_dataset=data["train"].select_columns(["anchor", "positive"]),
        loss=SpladeLoss(
            model,
            ranking,
            document_regularizer_weight=args.regularizer,
            query_regularizer_weight=args.regularizer,
        ),
    )
    trainer.train()
    model.save_pretrained(args.output)

    again = SparseEncoder(args.output, trust_remote_code=True)
    test = data["test"]
    queries, documents = again.encode_query(test["anchor"]), again.encode_document(test["positive"])
    found = again.similarity(queries, documents).argmax(dim=1).cpu()
    metrics = {"recall": float((found == torch.arange(len(test))).float().mean())}
    metrics["active"] = float(again.sparsity(documents)["active_dims"])
    terms = again.decode(queries[0], top_k=5)
    print(
        f"recall@1 {metrics['recall']:.3f} among {len(test)} texts of {metrics['active']:.0f} "
        f"terms each; saved to {args.output}"
    )
    print(f"{test[0]['anchor']!r}: " + ", ".join(f"{term} {weight:.2f}" for term, weight in terms))
    return metrics


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
