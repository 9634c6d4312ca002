"""Fine-tune NeoBERT for extractive question answering with the Trainer of transformers.

    python examples/question_answering.py --model examples/sentence-encoder --data DATA

DATA is a directory with train.jsonl and test.jsonl, whose rows are in the schema of SQuAD:
{"question": "...", "context": "...", "answers": {"text": ["red"], "answer_start": [17]}}. Every
question has an answer.
"""

import torch
from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    BatchEncoding,
    DataCollatorWithPadding,
    EvalPrediction,
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


def load_questions(path: str) -> list[dict]:
    """Return the rows of a file, each with the first and the last character of its answer."""
    texts = ["question", "context"]
    questions = []
    for number, row in enumerate(load_rows(path, [*texts, "answers"], texts=texts), 1):
        try:
            answer = row["answers"]["text"][0]
            start = row["answers"]["answer_start"][0]
            if not isinstance(answer, str) or not isinstance(start, int):
                raise TypeError
        except (KeyError, IndexError, TypeError):
            answer = ""
            start = 0

        # A wrong position would train the model on a wrong answer without any other sign.
        if not answer.strip() or row["context"][start : start + len(answer)] != answer:
            raise UserError(
                f"{path}, row {number:,}: `answers` must contain the text of an answer and its "
                "position in `context`, as in SQuAD. Remove questions without an answer."
            )

        # No token begins or ends with the white space around an answer.
        start += len(answer) - len(answer.lstrip())
        end = start + len(answer.strip()) - 1
        question = {name: row[name] for name in texts}
        questions.append({**question, "start": start, "end": end})
    return questions


def answer_tokens(encoded: BatchEncoding, row: int, start: int, end: int) -> tuple[int, int]:
    """Return the first and the last token of an answer, or (0, 0) if a part was truncated.

    Args:
        encoded: Tokenized questions and contexts.
        row: Index of the question in the batch.
        start: First character of the answer in the context.
        end: Last character of the answer.
    """
    # Sequence 1 is the context.
    start_token = encoded.char_to_token(row, start, 1)
    end_token = encoded.char_to_token(row, end, 1)
    if start_token is None or end_token is None:
        return 0, 0
    return start_token, end_token


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate the model, and return its exact match before and after."""
    args = training_parser(__doc__, "runs/question_answering", batch_size=16).parse_args(argv)
    # Fail before the training rather than after it.
    check_new(args.output)
    check_model(args.model)

    train_rows = load_questions(f"{args.data}/train.jsonl")
    test_rows = load_questions(f"{args.data}/test.jsonl")

    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForQuestionAnswering.from_pretrained(args.model, dtype=torch.float32)

    def encode(batch: dict[str, list]) -> dict[str, list]:
        """Tokenize questions and contexts, and locate the answers in tokens."""
        # The question is never truncated, because it is short and necessary.
        encoded = tokenizer(
            batch["question"], batch["context"], truncation="only_second", max_length=512
        )

        positions = [
            answer_tokens(encoded, row, start, end)
            for row, (start, end) in enumerate(zip(batch["start"], batch["end"]))
        ]
        return {
            **encoded,
            "start_positions": [start for start, _ in positions],
            "end_positions": [end for _, end in positions],
        }

    def exact_match(output: EvalPrediction) -> dict[str, float]:
        """Return the fraction of questions whose start and end are both correct."""
        start_logits, end_logits = output.predictions[:2]
        start_positions, end_positions = output.label_ids
        is_start = start_logits.argmax(-1) == start_positions
        is_end = end_logits.argmax(-1) == end_positions
        return {"exact_match": float((is_start & is_end).mean())}

    columns = ["question", "context", "start", "end"]
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
        compute_metrics=exact_match,
    )
    before = trainer.evaluate()["eval_exact_match"]
    trainer.train()
    after = trainer.evaluate()["eval_exact_match"]
    trainer.save_model(args.output)

    print(
        f"exact match of {len(test_rows):,} test questions: {before:.3f} before, {after:.3f} after"
    )
    if after <= before:
        print("warning: the model has not improved. Change --learning-rate or --epochs.")
    print(f"saved to {args.output}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    run_script(main)
