"""Train sparse embeddings (SPLADE) on the masked-LM head with sentence-transformers.

    python examples/sparse_encoder.py --model MODEL --data DATA

MODEL has a masked-LM head. DATA is a directory with train.jsonl and test.jsonl, whose rows are
{"anchor": "a question", "positive": "its answer"}.
`python examples/make_pairs.py --output DATA` writes such a directory.
"""

import argparse

import torch
from datasets import Dataset
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

# Importing neobert also registers the model in transformers, so no remote code is needed.
from neobert import default_learning_rate
from neobert.scripts import (
    check_model,
    check_new,
    load_rows,
    run_script,
    training_parser,
    warmup_options,
)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = training_parser(__doc__, "runs/sparse_encoder", batch_size=32)
    parser.add_argument(
        "--regularizer",
        type=float,
        default=3e-3,
        help="Weight of the sparsity loss. (default: %(default)s)",
    )
    return parser.parse_args(argv)


def measure(model: SparseEncoder, questions: list[str], answers: list[str]) -> dict[str, float]:
    """Return recall@1 of the questions, and the mean number of terms of an answer."""
    query_embeddings = model.encode_query(questions)
    document_embeddings = model.encode_document(answers)
    nearest = model.similarity(query_embeddings, document_embeddings).argmax(dim=1).tolist()
    # Compare texts and not positions, because questions may share an answer.
    matches = [answers[index] == answer for index, answer in zip(nearest, answers)]
    return {
        "recall": sum(matches) / len(matches),
        "terms": float(model.sparsity(document_embeddings)["active_dims"]),
    }


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate the encoder, and return recall@1 and the number of terms."""
    args = parse_args(argv)
    # Fail before the training rather than after it.
    check_new(args.output)
    check_model(args.model)

    train_rows = load_rows(f"{args.data}/train.jsonl", ["anchor", "positive"])
    test_rows = load_rows(f"{args.data}/test.jsonl", ["anchor", "positive"])
    questions = [row["anchor"] for row in test_rows]
    answers = [row["positive"] for row in test_rows]

    set_seed(0)
    # The embedding has one dimension per vocabulary entry: the largest logit over all tokens.
    head = Transformer(
        args.model, transformer_task="fill-mask", model_kwargs={"dtype": torch.float32}
    )
    model = SparseEncoder(modules=[head, SpladePooling(pooling_strategy="max")])
    ranking = SparseMultipleNegativesRankingLoss(model)
    before = measure(model, questions, answers)

    # Small encoders need a higher learning rate than the 2e-5 of BERT-sized models. Above 3e-4 the
    # sparsity loss leaves too few terms before the ranking is learned.
    hidden_size = head.auto_model.config.hidden_size
    learning_rate = args.learning_rate or min(3e-4, default_learning_rate(hidden_size))
    print(f"learning rate: {learning_rate:.1e} (hidden size {hidden_size})")

    trainer = SparseEncoderTrainer(
        model=model,
        args=SparseEncoderTrainingArguments(
            output_dir=args.output,
            num_train_epochs=args.epochs,
            learning_rate=learning_rate,
            # The warmup takes a tenth of all steps.
            **warmup_options(0.1),
            per_device_train_batch_size=args.batch_size,
            # The other answers of a batch are negatives, so an answer may occur only once in it.
            batch_sampler="no_duplicates",
            dataloader_pin_memory=torch.accelerator.is_available(),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(train_rows),
        loss=SpladeLoss(
            model,
            ranking,
            document_regularizer_weight=args.regularizer,
            query_regularizer_weight=args.regularizer,
        ),
    )
    trainer.train()
    model.save_pretrained(args.output)

    # Load the saved model, to evaluate what other programs will load.
    model = SparseEncoder(args.output)
    after = measure(model, questions, answers)
    print(
        f"recall@1 of {len(questions):,} questions among {len(answers):,} answers: "
        f"{before['recall']:.3f} before, {after['recall']:.3f} after"
    )
    print(f"terms per answer: {before['terms']:.0f} before, {after['terms']:.0f} after")
    if after["recall"] <= before["recall"]:
        print("warning: the model has not improved. Change --learning-rate or --epochs.")
    print(f"saved to {args.output}")

    # Sparse embeddings can be read: show the terms with the largest weights.
    terms = model.decode(model.encode_query(questions[0]), top_k=5)
    print(f"{questions[0]!r}: " + ", ".join(f"{term} {weight:.2f}" for term, weight in terms))
    return {"before": before["recall"], "after": after["recall"], "terms": after["terms"]}


if __name__ == "__main__":
    run_script(main)
