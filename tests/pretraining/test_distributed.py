"""Test training with two processes.

DDP, FSDP2 and DeepSpeed ZeRO-2 and ZeRO-3 have the losses of a single process with the same global
batch size. Runs with DDP and DeepSpeed resume exactly after an interruption, and a ZeRO-2
checkpoint can be converted.

The tests run on the CPU. DeepSpeed uses the accelerate configurations of this repository. On CPUs,
accelerate 1.15 starts plain DDP instead of FSDP, so FSDP2 is tested by calling `fully_shard` for
each block, as fsdp2.yaml configures it.
"""

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from neobert.conversion.command import main as convert
from neobert.modeling_neobert import NeoBERTForMaskedLM
from neobert.pretraining.tokenizer import main as train_tokenizer


pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "accelerate"
MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
SINGLE = (
    *("accelerate.commands.launch", "--config_file", str(CONFIGS / "single.yaml")),
    *("--mixed_precision", "no", "--cpu"),
)
# Program that runs `neobert` without the shared-memory operations of DeepSpeed. On a CPU, DeepSpeed
# compiles them at the first start, which takes two minutes; without them, it calls gloo.
WITHOUT_COMPILER = """
import deepspeed.ops

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

from neobert.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
"""
# Distributed types that result.json must contain.
WAYS = {"ddp": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}


def _free_port():
    """Return a free TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the working directory of the processes, with files of random texts."""
    folder = tmp_path_factory.mktemp("distributed")
    (folder / "without_compiler.py").write_text(WITHOUT_COMPILER)

    rng = random.Random(0)
    words = "river stone music paper table winter cold water hard rock sweet sound".split()
    texts = [" ".join(rng.choices(words, k=rng.randint(2, 20))) for _ in range(300)]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n")

    # A second source and two validation sets: some of the texts, with their words in reverse order.
    for name, part in {"other.txt": texts[:40], "a.txt": texts[40:80], "b.txt": texts[:9]}.items():
        changed = [" ".join(reversed(text.split())) for text in part]
        (folder / name).write_text("\n".join(changed) + "\n")
    return folder


def _process(folder, arguments):
    """Run `python -m` with these arguments in a working directory on the CPU."""
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    environment = {**os.environ, **variables, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def _launch(folder, name, launcher, **overrides):
    """Run `neobert pretrain` with a launcher; an option with the value None is omitted."""
    sources = [{"name": "texts.txt", "weight": 0.8}, {"name": "other.txt", "weight": 0.2}]
    values = {
        "dataset": json.dumps(sources),
        "validation": json.dumps({"domain": "a.txt", "general": "b.txt"}),
        "prepared": "prepared",
        "output": name,
        "model_config": json.dumps(MODEL),
        "max_length": 32,
        "micro_batch_tokens": 256,
        "global_batch_tokens": 512,
        "max_steps": 6,
        "warmup_steps": 2,
        "learning_rate": 3e-3,
        "logging_steps": 1,
        "save_steps": 3,
        "report_to": "none",
        "disable_tqdm": "true",
        "use_cpu": "true",
        "peak_tflops": 0.01,
        **overrides,
    }
    options = {key: value for key, value in values.items() if value is not None}
    arguments = [
        argument
        for key, value in options.items()
        for argument in (f"--{key.replace('_', '-')}", str(value))
    ]
    uses_deepspeed = any("zero" in word for word in launcher)
    program = ["without_compiler.py"] if uses_deepspeed else ["-m", "neobert"]
    return _process(folder, [*launcher, *program, "pretrain", *arguments])


def _train(folder, name, launcher, **overrides):
    """Train six steps of two micro-batches, and return the log record of each step.

    A single process accumulates the gradients of both micro-batches. Two processes compute one
    micro-batch each.
    """
    run = _launch(folder, name, launcher, **overrides)
    assert run.returncode == 0, f"{name} failed:\n{run.stderr[-3000:]}"
    records = [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


@pytest.fixture(scope="module")
def single(folder):
    """Return the log of a run with a single process."""
    return _train(folder, "single", SINGLE)


def _torchrun(processes):
    """Return the module and options of torchrun."""
    options = f"--nproc_per_node {processes} --master_port {_free_port()}"
    return ["torch.distributed.run", *options.split()]


def _launcher(way):
    """Return the module and options that start two processes."""
    if way == "ddp":
        return _torchrun(2)
    options = f"--num_processes 2 --mixed_precision no --main_process_port {_free_port()}"
    config = ["--config_file", str(CONFIGS / f"{way}.yaml")]
    return ["accelerate.commands.launch", *config, *options.split()]


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_match_a_single_process(folder, single, way):
    """Check the log of two processes against that of one, and that they resume exactly.

    The sources are weighted, and there are two validation sets.
    """
    if way.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    distributed = _train(folder, way, _launcher(way), use_cpu=None if way == "ddp" else "true")

    result = json.loads((folder / way / "result.json").read_text())
    assert (result["environment"]["processes"], result["distributed"]) == (2, WAYS[way])
    assert len(distributed) == len(single) == 6
    assert single[0]["loss"] - single[-1]["loss"] > 0.2, (
        "the loss must fall, or the comparison is meaningless"
    )
    for one, two in zip(single, distributed):
        assert abs(one["loss"] - two["loss"]) < 1e-4
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
        assert two["tokens_seen"] == one["tokens_seen"]
        assert two["masked_accuracy"] == pytest.approx(one["masked_accuracy"])
        assert two["epoch"] == pytest.approx(one["epoch"]) and one["epoch"] > 0
    first, second = (_bits_per_character(folder / name) for name in ("single", way))
    assert first == pytest.approx(second, rel=1e-4) and len(first) == 4

    # Restore the state of a run that was killed while it saved step 6. The same command must resume
    # from step 3.
    (folder / way / "checkpoint-6" / "trainer_state.json").unlink()
    (folder / way / "result.json").rename(folder / way / "run.json")
    resumed = _train(folder, way, _launcher(way))
    metrics = ("step", "loss", "grad_norm", "masked_accuracy", "learning_rate", "tokens_seen")
    for one, two in zip(resumed, distributed, strict=True):
        assert [one[name] for name in metrics] == [two[name] for name in metrics]

    if way == "zero2":
        _check_conversion(folder)


def test_zero_2_vocabulary_transfer_matches_a_single_process(folder, single):
    """Check that two processes with vocabulary transfer have the losses of one.

    Each process computes the new embeddings from those of the initial model.
    """
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    texts = str(folder / "texts.txt")
    tokenizer = str(folder / "own")
    train_tokenizer([str(texts), "--vocab-size", "192", "--output", str(tokenizer)])
    options = {
        **{"init_from": "single", "tokenizer": "own", "init_embeddings": "transfer"},
        **{"model_config": None, "prepared": "prepared-own"},
    }

    one = _train(folder, "one", SINGLE, **options)
    two = _train(folder, "both", _launcher("zero2"), **options)

    for name in ("one", "both"):
        result = json.loads((folder / name / "result.json").read_text())
        assert result["init_rows"]["copied"] > 20
    assert result["distributed"] == "DEEPSPEED"
    assert [record["loss"] for record in two] == pytest.approx(
        [record["loss"] for record in one], abs=1e-4
    )
    final = NeoBERTForMaskedLM.from_pretrained(folder / "both", dtype=torch.float32)
    assert final.config.vocab_size == 192 == len(final.decoder.bias)


def _bits_per_character(folder):
    """Return the bits per character of each validation set before and after training."""
    rows = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    rows = [row for row in rows if "eval_domain_loss" in row]
    names = [f"eval_{name}_bits_per_character" for name in ("domain", "general")]
    return [row[name] for row in (rows[0], rows[-1]) for name in names]


def test_zero_3_without_gathered_weights_is_refused(folder):
    """Check the error for a configuration with which the final model could not be saved."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    config = (
        (CONFIGS / "zero3.yaml")
        .read_text()
        .replace("zero3_save_16bit_model: true", "zero3_save_16bit_model: false")
    )
    (folder / "ungathered.yaml").write_text(config)
    launcher = _launcher("zero3")
    launcher[launcher.index(str(CONFIGS / "zero3.yaml"))] = str(folder / "ungathered.yaml")

    run = _launch(folder, "refused", launcher)
    assert run.returncode
    message = "ZeRO-3 must gather the weights of the final model"
    assert message in run.stderr, run.stderr[-2000:]
    assert not (folder / "refused").exists(), "the run must not write anything"


def _check_conversion(folder):
    """Check that a ZeRO-2 checkpoint is converted to the model that the run saved."""
    checkpoint = folder / "zero2" / "checkpoint-6"
    converted = folder / "converted"
    assert list(checkpoint.rglob("*optim_states.pt")), "the checkpoint must have optimizer shards"
    assert convert([str(checkpoint), str(converted)]) == 0
    ids = torch.randint(1996, 20_000, (2, 20), generator=torch.Generator().manual_seed(0))
    expected_logits, logits = (
        NeoBERTForMaskedLM.from_pretrained(path, dtype=torch.float32).eval()(ids).logits
        for path in (folder / "zero2", converted)
    )
    assert torch.equal(expected_logits, logits), "the converted model must have identical logits"


# Script that trains in one process, or in two processes with sharded parameters. Both have the same
# global batches, and divide the loss by the same number of masked tokens.
_FULLY_SHARD = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from neobert.configuration_neobert import NeoBERTConfig
from neobert.modeling_neobert import NeoBERTForMaskedLM
from neobert.training.optimization import decay_parameter_names

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = NeoBERTForMaskedLM(NeoBERTConfig(**json.loads(sys.argv[1]), vocab_size=500, sparse_prediction=True))
mesh = init_device_mesh("cpu", (world,))
for block in model.model.transformer_encoder:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
assert isinstance(model, FSDPModule) and all(isinstance(parameter, DTensor) for parameter in model.parameters())
decayed = decay_parameter_names(model)
groups = [[parameter for name, parameter in model.named_parameters() if (name in decayed) == kept] for kept in (True, False)]
groups = [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.1, 0.0))]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
losses = []
for step in range(6):
    batches = []
    for micro in range(2):
        generator = torch.Generator().manual_seed(2 * step + micro)
        ids = torch.randint(10, 60, (4, 12 + micro), generator=generator)
        labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, ids, -100)
        batches.append((torch.where(labels != -100, 4, ids), labels))
    masked = sum((labels != -100).sum() for _, labels in batches)
    total = 0.0
    for ids, labels in batches[rank::world]:
        # Gradients are averaged over processes, so each loss counts `world` times.
        loss = model(ids, labels=labels, num_items_in_batch=masked).loss * world
        loss.backward()
        total += loss.detach() / world
    dist.all_reduce(total)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(total.item())
if rank == 0:
    print(json.dumps(losses), flush=True)
dist.barrier()
dist.destroy_process_group()
# What the interpreter takes down after the model is not tested here: a thread of gloo that is still there aborts it now and then.
os._exit(0)
"""  # noqa: E501


def test_fsdp2_matches_a_single_process(folder):
    """Check that training with FSDP2 in two processes has the losses of one process."""
    (folder / "fully_shard.py").write_text(_FULLY_SHARD)
    losses = []
    for processes in (1, 2):
        command = [*_torchrun(processes), "fully_shard.py", json.dumps(MODEL)]
        run = _process(folder, command)
        assert run.returncode == 0, run.stderr[-3000:]
        losses.append(json.loads(run.stdout.strip().splitlines()[-1]))
    assert losses[0][0] - losses[0][-1] > 0.1, (
        "the loss must fall, or the comparison is meaningless"
    )
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
