"""Pins examples/encode_ray.py on a local Ray cluster of two actors, one of which is killed on the
way: no row lost or doubled, vectors bit for bit those of one process, and the same command
continues with what is missing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch


pytest.importorskip("ray")
pytest.importorskip("sentence_transformers")
import pyarrow
import pyarrow.parquet
from transformers import AutoTokenizer

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.embeddings import encode
from neobert.embeddings.packed_encoder import PackedEncoder


pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
FILES, ROWS = 6, 300


@pytest.fixture
def world(tmp_path, tokenizer_dir):
    torch.manual_seed(1)
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
    }
    NeoBERTModel(NeoBERTConfig(**config)).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "model")
    (tmp_path / "corpus").mkdir()
    for number in range(FILES):
        texts = [f"text {number} {i} " + "word " * ((7 * i) % 40) for i in range(ROWS)]
        table = pyarrow.table({"id": [number * ROWS + i for i in range(ROWS)], "text": texts})
        pyarrow.parquet.write_table(
            table, tmp_path / "corpus" / f"{number}.parquet", row_group_size=100
        )
    return tmp_path


def command(world, *more):
    script = [
        sys.executable,
        str(ROOT / "examples" / "encode_ray.py"),
        str(world / "corpus"),
        str(world / "out"),
    ]
    return [*script, "--model", str(world / "model"), "--rows", "64", "--dtype", "float32", *more]


def start(world, *more):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    }
    return subprocess.Popen(
        command(world, *more),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def actors():
    """Process ids of the encoders, by the title that Ray gives them."""
    found = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True
    ).stdout.splitlines()
    return [int(line.split()[0]) for line in found if "ray::MapWorker(MapBatches(Encoder))" in line]


def written(world):
    return sorted(path.name for path in (world / "out").glob("[0-9]*.parquet"))


def test_an_actor_dies_and_no_row_is_lost_or_doubled(world):
    before = set(actors())  # of somebody else
    process = start(world, "--actors", "2")
    limit = time.monotonic() + 300
    while not written(world):
        assert time.monotonic() < limit and process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.02)
    mine = sorted(set(actors()) - before)
    assert len(mine) == 2 and len(written(world)) < FILES * 3, (
        "vacuous: there are no two actors at work"
    )
    os.kill(mine[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0 and "18 files, 18 of them by this run" in output, output[-3000:]

    table = pyarrow.concat_tables(
        [pyarrow.parquet.read_table(world / "out" / name) for name in written(world)]
    )
    assert table["id"].to_pylist() == list(range(FILES * ROWS)), (
        "rows are lost, doubled or out of their files"
    )
    torch.set_num_threads(1)
    encoder = PackedEncoder(str(world / "model"), dtype="float32", device="cpu")
    source = pyarrow.parquet.read_table(world / "corpus")["text"].to_pylist()
    groups = [source[start : start + 100] for start in range(0, len(source), 100)]
    expected = np.concatenate(
        [encoder.encode(group[i : i + 64]) for group in groups for i in (0, 64)]
    )
    found = np.array(table["embedding"].to_pylist(), dtype=np.float32)
    assert np.array_equal(found, expected), "the vectors are not, bit for bit, those of one process"

    removed = world / "out" / written(world)[3]
    content = pyarrow.parquet.read_table(removed)
    removed.unlink()
    output, _ = start(world, "--actors", "1").communicate(timeout=400)
    assert "18 files, 1 of them by this run, with 100 rows" in output, output[-3000:]
    assert pyarrow.parquet.read_table(removed).equals(content)
    settings = json.loads((world / "out" / "settings.json").read_text())
    assert settings["dtype"] == "float32"
    output, _ = start(world, "--max-length", "9").communicate(timeout=100)
    assert "holds other files, or a run with other settings; choose a new folder" in output


def test_windows_of_long_texts(world):
    """The same as `neobert encode --long-texts windows` of the same texts."""
    for number in range(1, FILES):
        (world / "corpus" / f"{number}.parquet").unlink()
    options = ["--long-texts", "windows", "--window", "12", "--overlap", "3"]
    output, _ = start(world, *options).communicate(timeout=400)
    assert "3 files, 3 of them by this run, with 300 rows" in output, output[-3000:]
    table = pyarrow.parquet.read_table([world / "out" / name for name in written(world)])
    torch.set_num_threads(1)
    arguments = [str(world / "corpus"), str(world / "alone.parquet"), "--model"]
    arguments += [str(world / "model"), "--dtype", "float32", *options]
    assert encode.main(arguments) == 0
    alone = pyarrow.parquet.read_table(world / "alone.parquet")
    for name in ("id", "start", "end"):
        assert table[name].to_pylist() == alone[name].to_pylist()
    found, expected = (
        np.array(one["embedding"].to_pylist(), dtype=np.float32) for one in (table, alone)
    )
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    stamp = json.loads(table.schema.metadata[b"neobert_vectors"])
    assert stamp == json.loads(alone.schema.metadata[b"neobert_vectors"])
