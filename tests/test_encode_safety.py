"""Pins what `neobert encode` may remove and write over: only what it wrote itself; everything that
a user has in, beside or in place of the output stays."""

import os

import numpy as np
import pytest


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from encode_runs import embed, interrupt_once, make_corpus, make_model_folder, read_parquet  # noqa: F401
from safetensors.numpy import load_file, save_file

from neobert.common.errors import UserError
from neobert.common.runs import locked
from neobert.embeddings import encode_workers
from neobert.embeddings.encode import main


@pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
@pytest.mark.parametrize("format", ["parquet", "safetensors"])
def test_a_damaged_part_is_made_anew(corpus, model_folder, tmp_path, format, damage):
    """A machine that loses its power, or a disk, may cut a file that had its name already."""
    embed(corpus, tmp_path / "out", model_folder, shard_rows=16, format=format)
    path = tmp_path / "out" / f"part-000001.{format}"
    content = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(
        content[:-7] if damage == "cut" else b""
    )
    assert (
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16, format=format)["encoded_rows"]
        == 16
    )
    again = (read_parquet if format == "parquet" else load_file)(path)
    path.write_bytes(content)
    before = (read_parquet if format == "parquet" else load_file)(path)
    assert (
        again[0].equals(before[0])
        if format == "parquet"
        else np.array_equal(again["embeddings"], before["embeddings"])
    )


def test_a_strangers_file_with_the_name_of_a_part(corpus, model_folder, tmp_path):
    embed(corpus, tmp_path / "out", model_folder, shard_rows=16)
    path = tmp_path / "out" / "part-000001.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"mine": [1]}), path)
    content = path.read_bytes()
    with pytest.raises(UserError, match="part-000001.parquet is not a part of this run; move it"):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16)
    with pytest.raises(UserError, match=r"changed since \(part-000001.parquet\)"):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16, overwrite=True)
    assert path.read_bytes() == content


# ------------------------------------------------------------------------------------------------
# --overwrite


def files_of(folder):
    return {
        str(path.relative_to(folder)): path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    "output",
    ["corpus.jsonl", ".", "link", "to_corpus.jsonl", "mine", "mine.parquet", "mine.safetensors"],
)
def test_overwrite_removes_nothing_that_encode_did_not_write(
    tmp_path, corpus, model_folder, output
):
    (tmp_path / "link").symlink_to(".")
    (tmp_path / "to_corpus.jsonl").symlink_to("corpus.jsonl")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "mine.parquet")
    save_file({"a": np.zeros(1)}, tmp_path / "mine.safetensors")
    before = files_of(tmp_path)
    with pytest.raises(
        UserError, match="the input|was not written by neobert encode|holds other files"
    ):
        main([str(corpus), str(tmp_path / output), "--model", str(model_folder), "--overwrite"])
    assert files_of(tmp_path) == before


def test_overwrite_of_a_folder_with_files_of_the_user(tmp_path, corpus, model_folder):
    """Spark's files begin as ours do."""
    arguments = [
        str(corpus),
        str(tmp_path / "out"),
        "--model",
        str(model_folder),
        "--shard-rows",
        "40",
    ]
    assert main(arguments) == 0
    mine = {"notes.txt": b"mine", "part-00000-6ba7b810.snappy.parquet": b"mine too"}
    for name, content in mine.items():
        (tmp_path / "out" / name).write_bytes(content)
    assert main([*arguments, "--normalize", "--overwrite"]) == 0
    parts = {"part-000000.parquet", "part-000001.parquet", "encode.json", "plan.json"}
    assert (
        files_of(tmp_path / "out").items() >= mine.items()
        and files_of(tmp_path / "out").keys() == mine.keys() | parts
    )


@pytest.mark.parametrize("name", ["out", "out.parquet", "out.safetensors"])
def test_overwrite_of_its_own_output(tmp_path, corpus, model_folder, name, monkeypatch):
    """The old output is complete until the new one is, also when the new run is interrupted and
    continued."""
    output = tmp_path / name
    arguments = [str(corpus), str(output), "--model", str(model_folder), "--shard-rows", "40"]
    assert main(arguments) == 0
    old = files_of(output) if output.is_dir() else output.read_bytes()
    write = encode_workers.write_part

    def fail_at_the_second(path, *rest):
        if "000001" in path.name:
            raise KeyboardInterrupt
        write(path, *rest)

    monkeypatch.setattr(encode_workers, "write_part", fail_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--normalize", "--overwrite"])
    kept = output / ".before-overwrite" if name == "out" else output
    assert (files_of(kept) if kept.is_dir() else kept.read_bytes()) == old, (
        "the old output went before the new one was complete"
    )
    monkeypatch.setattr(encode_workers, "write_part", write)
    assert main([*arguments, "--normalize", "--overwrite"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", name], (
        "something stayed beside the output"
    )
    assert (files_of(output) if output.is_dir() else output.read_bytes()) != old


def test_what_a_user_has_beside_the_output_stays(corpus, model_folder, tmp_path):
    """A folder with the name that a replaced output would have, and a hidden file whose name begins
    as a left-over's does."""
    embed(corpus, tmp_path / "old", model_folder)
    # an output that the user keeps under this name
    (tmp_path / "old").rename(tmp_path / "out.replaced")
    (tmp_path / ".out.parquet.2024").write_text("mine")
    before = files_of(tmp_path / "out.replaced")
    embed(corpus, tmp_path / "out", model_folder)
    embed(corpus, tmp_path / "out.parquet", model_folder)
    assert (
        files_of(tmp_path / "out.replaced") == before
        and (tmp_path / ".out.parquet.2024").read_text() == "mine"
    )
    embed(corpus, tmp_path / "out", model_folder, normalize=True, overwrite=True)
    assert files_of(tmp_path / "out.replaced") == before


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_has_the_name_of_a_part_and_is_no_file(
    corpus, model_folder, tmp_path, monkeypatch, kind
):
    interrupt_once(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16)
    path = tmp_path / "out" / "part-000001.parquet"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(tmp_path / "out" / "part-000000.parquet")
    with pytest.raises(UserError, match="part-000001.parquet is not a part of this run; move it"):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16)


def test_what_comes_to_the_output_while_the_run_works_stays(
    corpus, model_folder, tmp_path, monkeypatch
):
    output, write = tmp_path / "out.parquet", encode_workers.write_part
    monkeypatch.setattr(
        encode_workers, "write_part", lambda *part: (output.write_text("mine"), write(*part))
    )
    with pytest.raises(UserError, match="out.parquet was not written by neobert encode"):
        embed(corpus, output, model_folder)
    assert output.read_text() == "mine" and [path.name for path in tmp_path.glob(".out*")] == []


def test_another_run_given_up_for_this_one(corpus, model_folder, tmp_path, monkeypatch):
    """Its parts go, and a part that still comes of it, from a rank on another machine, is not taken
    for one of this run."""
    interrupt_once(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16)
    late = (tmp_path / "out" / "part-000001.parquet").read_bytes()
    write = encode_workers.write_part

    def interfered(path, *rest):
        write(path, *rest)
        if "000002" in path.name:
            (path.parent / "part-000001.parquet").write_bytes(late)

    monkeypatch.setattr(encode_workers, "write_part", interfered)
    with pytest.raises(UserError, match="part-000001.parquet is not a part of this run"):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16, normalize=True, overwrite=True)


def test_the_second_of_two_runs_moves_nothing(corpus, model_folder, tmp_path):
    """It set the old output aside before it asked for the lock, and the first run went on with its
    parts."""
    embed(corpus, tmp_path / "out", model_folder)
    before = files_of(tmp_path / "out")
    with locked(tmp_path / "out"), pytest.raises(UserError, match="is in use by another run"):
        embed(corpus, tmp_path / "out", model_folder, normalize=True, overwrite=True)
    assert files_of(tmp_path) == {
        **files_of(tmp_path),
        **{f"out/{name}": content for name, content in before.items()},
    }
    assert (
        not (tmp_path / "out.before-overwrite").exists()
        and not (tmp_path / "out" / ".before-overwrite").exists()
    )


def test_files_in_the_folder_of_parts_stay(corpus, model_folder, tmp_path, capsys, monkeypatch):
    """The parts of a single file are removed at its end, and nothing else."""
    write = encode_workers.write_part
    monkeypatch.setattr(
        encode_workers,
        "write_part",
        lambda path, *rest: ((path.parent / "notes.txt").write_text("mine"), write(path, *rest)),
    )
    embed(corpus, tmp_path / "out.parquet", model_folder)
    assert (tmp_path / "out.parquet.parts" / "notes.txt").read_text() == "mine" and (
        tmp_path / "out.parquet"
    ).is_file()
    assert "out.parquet is complete; " in capsys.readouterr().err


def test_outputs_that_cannot_be(corpus, model_folder, tmp_path):
    (tmp_path / "folder.parquet").mkdir()
    before = files_of(tmp_path)
    for output, message in (
        (tmp_path / "folder.parquet", "is a folder, but .parquet names a file"),
        (model_folder / "vectors.safetensors", "is inside the input"),
        (model_folder, "is the input .* itself"),
    ):
        with pytest.raises(UserError, match=message):
            embed(corpus, output, model_folder)
    assert files_of(tmp_path) == before


def test_the_same_command_again(corpus, model_folder, tmp_path, capsys):
    arguments = [str(corpus), str(tmp_path / "out.parquet"), "--model", str(model_folder)]
    assert main(arguments) == main(arguments) == 0, (
        "a finished file is left alone by the command that wrote it"
    )
    assert "finished already with these settings" in capsys.readouterr().out
    with pytest.raises(
        UserError, match="out.parquet exists already; choose another name, or give --overwrite"
    ):
        main([*arguments, "--normalize"])


def test_tables_made_of_an_output_are_not_its_own(corpus, model_folder, tmp_path):
    """They keep the mark in the metadata, but not the rows and columns."""
    embed(corpus, tmp_path / "out.parquet", model_folder)
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    pyarrow.parquet.write_table(
        table.append_column("label", pyarrow.array([1] * len(table))), tmp_path / "labelled.parquet"
    )
    pyarrow.parquet.write_table(table.slice(0, 7), tmp_path / "short.parquet")
    before = files_of(tmp_path)
    for name in ("labelled.parquet", "short.parquet"):
        for overwrite in (False, True):  # --overwrite is not offered where it would be refused
            with pytest.raises(
                UserError, match="was not written by neobert encode, so it is not replaced"
            ):
                embed(corpus, tmp_path / name, model_folder, overwrite=overwrite)
    assert files_of(tmp_path) == before


def test_an_interrupted_overwrite_continues(corpus, model_folder, tmp_path, monkeypatch):
    embed(corpus, tmp_path / "out", model_folder, shard_rows=16)
    written = interrupt_once(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        embed(corpus, tmp_path / "out", model_folder, shard_rows=16, overwrite=True, normalize=True)
    embed(corpus, tmp_path / "out", model_folder, shard_rows=16, overwrite=True, normalize=True)
    assert len(written) == len(set(written)) == 5, f"parts were made twice: {written}"
    assert not list((tmp_path / "out").glob(".*")), "what was replaced stays behind"
