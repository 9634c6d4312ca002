"""Train embeddings that can be truncated (Kusupati et al. 2022) with sentence-transformers.

    python examples/matryoshka.py --model examples/sentence-encoder --data DATA

DATA is a directory with train.jsonl and test.jsonl, whose rows are {"anchor": "a question",
"positive": "its answer"}, and if there are hard negatives {"negative": "a wrong answer"}. The other
answers of a batch are negatives too. `python examples/make_pairs.py --output DATA` writes such a
directory.
"""

import argparse

import torch
from datasets import Dataset
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
    parser = training_parser(__doc__, "runs/matryoshka", batch_size=32)
    parser.add_argument(
        "--dims",
        type=int,
        nargs="+",
        help="Dimensions to train. (default: all, a quarter and a sixteenth of them)",
    )
    return parser.parse_args(argv)


def recall_at_1(
    model: SentenceTransformer, questions: list[str], answers: list[str], dim: int
) -> float:
    """Return the fraction of questions whose nearest answer is the right one."""
    query_embeddings = model.encode_query(questions, truncate_dim=dim)
    document_embeddings = model.encode_document(answers, truncate_dim=dim)
    nearest = model.similarity(query_embeddings, document_embeddings).argmax(dim=1).tolist()
    # Compare texts and not positions, because questions may share an answer.
    matches = [answers[index] == answer for index, answer in zip(nearest, answers)]
    return sum(matches) / len(matches)


def main(argv: list[str] | None = None) -> dict[int, tuple[float, float]]:
    """Train and evaluate the encoder, and return recall@1 before and after by dimension."""
    args = parse_args(argv)
    # Fail before the training rather than after it.
    check_new(args.output)
    check_model(args.model)

    columns = ["anchor", "positive"]
    train_rows = load_rows(f"{args.data}/train.jsonl", columns, optional=["negative"])
    test_rows = load_rows(f"{args.data}/test.jsonl", columns)
    questions = [row["anchor"] for row in test_rows]
    answers = [row["positive"] for row in test_rows]

    set_seed(0)
    model = SentenceTransformer(args.model, model_kwargs={"dtype": torch.float32})
    full_dim = model.get_embedding_dimension()
    dims = args.dims or [full_dim, full_dim // 4, full_dim // 16]
    before = {dim: recall_at_1(model, questions, answers, dim) for dim in dims}

    # Small encoders need a higher learning rate than the 2e-5 of BERT-sized models.
    hidden_size = model[0].auto_model.config.hidden_size
    learning_rate = args.learning_rate or default_learning_rate(hidden_size)
    print(f"learning rate: {learning_rate:.1e} (hidden size {hidden_size})")

    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
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
        # The loss is the sum of the ranking losses of the embeddings truncated to each dimension.
        loss=MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), dims),
    )
    trainer.train()
    model.save_pretrained(args.output)

    # Load the saved model, to evaluate what other programs will load.
    model = SentenceTransformer(args.output)
    after = {dim: recall_at_1(model, questions, answers, dim) for dim in dims}
    print(f"recall@1 of {len(questions):,} questions among {len(answers):,} answers")
    for dim in dims:
        print(f"  {dim:>4} dimensions: {before[dim]:.3f} before, {after[dim]:.3f} after")
    if all(after[dim] <= before[dim] for dim in dims):
        print("warning: the model has not improved. Change --learning-rate or --epochs.")
    print(f"saved to {args.output}")
    return {dim: (before[dim], after[dim]) for dim in dims}


if __name__ == "__main__":
    run_script(main)
