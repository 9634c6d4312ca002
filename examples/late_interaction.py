"""Train late interaction (ColBERT) with the MultiVectorEncoder of sentence-transformers.

    python examples/late_interaction.py --model examples/sentence-encoder --data DATA

Every token gets an embedding of 128 dimensions. DATA is a directory with train.jsonl and
test.jsonl, whose rows are {"anchor": "a question", "positive": "its answer"}, and if there are hard
negatives {"negative": "a wrong answer"}. The other answers of a batch are negatives too.
`python examples/make_pairs.py --output DATA` writes such a directory.
"""

import torch
from datasets import Dataset
from sentence_transformers import (
    MultiVectorEncoder,
    MultiVectorEncoderTrainer,
    MultiVectorEncoderTrainingArguments,
)
from sentence_transformers.multi_vector_encoder.losses import (
    MultiVectorMultipleNegativesRankingLoss,
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


def recall_at_1(model: MultiVectorEncoder, questions: list[str], answers: list[str]) -> float:
    """Return the fraction of questions whose best answer is theirs."""
    # Queries and documents have different prompts and lengths, so each has its own method.
    query_embeddings = model.encode_query(questions)
    document_embeddings = model.encode_document(answers)
    best = model.similarity(query_embeddings, document_embeddings).argmax(dim=1).tolist()
    # Compare texts and not positions, because questions may share an answer.
    matches = [answers[index] == answer for index, answer in zip(best, answers)]
    return sum(matches) / len(matches)


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate the encoder, and return recall@1 before and after training."""
    args = training_parser(__doc__, "runs/late_interaction", batch_size=32).parse_args(argv)
    # Fail before the training rather than after it.
    check_new(args.output)
    check_model(args.model)

    columns = ["anchor", "positive"]
    train_rows = load_rows(f"{args.data}/train.jsonl", columns, optional=["negative"])
    test_rows = load_rows(f"{args.data}/test.jsonl", columns)
    questions = [row["anchor"] for row in test_rows]
    answers = [row["positive"] for row in test_rows]

    set_seed(0)
    model = MultiVectorEncoder(args.model, model_kwargs={"dtype": torch.float32})
    before = recall_at_1(model, questions, answers)

    # Small encoders need a higher learning rate than the 2e-5 of BERT-sized models.
    hidden_size = model[0].auto_model.config.hidden_size
    learning_rate = args.learning_rate or default_learning_rate(hidden_size)
    print(f"learning rate: {learning_rate:.1e} (hidden size {hidden_size})")

    trainer = MultiVectorEncoderTrainer(
        model=model,
        args=MultiVectorEncoderTrainingArguments(
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
        loss=MultiVectorMultipleNegativesRankingLoss(model),
    )
    trainer.train()
    model.save_pretrained(args.output)

    # Load the saved model, to evaluate what other programs will load.
    model = MultiVectorEncoder(args.output)
    after = recall_at_1(model, questions, answers)
    print(
        f"recall@1 of {len(questions):,} questions among {len(answers):,} answers: {before:.3f} "
        f"before, {after:.3f} after"
    )
    if after <= before:
        print("warning: the model has not improved. Change --learning-rate or --epochs.")
    print(f"saved to {args.output}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    run_script(main)
