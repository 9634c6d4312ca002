"""Pins that two processes fine-tune as one: `neobert glue` gives the single process's evaluations
and weights at the same batch size, and
`neobert contrastive` with gathered negatives its losses and weights. They run on the CPU under
torchrun (gloo)."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jsonl import write_jsonl
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTForMaskedLM


for _name in ("accelerate", "datasets", "sklearn", "sentence_transformers"):
    pytest.importorskip(_name)
from safetensors.torch import load_file  # noqa: E402

from neobert import __main__ as cli  # noqa: E402


pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
WORDS = "river stone music paper table winter cold water hard rock sweet sound".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, rows in SST-2's schema that one word decides, and pairs."""
    folder = tmp_path_factory.mktemp("finetuning")
    (folder / "path").mkdir()
    (folder / "path" / "neobert").symlink_to(ROOT)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    NeoBERTForMaskedLM(
        NeoBERTConfig(**sizes, embedding_init_range=0.2, classifier_pooling="mean")
    ).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(ROOT / "tokenizer").save_pretrained(folder / "model")
    draw = random.Random(0)
    sentences = [
        (" ".join([*draw.choices(WORDS, k=draw.randint(3, 9)), "good" if i % 2 else "bad"]), i % 2)
        for i in range(200)
    ]
    rows = [{"sentence": text, "label": label} for text, label in sentences]
    # 160 rows, a tenth held out: 9 whole batches of 16, so that no process repeats rows to fill the
    # last one.
    write_jsonl(folder / "data" / "sst2" / "train.jsonl", rows[:160])
    write_jsonl(folder / "data" / "sst2" / "validation.jsonl", rows[160:])
    # Three rows share a positive: a batch of 8, of one process or of two, must not hold two of
    # them.
    rows = [
        {"anchor": f"{word} number {i}", "positive": f"{i % 24} {word}"}
        for i, word in enumerate(WORDS * 6)
    ]
    write_jsonl(folder / "pairs.jsonl", rows)
    return folder


def both_ways(folder, name, arguments, single, double):
    """Runs `neobert <arguments>` in this process and in two; returns the two output folders."""
    outputs = [folder / f"{name}-one", folder / f"{name}-two"]
    assert cli.main([*arguments, *single, str(outputs[0])]) == 0, (
        f"neobert {name} failed in one process"
    )
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "path"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "--master_port",
        port,
        "-m",
        "neobert",
    ]
    run = subprocess.run(
        [*launcher, *arguments, *double, str(outputs[1])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, f"neobert {name} failed in two processes:\n{run.stderr[-3000:]}"
    return outputs


def assert_same_weights(one, two, start):
    """`start`: the weights before training, whatever prefix their names have."""
    one, two = load_file(one), load_file(two)
    assert one.keys() == two.keys()
    embedding = next(name for name in one if name.endswith("encoder.weight"))
    moved = (one[embedding] - load_file(start)["model.encoder.weight"]).abs().max().item()
    assert moved > 1e-3, "training changed nothing, so this test would be vacuous"
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=1e-2 * moved), (
            f"{name} differs between one and two processes"
        )


def test_glue_in_two_processes(folder):
    arguments = [
        "glue",
        "--task",
        "sst2",
        "--model",
        str(folder / "model"),
        "--data",
        str(folder / "data"),
        "--seeds",
        "1",
        "--num-train-epochs",
        "2",
    ]
    arguments += [
        "--batch_size",
        "16",
        "--learning_rate",
        "3e-3",
        "--head-dropout",
        "0",
        "--output",
    ]
    one, two = both_ways(folder, "glue", arguments, [], [])
    (first,), (second,) = (list(output.glob("*/sst2/*")) for output in (one, two))
    assert first.name == second.name, (
        "The number of processes is not a setting: the same command continues a run on more or "
        "fewer of them."
    )
    results = [json.loads((run / "result.json").read_text()) for run in (first, second)]
    assert [result["environment"]["processes"] for result in results] == [1, 2]
    assert results[0]["evaluations"][-1]["score"] > results[0]["evaluations"][0]["score"], (
        "nothing was learnt, so this test would be vacuous"
    )
    assert results[0]["evaluations"] == results[1]["evaluations"], (
        "Two processes give other scores than one at the same batch size."
    )
    assert_same_weights(
        first / "best" / "model.safetensors",
        second / "best" / "model.safetensors",
        folder / "model" / "model.safetensors",
    )


def test_contrastive_in_two_processes(folder):
    arguments = [
        "contrastive",
        "--model",
        str(folder / "model"),
        "--pairs",
        str(folder / "pairs.jsonl"),
        "--max_steps",
        "6",
    ]
    arguments += [
        "--use_cpu",
        "true",
        "--max_length",
        "32",
        "--logging_steps",
        "1",
        "--learning_rate",
        "1e-3",
    ]
    arguments += ["--per_device_train_batch_size", "4"]
    single = ["--gradient_accumulation_steps", "2", "--output"]
    one, two = both_ways(folder, "contrastive", arguments, single, ["--output"])
    results = [json.loads((output / "result.json").read_text()) for output in (one, two)]
    assert [result["environment"]["processes"] for result in results] == [1, 2]
    losses = [[loss for _, loss in result["training"]["losses"]] for result in results]
    assert len(losses[0]) == 6 and losses[0] == pytest.approx(losses[1], rel=1e-4), (
        "Two batches of a step are those of two processes."
    )
    assert_same_weights(
        one / "model.safetensors", two / "model.safetensors", folder / "model" / "model.safetensors"
    )
