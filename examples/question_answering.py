"""Extractive question answering with plain Trainer.

    python examples/question_answering.py --model MODEL --data FOLDER

FOLDER holds train.jsonl and test.jsonl in SQuAD's schema: {"question", "context", "answers":
{"text": ["red"], "answer_start": [17]}}.
"""

import argparse

import torch
from datasets import load_dataset
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

import neobert  # noqa: F401  the Auto classes know NeoBERT from here on


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="chandar-lab/NeoBERT")
    parser.add_argument("--data", required=True)
    for name, default in (
        ("--output", "runs/question_answering"),
        ("--epochs", 3.0),
        ("--learning-rate", 2e-5),
    ):
        parser.add_argument(name, default=default, type=type(default))
    args = parser.parse_args(argv)

    set_seed(0)
    data = load_dataset(
        "json", data_files={split: f"{args.data}/{split}.jsonl" for split in ("train", "test")}
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForQuestionAnswering.from_pretrained(args.model, dtype=torch.float32)

    def encode(rows):
        encoded = tokenizer(
            rows["question"], rows["context"], truncation="only_second", max_length=512
        )
        first = [answer["answer_start"][0] for answer in rows["answers"]]
        last = [start + len(answer["text"][0]) - 1 for start, answer in zip(first, rows["answers"])]
        # Tokens of these characters in the context (sequence 1); 0 if truncation cut them off.
        starts, ends = (
            [encoded.char_to_token(i, c, 1) or 0 for i, c in enumerate(side)]
            for side in (first, last)
        )
        return {**encoded, "start_positions": starts, "end_positions": ends}

    def exact(output):
        right = [
            logits.argmax(-1) == labels
            for logits, labels in zip(output.predictions, output.label_ids)
        ]
        return {"exact": float((right[0] & right[1]).mean())}

    data = data.map(encode, batched=True, remove_columns=data["train"].column_names)
    schedule = {
        "num_train_epochs": args.epochs,
        "learning_rate": args.learning_rate,
        "save_strategy": "no",
        "report_to": "none",
    }
    trainer = Trainer(
        model,
        TrainingArguments(args.output, **schedule),
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=data["train"],
        eval_dataset=data["test"],
        compute_metrics=exact,
    )
    trainer.train()
    trainer.save_model(args.output)
    metrics = trainer.evaluate()
    print(
        f"exact spans {metrics['eval_exact']:.3f} of {len(data['test'])} questions; saved to "
        f"{args.output}"
    )
    return metrics


if __name__ == "__main__":
    from one_line import run  # an error is one line; a copy of this file calls main()

    run(main)
