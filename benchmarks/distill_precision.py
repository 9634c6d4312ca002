"""Which precision and attention trains a small student fastest on this CPU, and whether it learns as well.

    OMP_NUM_THREADS=1 python benchmarks/distill_precision.py TEACHER recipes/distill.yaml --output results/distill

Every variant starts from the same weights and sees the same batches of real texts. Time is CPU time, so that other programs count little.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from neobert.common.arguments import read_arguments
from neobert.common.blocks import compile_blocks
from neobert.common.memory import keep_freed_memory
from neobert.common.results import environment, markdown_table, write_result
from neobert.embeddings.distill import TRAINER, DistillArguments, load_teacher
from neobert.embeddings.distill_data import read_texts
from neobert.embeddings.distill_loss import DistillLoss
from neobert.embeddings.distill_student import build_student


# name: (autocast dtype or None, attention implementation, compiled blocks, frozen embeddings)
VARIANTS = {
    "float32": (None, "sdpa", False, False),
    "float32, compiled": (None, "sdpa", True, False),
    "bfloat16": (torch.bfloat16, "sdpa", False, False),
    "bfloat16, compiled": (torch.bfloat16, "sdpa", True, False),
    "bfloat16, eager attention, compiled": (torch.bfloat16, "eager", True, False),
    "float32, compiled, frozen embeddings": (None, "sdpa", True, True),
    "bfloat16, compiled, frozen embeddings": (torch.bfloat16, "sdpa", True, True),
    "float16, compiled, frozen embeddings": (torch.float16, "sdpa", True, True),
}


def run(name, arguments, teacher, texts, vectors, given):
    """Tokens per CPU second and the losses of one variant."""
    dtype, attention, compiled, frozen = VARIANTS[name]
    arguments.freeze_embeddings = frozen
    torch.manual_seed(0)
    student = build_student(arguments, teacher, vectors.shape[1]).train()
    student[0].auto_model.set_attn_implementation(attention)
    if compiled:
        compile_blocks(student[0].auto_model)
    loss_of = DistillLoss(student, arguments)
    trained = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=given.learning_rate, betas=(0.9, 0.98), fused=True)
    losses, rates = [], []
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(1))
    for step in range(given.steps):
        rows = order[torch.arange(step * given.batch, (step + 1) * given.batch) % len(texts)]
        features = student.preprocess([texts[i] for i in rows])
        started = time.process_time()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = sum(loss_of([features], vectors[rows]).values())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.append(int(features["attention_mask"].sum()) / (time.process_time() - started))
        losses.append(loss.item())
    tail = losses[-given.steps // 5 :]
    print(f"{name}: {statistics.median(rates[given.steps // 2 :]):,.0f} tokens/CPU-s, loss {statistics.mean(tail):.3f}", flush=True)
    return {"rates": rates[given.steps // 2 :], "losses": losses, "loss": statistics.mean(tail)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("teacher")
    parser.add_argument("recipe")
    parser.add_argument("--output", default="results/distill")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--texts", type=int, default=8192)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as the command does
    arguments, _ = read_arguments((DistillArguments,), [given.teacher, given.recipe], trainer=TRAINER)
    sources, others = arguments.sources()
    texts = read_texts(sources, others, arguments.held_out_percent, 10).train
    texts = texts[:: max(1, len(texts) // given.texts)][: given.texts]
    encoder = load_teacher(arguments, "cpu")
    vectors = torch.from_numpy(encoder.embed(encoder.tokenize(texts)))
    found = {name: run(name, arguments, encoder.sentence_transformer, texts, vectors, given) for name in VARIANTS}
    env = environment(dtype="as named")
    rows = []
    for name, result in found.items():
        rate = statistics.median(result["rates"])
        spread = f"{min(result['rates']):,.0f} to {max(result['rates']):,.0f}"
        rows.append([name, f"{rate:,.0f}", spread, f"{result['loss']:.3f}"])
    text = (
        f"Training of the student of {given.recipe} on one CPU thread: {given.steps} steps of {given.batch} real texts, the same ones and the same "
        f"first weights for all; rates over the second half, loss as mean of the last fifth.\n\n"
        + markdown_table(["precision", "tokens/CPU-s", "over the steps", "loss"], rows)
    )
    data = {"kind": "distill-precision", "variants": found}
    print(write_result(Path(given.output) / "precision", "Precisions of distillation", env, data, text))


if __name__ == "__main__":
    main()
