"""Puts a finished run of recipes/example_small*.yaml into examples/checkpoint: raw weights, log,
and the card with what it reached.

    python tests/tools/example_card.py runs/example_small_stage2 --after \\
        runs/example_small/checkpoint-2300

`--after` names the first stage's checkpoint (or finished run), whose steps and log count too.

The held-out figures are measured here on the weights as they are stored (float16), next to the
unigram baseline on the same masked positions.
"""

import argparse
import json
import runpy
import shutil
from pathlib import Path

import torch

from neobert.common.files import write_json, write_text
from neobert.common.loading import load_tokenizer
from neobert.common.results import environment
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM
from neobert.pretraining import heldout, pretrain, texts
from neobert.pretraining.heldout import evaluate_batches
from neobert.pretraining.masking import TokenMasking
from neobert.pretraining.prepared import load_prepared
from neobert.pretraining.raw_checkpoint import write_raw_checkpoint


ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "example_small.yaml"
# The demo's texts, and some that the model has not learnt.
TEXTS = [
    *runpy.run_path(str(ROOT / "examples" / "demo.py"))["MASKED"],
    "violin: a musical [MASK] with four strings.",
    "paris: the capital and largest city of [MASK].",
    "He opened the [MASK] and went out.",
]

CARD = """---
license: other
license_name: wordnet
language: en
tags: [neobert, fill-mask]
---

# The bundled checkpoint: a small NeoBERT trained on WordNet

A raw training checkpoint in the layout of the authors' training code (`config.yaml`, `model_checkpoints/{steps}/state_dict.pt`, names with the
`module.` prefix of DistributedDataParallel), for the demo, the tests and the benchmarks. It is a small model that has read a dictionary for about
{hours:.1f} hours of a shared CPU: it completes dictionary definitions and knows little else.

    python convert_checkpoint.py examples/checkpoint OUTPUT

| | |
|---|---|
| architecture | {layers} layers of {hidden}, {heads} heads, vocabulary 30,522, decoder tied to the embedding; {parameters:.2f}M parameters, {size:.1f} MB in float16 |
| text | WordNet 3.0 (Debian package wordnet-base): words, definition, kind and examples of each synset; {train_rows:,} texts, {train_tokens:,} tokens |
| held out | {heldout_rows:,} texts, {heldout_tokens:,} tokens, chosen by a hash of the synset; never trained on |
| recipe | `recipes/example_small.yaml`{stopped}, then `example_small_stage2.yaml` from those weights: 20 % of the tokens masked, always by [MASK]; AdamW, cosine to 10 %, packed batches |
| trained | {steps:,} steps, {tokens_seen:,} tokens{stages} |
| **held-out masked accuracy** | **{accuracy:.1%}** of {masked:,} masked tokens, {ratio:.1f} times the baseline; loss {loss:.3f} nats (perplexity {perplexity:.0f}) |
| unigram baseline | {baseline:.1%}, on the same positions: always {frequent!r}, the most frequent token |
| hardware | {hardware}, shared with other work; float32 |

The log of the run is `log.jsonl`; `heldout.json` holds the figures of this card.{note}

## What it fills in

| text | first guesses |
|---|---|
{fills}

## Again

```bash
apt-get install wordnet-base
python -m neobert.benchmarks.local_text wordnet --out data/wordnet
neobert pretrain recipes/example_small.yaml             # keeps checkpoint-2300, where the second stage starts; may be stopped there
neobert pretrain recipes/example_small_stage2.yaml
python tests/tools/example_card.py runs/example_small_stage2 --after runs/example_small/checkpoint-2300
```

Measured by `{command}`, commit {commit}, {date}; {versions}.

## Licence and sources

The only training text is WordNet 3.0, Copyright 2006 by Princeton University, all rights reserved; its licence permits use, copying,
modification and distribution, for any purpose and without fee, of the database and works made from it, provided that the notice is kept:
<https://wordnet.princeton.edu/license-and-commercial-use>. It comes "as is", without warranty. The weights are passed on under the same terms.
The tokenizer is BERT's uncased WordPiece vocabulary (Apache 2.0).
"""  # noqa: E501


def fills(model, tokenizer):
    """Rows of the card's table: the four best guesses for each text."""
    rows = []
    for text in TEXTS:
        batch = tokenizer(text, return_tensors="pt")
        place = int((batch["input_ids"][0] == tokenizer.mask_token_id).nonzero())
        with torch.no_grad():
            shares = model(**batch).logits[0, place].softmax(-1).topk(4)
        guesses = ", ".join(
            f"{tokenizer.decode([i])} ({p:.0%})"
            for i, p in zip(shares.indices.tolist(), shares.values.tolist())
        )
        rows.append(f"| {text} | {guesses} |")
    return "\n".join(rows)


def trained(source):
    """Steps and tokens of a finished run (result.json) or of a checkpoint (trainer_state.json)."""
    if (source / "result.json").exists():
        state = json.loads((source / "result.json").read_text())
        return state["steps"], state["tokens_seen"]
    state = json.loads((source / "trainer_state.json").read_text())
    return state["global_step"], state["num_input_tokens_seen"]


def read_log(run, steps):
    """The run's log up to `steps`."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] <= steps]


def hours(log):
    """Time of a run from its log: tokens over tokens a second, pauses left out."""
    seconds, before = 0.0, 0
    for row in log:
        if "tokens_per_second" in row:
            seconds += (row["tokens_seen"] - before) / row["tokens_per_second"]
            before = row["tokens_seen"]
    return seconds / 3600


def planned_steps(source):
    """max_steps of the run that a checkpoint belongs to."""
    folder = source if (source / "recipe.json").exists() else source.parent
    return json.loads((folder / "recipe.json").read_text())["max_steps"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", help="a checkpoint of the run instead of its final model")
    parser.add_argument(
        "--after", type=Path, help="the first stage: a finished run, or a checkpoint of it"
    )
    parser.add_argument("--note", default="", help="a sentence on this run for the card")
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "checkpoint")
    arguments = parser.parse_args()
    source = arguments.run / arguments.checkpoint if arguments.checkpoint else arguments.run
    config = NeoBERTConfig.from_pretrained(source)
    model = NeoBERTForMaskedLM.from_pretrained(source, config=config, dtype=torch.float32)
    steps, tokens_seen = trained(source)
    log, stages, stopped = read_log(arguments.run, steps), "", ""
    took = hours(log)
    if arguments.after:
        first_steps, first_tokens = trained(arguments.after)
        first_run = (
            arguments.after if (arguments.after / "log.jsonl").exists() else arguments.after.parent
        )
        first_log, planned = read_log(first_run, first_steps), planned_steps(arguments.after)
        took += hours(first_log)
        stopped = (
            f" up to step {first_steps:,} of the {planned:,} planned"
            if first_steps < planned
            else ""
        )
        log = [{"stage": 1, **row} for row in first_log] + [{"stage": 2, **row} for row in log]
        stages = f": {first_steps:,} steps of the first stage, {steps:,} of the second"
        steps, tokens_seen = steps + first_steps, tokens_seen + first_tokens

    # Everything is made beside the old checkpoint, which goes only when the new one is complete.
    partial = arguments.out.with_name(f".{arguments.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    path = write_raw_checkpoint(model.state_dict(), config, partial, steps, torch.float16)
    stored = {
        name.removeprefix("module."): tensor.float()
        for name, tensor in torch.load(path, weights_only=True).items()
    }
    model.load_state_dict(stored)

    run = pretrain.read_run([str(RECIPE), "--report-to", "none"])
    tokenizer = load_tokenizer(run.model.tokenizer)
    masking = TokenMasking(tokenizer, run.batch.mlm_probability)
    train, train_summary = load_prepared(arguments.run / "prepared" / "train", tokenizer)
    held, held_summary = load_prepared(arguments.run / "prepared" / "heldout", tokenizer)
    batches = texts.make_batches(
        held, tokenizer, masking, run.spec.of_all_texts(run.spec.seed + 1), "heldout"
    )
    measured = evaluate_batches(model.eval(), batches)
    frequent = heldout.unigram(train, tokenizer)
    baseline = heldout.unigram_accuracy(batches, frequent)

    write_text(partial / "log.jsonl", "\n".join(json.dumps(row) for row in log) + "\n")
    env = environment(dtype="float16 weights, float32 arithmetic")
    figures = {
        "steps": steps,
        "tokens_seen": tokens_seen,
        **measured,
        "unigram_accuracy": baseline,
        "unigram_token": tokenizer.decode([frequent]),
    }
    write_json(partial / "heldout.json", {**env, **figures})
    card = CARD.format(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        size=path.stat().st_size / 1e6,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        steps=steps,
        tokens_seen=tokens_seen,
        stages=stages,
        accuracy=measured["masked_accuracy"],
        masked=measured["masked_tokens"],
        loss=measured["loss"],
        perplexity=torch.tensor(measured["loss"]).exp().item(),
        baseline=baseline,
        ratio=measured["masked_accuracy"] / baseline,
        frequent=tokenizer.decode([frequent]),
        train_rows=train_summary["kept"],
        train_tokens=train_summary["tokens"],
        heldout_rows=held_summary["kept"],
        heldout_tokens=held_summary["tokens"],
        hardware=env["hardware"],
        hours=took,
        stopped=stopped,
        fills=fills(model, tokenizer),
        command=env["command"],
        commit=env["commit"],
        date=env["date"],
        versions=", ".join(f"{name} {version}" for name, version in env["versions"].items()),
        note=f" {arguments.note}" if arguments.note else "",
    )
    write_text(partial / "README.md", card)
    shutil.rmtree(arguments.out, ignore_errors=True)
    partial.replace(arguments.out)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
