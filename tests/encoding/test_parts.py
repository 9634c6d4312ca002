"""Tests of the parts of `neobert encode`: interruptions, shards, blocks, and file systems.

The output always has the bytes of a single uninterrupted process.
"""

import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields

import pytest


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import fsspec
import numpy as np
import pyarrow.parquet
from helpers.contract_runs import command
from helpers.encode_runs import (
    bits,
    embed,
    make_encoder,  # noqa: F401
    make_model_folder,  # noqa: F401
    read_parquet,
    texts_of_many_lengths,
    truncation_of,
)
from helpers.jsonl import write_jsonl
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from neobert.common.errors import UserError
from neobert.encoding import parts
from neobert.encoding.folder import Folder, create_file_once, remove_stale_temporary_files
from neobert.encoding.manifest import Manifest


@pytest.fixture(name="folder")
def make_folder(tmp_path):
    """Write three input files in two directories, of 5, 3 and 2 parts of 8 rows each."""
    folder = tmp_path / "corpus"
    texts = texts_of_many_lengths(70)
    (folder / "more").mkdir(parents=True)
    for name, part in (("a", texts[:40]), ("b", texts[40:58]), ("more/c", texts[58:])):
        write_jsonl(folder / f"{name}.jsonl", [{"id": text, "text": text} for text in part])
    return folder


def command_line(folder, output, model_folder, *options):
    """Return the arguments of `neobert encode` as a separate process."""
    return ["encode", folder, output, "--model", model_folder, "--dtype", "float32", *options]


@pytest.mark.slow
@pytest.mark.parametrize("output", ["out", "out.parquet"])
def test_killed_run_resumes_with_identical_files(folder, model_folder, encoder, tmp_path, output):
    """A run that is killed and resumed many times writes the files of an uninterrupted run.

    Each process is killed seven writes later than the one before it. A complete part has the final
    bytes at any time.
    """
    uninterrupted = tmp_path / "alone"
    killed = tmp_path / "killed"
    for directory in (uninterrupted, killed):
        directory.mkdir()
    embed(folder, uninterrupted / output, model_folder, encoder, rows=8)
    argv = command_line(folder, killed / output, model_folder, "--rows", "8")

    step = 1
    code = 9
    while code == 9:
        code, printed, _ = command(argv, killed, tmp_path / "log", kill_at=step)
        if output == "out" and (killed / "out").is_dir():
            complete_parts = bits(killed / "out", "[!._]*")
            assert complete_parts.items() <= bits(uninterrupted / "out").items(), (
                f"an incomplete part is visible after step {step}"
            )
        step += 7

    assert code == 0 and step > 15, printed
    assert bits(killed) == bits(uninterrupted)


@pytest.mark.slow
def test_eight_shards_at_once_with_random_kills(folder, model_folder, encoder, tmp_path):
    """Processes of eight shards, of which some are killed, write the files of a single process."""
    embed(folder, tmp_path / "alone", model_folder, encoder, rows=2)
    out = tmp_path / "out"
    generator = random.Random(0)

    def work(number, step):
        argv = command_line(folder, out, model_folder, "--rows", "2", "--shard", f"{number % 8}/8")
        return command(argv, out, tmp_path / f"log-{number}", kill_at=step)[0]

    with ThreadPoolExecutor(4) as pool:
        codes = pool.map(work, range(16), [generator.randrange(1, 14) for _ in range(16)])
    assert list(codes).count(9) > 4

    for shard in range(8):
        summary = embed(folder, out, model_folder, encoder, rows=2, shard=f"{shard}/8")
    assert summary.missing == [] and summary.texts == 70
    assert bits(out) == bits(tmp_path / "alone")


def test_shard_summary_names_incomplete_files(folder, model_folder, encoder, tmp_path):
    """The summary of a shard names the incomplete files, and shards write the bytes of one process.

    A missing part is written again by any shard that contains it.
    """
    summaries = [
        embed(folder, tmp_path / "out", model_folder, encoder, rows=8, shard=f"{number}/2")
        for number in range(2)
    ]
    assert summaries[0].missing == ["a.jsonl", "b.jsonl", "more/c.jsonl"]
    assert summaries[1].missing == []

    texts = [summary.encoded_texts for summary in summaries]
    assert sum(texts) == 70 and min(texts) > 25

    before = bits(tmp_path / "out")
    (tmp_path / "out" / "b-00001.parquet").unlink()
    embed(folder, tmp_path / "out", model_folder, encoder, rows=8, shard="2/3")
    embed(folder, tmp_path / "out", model_folder, encoder, rows=8, shard="1/2")
    assert bits(tmp_path / "out") == before


def make_manifest(dtype):
    """Return a manifest that only has a dtype."""
    values = {item.name: None for item in fields(Manifest)}
    return Manifest(**{**values, "dtype": dtype})


@pytest.mark.parametrize("url", ["{}/out", "memory://encode/out"])
def test_first_process_determines_the_manifest(tmp_path, url):
    """The first process writes the manifest, and later processes get its settings."""
    folders = [Folder(url.format(tmp_path)) for _ in range(2)]
    assert folders[0].write_manifest(make_manifest("bfloat16")).dtype == "bfloat16"
    assert folders[1].write_manifest(make_manifest("float32")).dtype == "bfloat16"
    assert folders[0].names() == ["_metadata.json"]
    folders[0].remove(f"{folders[0].url}.parquet")


def test_very_long_rows_are_divided_into_blocks(model_folder, encoder, tmp_path, monkeypatch):
    """Long rows are written in several blocks, which form the same part as a single block.

    A block ends with the row that exceeds the limit. Each block is a row group of the parquet file.
    """
    texts = texts_of_many_lengths(30)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    summaries = [embed(tmp_path / "a.jsonl", tmp_path / "one", model_folder, encoder)]
    monkeypatch.setattr(parts, "_BLOCK_CHARACTERS", 300)
    summaries.append(embed(tmp_path / "a.jsonl", tmp_path / "many", model_folder, encoder))

    sizes = [0]
    characters = 0
    for text in texts:
        if characters > 300:
            sizes.append(0)
            characters = 0
        sizes[-1] += 1
        characters += len(text)

    file = pyarrow.parquet.ParquetFile(tmp_path / "many" / "a-00000.parquet")
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert groups == sizes
    assert 5 < len(sizes) < 25

    tables = [pyarrow.parquet.read_table(tmp_path / name) for name in ("one", "many")]
    assert tables[0].equals(tables[1])
    expected = truncation_of(model_folder, texts)
    assert expected["texts"] > 2
    assert [asdict(summary.truncation) for summary in summaries] == [expected, expected]


def test_a_pooling_without_the_prompt(model_folder, tmp_path):
    """The pooling of a sentence encoder may exclude the tokens of the prompt."""
    transformer = Transformer(str(model_folder), max_seq_length=64)
    pooling = Pooling(64, "mean", include_prompt=False)
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))

    texts = texts_of_many_lengths(10)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])

    embed(tmp_path / "a.jsonl", tmp_path / "out", tmp_path / "model", prompt="find the cat: ")
    _, embeddings = read_parquet(tmp_path / "out")
    expected = model.encode(texts, prompt="find the cat: ")
    np.testing.assert_allclose(embeddings, expected, atol=1e-5 * np.abs(expected).max())


def test_outputs_of_other_versions_are_refused(folder, model_folder, encoder, tmp_path):
    """Outputs of other versions, with another file name or other fields, are refused."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "encode.json").write_text("{}")
    with pytest.raises(UserError, match="must be new or an output of neobert encode"):
        embed(folder, tmp_path / "out", model_folder, encoder)

    embed(folder, tmp_path / "new", model_folder, encoder)
    manifest = json.loads((tmp_path / "new" / "_metadata.json").read_text())
    del manifest["dimension"]
    (tmp_path / "new" / "_metadata.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="new must have been written by this version of neobert"):
        embed(folder, tmp_path / "new", model_folder, encoder)


@pytest.mark.parametrize("source", ["", "a-00000.parquet"])
def test_temporary_files_of_unfinished_files_are_kept(tmp_path, source):
    """A temporary file is removed if its file exists, and may be in use otherwise.

    `source` is the file whose temporary files are removed, or "" for all files of the directory.
    """
    filesystem = fsspec.filesystem("file")
    names = ["a-00000.parquet", "a-00001.parquet", "x.y[1]-00000.parquet", "_metadata.json"]
    temporary = {}
    for name in names:
        # The process would be killed at the end of the block.
        with create_file_once(filesystem, str(tmp_path / name)):
            (path,) = tmp_path.glob(".*.tmp")
            temporary[name] = path.name
        (tmp_path / name).unlink()
    for name in temporary.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")

    def remaining():
        return {path.name for path in tmp_path.glob(".*.tmp")}

    remove_stale_temporary_files(filesystem, f"{tmp_path}/{source}")
    assert remaining() == set(temporary.values())

    for name in ("a-00000.parquet", "x.y[1]-00000.parquet", "_metadata.json"):
        (tmp_path / name).write_text("x")
    remove_stale_temporary_files(filesystem, f"{tmp_path}/{source}")
    kept = [name for name in names if not (tmp_path / name).exists()] if source == "" else names[1:]
    assert remaining() == {temporary[name] for name in kept}
    assert kept[0] == "a-00001.parquet"


# ------------------------------------------------------------------------------------------------
# file systems


@pytest.mark.parametrize("scheme", ["memory://", "file://"])
def test_urls_of_input_and_output(folder, model_folder, encoder, tmp_path, scheme):
    """Inputs and outputs may be URLs of fsspec, with the same files as on a local disk."""
    embed(folder, tmp_path / "alone", model_folder, encoder, rows=8)
    embed(folder, tmp_path / "alone.parquet", model_folder, encoder, rows=8)

    root = f"{scheme}{tmp_path}/there"
    filesystem = fsspec.filesystem(scheme.rstrip(":/"))
    filesystem.put(str(folder), f"{root}/corpus", recursive=True)

    for name in ("out", "out.parquet"):
        summary = embed(f"{root}/corpus", f"{root}/{name}", model_folder, encoder, rows=8)
        assert summary.missing == [] and summary.encoded_texts == 70
        second_summary = embed(f"{root}/corpus", f"{root}/{name}", model_folder, encoder, rows=8)
        assert second_summary.missing == [] and second_summary.encoded_texts == 0

    for name, content in bits(tmp_path / "alone").items():
        assert filesystem.cat_file(f"{root}/out/{name}") == content
    assert filesystem.cat_file(f"{root}/out.parquet") == (tmp_path / "alone.parquet").read_bytes()
    assert not filesystem.exists(f"{root}/out.parquet.work")

    with pytest.raises(UserError, match="`normalize` must be false as in .*, got true."):
        embed(f"{root}/corpus", f"{root}/out", model_folder, encoder, rows=8, normalize=True)
    filesystem.rm(root, recursive=True)


@pytest.fixture(name="s3")
def make_s3(monkeypatch):
    """Start a local S3 server with a bucket, and yield its file system."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()

    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.setenv(f"AWS_{name}", "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    fsspec.filesystem("s3").mkdir("s3://bucket")
    yield fsspec.filesystem("s3")
    server.stop()


@pytest.mark.slow
def test_killed_run_on_s3_resumes(folder, model_folder, encoder, tmp_path, s3):
    """Two shards on S3 are killed, and the same command completes their output.

    In an object store, too, the first manifest stays, and an output may be a single file.
    """
    embed(folder, tmp_path / "alone", model_folder, encoder, rows=2)
    expected = bits(tmp_path / "alone")
    s3.put(str(folder), "s3://bucket/corpus", recursive=True)
    options = ["--model", str(model_folder), "--dtype", "float32", "--rows", "2"]
    arguments = [sys.executable, "-m", "neobert", "encode", "s3://bucket/corpus", "s3://bucket/out"]

    def part_paths():
        s3.invalidate_cache()
        exists = s3.exists("s3://bucket/out")
        return [path for path in s3.ls("s3://bucket/out") if "_" not in path] if exists else []

    shards = [
        subprocess.Popen(
            [*arguments, *options, "--shard", f"{number}/2"], stderr=subprocess.DEVNULL
        )
        for number in range(2)
    ]

    limit = time.monotonic() + 900
    while len(part_paths()) < 4 and time.monotonic() < limit:
        time.sleep(0.01)
    for process in shards:
        process.kill()
        process.wait()
    assert 4 <= len(part_paths()) < len(expected) - 1, (
        "the shards were not killed while they wrote parts"
    )

    result = subprocess.run([*arguments, *options], capture_output=True, text=True, timeout=900)
    assert result.returncode == 0 and "all parts are complete" in result.stdout, result.stderr[
        -2000:
    ]
    s3.invalidate_cache()
    paths = s3.ls("s3://bucket/out")
    assert {path.rpartition("/")[2]: s3.cat_file(path) for path in paths} == expected

    folders = [Folder("s3://bucket/new") for _ in range(2)]
    manifests = [make_manifest(dtype) for dtype in ("bfloat16", "float32")]
    stored_manifests = [
        folder.write_manifest(manifest) for folder, manifest in zip(folders, manifests)
    ]
    assert [manifest.dtype for manifest in stored_manifests] == ["bfloat16", "bfloat16"]

    summary = embed("s3://bucket/corpus/*.jsonl", "s3://bucket/v.parquet", model_folder, encoder)
    assert summary.texts == 58 and json.loads(s3.cat_file("s3://bucket/out/_metadata.json"))


@pytest.mark.slow
def test_memory_is_constant_for_ten_million_rows(tmp_path):
    """A shard of a large file needs constant memory, although its reader reads the whole file.

    The parts are those of the last of 64 shards. The small file has none of them, the large file
    has 19.
    """
    program = """
import resource, sys
from neobert.common.data import files
from neobert.encoding.parts import read_blocks
for source in sys.argv[1:]:
    (file,) = files(source)
    blocks = read_blocks(file, 8192, lambda part: part % 64 == 63, ["text"], "text")
    rows = sum(len(block.rows) for block in blocks)
    print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    for name, count in (("small", 10**5), ("large", 10**7)):
        with open(tmp_path / f"{name}.txt", "w") as file:
            file.writelines(f"row {i}\n" for i in range(count))
    command = [
        sys.executable,
        "-c",
        program,
        *(str(tmp_path / f"{size}.txt") for size in ("small", "large")),
    ]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert lines[0::2] == ["0", str(19 * 8192)]
    assert int(lines[3]) - int(lines[1]) < 8 * 1024, (
        f"the memory grew from {lines[1]} to {lines[3]} KiB"
    )
