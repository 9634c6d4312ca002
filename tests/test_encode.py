"""Pins `neobert encode` and the packed encoder: vectors equal SentenceTransformer.encode, the
input's order, bounded memory, resuming without repeating work, and the dtype that is fastest on a
CPU."""

import json
import os
import shutil
import socket
import subprocess
import time
import tracemalloc

import numpy as np
import pytest
import torch


pytest.importorskip("sentence_transformers")
pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet
from encode_runs import (
    cut_of,
    embed,
    interrupt_once,
    make_corpus,  # noqa: F401
    make_model_folder,  # noqa: F401
    make_reference,  # noqa: F401
    read_parquet,
    texts_of_many_lengths,
)
from safetensors.numpy import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import (
    AutoTokenizer,
    BatchEncoding,
    BertConfig,
    BertModel,
    RobertaConfig,
    RobertaModel,
)

from neobert import NeoBERTConfig, NeoBERTModel
from neobert.common import loading
from neobert.common.errors import UserError
from neobert.common.loading import position_limit
from neobert.common.runs import changed_settings, run_settings
from neobert.embeddings import encode, encode_workers
from neobert.embeddings.encode_parts import merge_parts
from neobert.embeddings.options import EncodeArguments
from neobert.embeddings.packed_encoder import NotFinite, PackedEncoder


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_packed_vectors_equal_sentence_transformers(model_folder, pooling):
    texts = [*texts_of_many_lengths(40), "", "  padded with blanks  ", "word " * 200]
    encoder = PackedEncoder(
        str(model_folder), pooling=pooling, tokens_per_batch=150, dtype="float32", device="cpu"
    )
    assert encoder.packs, (
        "a NeoBERT with mean or first-token pooling must run packed, or this test compares nothing"
    )
    transformer = Transformer(str(model_folder), max_seq_length=64)
    expected = SentenceTransformer(
        modules=[transformer, Pooling(64, pooling)], device="cpu"
    ).encode(texts, prompt="query: ")
    np.testing.assert_allclose(
        encoder.encode(texts, "query: "), expected, atol=1e-5 * np.abs(expected).max(), rtol=0
    )


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_prompt_that_is_left_out_of_the_pooling(model_folder, tmp_path, pooling):
    """As models of Instructor's kind have it, whose prompt must not count in the mean."""
    modules = [
        Transformer(str(model_folder), max_seq_length=64),
        Pooling(64, pooling, include_prompt=False),
    ]
    model, texts = SentenceTransformer(modules=modules, device="cpu"), texts_of_many_lengths(20)
    encoder = PackedEncoder(model, tokens_per_batch=150, dtype="float32", device="cpu")
    expected = model.encode(texts, prompt="find the cat: ")
    np.testing.assert_allclose(
        encoder.encode(texts, "find the cat: "),
        expected,
        atol=1e-5 * np.abs(expected).max(),
        rtol=0,
    )
    model.save_pretrained(str(tmp_path / "model"))
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    embed(
        tmp_path / "texts.txt",
        tmp_path / "vectors.safetensors",
        tmp_path / "model",
        prompt="find the cat: ",
    )
    found = load_file(tmp_path / "vectors.safetensors")["embeddings"]
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_a_prompt_as_long_as_the_text_may_be(model_folder):
    """SentenceTransformer truncates the prompt too, so that the last token is left for the
    pooling."""
    modules = [
        Transformer(str(model_folder), max_seq_length=8),
        Pooling(64, "mean", include_prompt=False),
    ]
    model, prompt = (
        SentenceTransformer(modules=modules, device="cpu"),
        "find the cat that sat on the mat: ",
    )
    expected = model.encode(["a dog", "the hills"], prompt=prompt)
    assert np.abs(expected).max() > 0, "vacuous: nothing is pooled"
    found = PackedEncoder(model, dtype="float32", device="cpu").encode(
        ["a dog", "the hills"], prompt
    )
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_modules_after_the_pooling_are_applied(reference):
    model = SentenceTransformer(modules=[*reference.children(), Normalize()], device="cpu")
    vectors = PackedEncoder(model, dtype="float32", device="cpu").encode(texts_of_many_lengths(5))
    np.testing.assert_allclose(
        np.linalg.norm(vectors, axis=1), 1, atol=1e-5, err_msg="the Normalize module was left out"
    )


def test_other_encoders_run_through_their_own_modules(tmp_path, tokenizer_dir):
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path)
    encoder = PackedEncoder(str(tmp_path), tokens_per_batch=200, dtype="float32", device="cpu")
    texts = texts_of_many_lengths(30)
    assert not encoder.packs, "only NeoBERT takes packed input on every attention implementation"
    expected = encoder.sentence_transformer.encode(texts)
    np.testing.assert_allclose(encoder.encode(texts), expected, atol=1e-5)


def test_batches_hold_the_token_budget_and_every_text_once(reference):
    encoder = PackedEncoder(reference, tokens_per_batch=100, dtype="float32", device="cpu")
    lengths = np.array([3, 99, 250, 40, 40, 40, 1, 100])
    batches = list(encoder.batches(lengths))
    assert sorted(np.concatenate(batches)) == list(range(8)), (
        "every text belongs to exactly one batch"
    )
    assert all(lengths[batch].sum() <= 100 or len(batch) == 1 for batch in batches), (
        "a batch went over its token budget"
    )
    assert len(batches) == 5, (
        f"greedy packing of {lengths} by length needs 5 batches, not {len(batches)}"
    )


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batches_have_few_numbers_of_tokens(model_folder, dtype, pooling, monkeypatch):
    """oneDNN builds its kernels in 16 bits anew for each; in float32 rows are added to a multiple
    of 16, with which a text has the same bits in every batch. What is added changes no vector."""
    encoder = PackedEncoder(str(model_folder), pooling=pooling, dtype=dtype, device="cpu")
    tokens, seen = [np.arange(5, 5 + length) for length in (1, 2, 20, 30, 40) * 12], []
    alone = np.concatenate([encoder.embed(tokens[start : start + 5]) for start in range(0, 60, 5)])
    model, forward = encoder.sentence_transformer[0].auto_model, NeoBERTModel.forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, **given: seen.append(given["input_ids"].shape[1]) or forward(self, **given),
    )
    found = encoder.embed(tokens)
    encoder.embed(tokens[:5])
    assert seen == ([1152, 93] if dtype == "bfloat16" else [1120, 96])
    np.testing.assert_allclose(
        found, alone, atol=(1e-5 if dtype == "float32" else 2e-2) * np.abs(alone).max(), rtol=0
    )


def test_padding_counts_in_the_budget_of_a_model_that_does_not_pack(reference, monkeypatch):
    encoder = PackedEncoder(reference, tokens_per_batch=50, dtype="float32", device="cpu")
    monkeypatch.setattr(encoder, "_packed_pooling", None)
    lengths = np.array([40, 10, 10, 25, 10, 40])
    batches = [sorted(lengths[batch]) for batch in encoder.batches(lengths)]
    assert batches == [[10, 10, 10], [25], [40], [40]], (
        "a batch of n texts costs n times its longest"
    )


def test_the_length_of_a_sentence_encoder_is_its_own(model_folder, tmp_path):
    modules = [Transformer(str(model_folder), max_seq_length=20), Pooling(64, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path))
    for given, length in ((None, 20), (16, 16), (40, 40), (1000, 64)):
        encoder = PackedEncoder(str(tmp_path), max_length=given, dtype="float32", device="cpu")
        assert encoder.max_length == length == len(encoder.tokenize(["word " * 200])[0])


def test_memory_does_not_grow_with_the_corpus(model_folder, tmp_path, monkeypatch):
    """What Python and numpy hold after each of 60 windows; the noise of the C allocator is not in
    it."""
    path, held, write = tmp_path / "corpus.jsonl", [], encode_workers.write_part
    path.write_text(
        "".join(json.dumps({"id": i, "text": f"{i} {'word ' * 200}"}) + "\n" for i in range(1200))
    )

    def write_and_measure(*part):
        write(*part)
        held.append(tracemalloc.get_traced_memory()[0] / 2**10)

    monkeypatch.setattr(encode_workers, "write_part", write_and_measure)
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu")
    tracemalloc.start()
    embed(path, tmp_path / "out.parquet", model_folder, shard_rows=20, encoder=encoder)
    tracemalloc.stop()
    growth = max(held[50:]) - max(held[5:15])
    assert len(held) == 60 and growth < 150, (
        f"900 texts of 1 KiB each, long written, cost {growth:.0f} KiB"
    )


@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
def test_one_output_file_in_the_order_of_the_input(
    corpus, model_folder, reference, tmp_path, suffix
):
    output = tmp_path / f"vectors.{suffix}"
    embed(corpus, output, model_folder, shard_rows=16, tokens_per_batch=128)
    expected = reference.encode(texts_of_many_lengths(70))
    if suffix == "parquet":
        table, vectors = read_parquet(output)
        assert table["id"].to_pylist() == [f"row-{i}" for i in range(70)], (
            "rows are not in the order of the input"
        )
    else:
        vectors = load_file(output)["embeddings"]
    np.testing.assert_allclose(vectors, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["corpus.jsonl", output.name]
    ), "parts were left behind"


def test_an_interrupted_run_continues_with_the_missing_parts(
    corpus, model_folder, tmp_path, monkeypatch
):
    whole = tmp_path / "whole"
    embed(corpus, whole, model_folder, shard_rows=16)
    written = interrupt_once(monkeypatch, 2)
    folder = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        embed(corpus, folder, model_folder, shard_rows=16)
    assert len(list(folder.glob("part-*"))) == 2, (
        "the finished parts of an interrupted run must stay"
    )
    ended = subprocess.Popen(["true"])
    ended.wait()
    (folder / f".part-000002.parquet.{socket.gethostname()}-{ended.pid}-abcdefgh").write_bytes(
        b"what kill -9 leaves"
    )
    summary = embed(corpus, folder, model_folder, shard_rows=16)
    assert len(set(written)) == len(written) == summary["parts"] == 5, (
        f"parts were encoded twice or not at all: {written}"
    )
    cut = json.loads((folder / "encode.json").read_text())["finished"]["cut"]
    assert cut == summary["cut"] == cut_of(model_folder, texts_of_many_lengths(70)), (
        "texts that were cut before the interrupt are not counted"
    )
    assert cut["texts"] > 5, "vacuous: no text was cut"
    assert not list(folder.glob(".*")), "left-overs of the killed run"
    for part in whole.glob("part-*"):
        assert np.array_equal(read_parquet(part)[1], read_parquet(folder / part.name)[1]), (
            f"{part.name} differs after resuming"
        )
    with pytest.raises(UserError, match="normalize"):
        embed(corpus, folder, model_folder, shard_rows=16, normalize=True)


@pytest.mark.parametrize("options", [[], ["--max-length", "20", "--prompt", "find: "]])
def test_texts_that_are_cut_are_counted(corpus, model_folder, tmp_path, capsys, options):
    argv = [
        str(corpus),
        str(tmp_path / "out.parquet"),
        "--model",
        str(model_folder),
        "--dtype",
        "float32",
        "--keep",
        "n",
        *options,
    ]
    assert encode.main(argv) == 0
    texts = [("find: " if options else "") + text for text in texts_of_many_lengths(70)]
    found = cut_of(model_folder, texts, 20 if options else 64)
    told = (
        f"; {found['texts']} texts cut by {found['tokens']:,} tokens, the longest has "
        f"{found['longest']}\n"
    )
    assert capsys.readouterr().out.endswith(told) and found["texts"] > 5
    assert json.loads(
        pyarrow.parquet.read_metadata(tmp_path / "out.parquet").metadata[b"neobert_cut"]
    ) == list(found.values())


def test_tokens_that_are_cut_are_counted_with_any_tokenizer(reference, model_folder):
    texts = ["word " * 200, "a [SEP] b " * 60, "", "a cat"]
    encoder, found = PackedEncoder(reference, dtype="float32", device="cpu"), []
    kept = encoder.tokenize(texts, "find: ", found)
    assert (
        found == [cut_of(model_folder, [("find: " + text).strip()])["longest"] for text in texts]
        and len(kept[0]) == 64 < found[0]
    )
    fast, found = encoder._tokenizer, []
    # as a tokenizer in Python answers
    encoder._tokenizer = lambda *given, **options: BatchEncoding(fast(*given, **options).data)
    encoder.tokenize(texts, "find: ", found)
    assert found == [cut_of(model_folder, [("find: " + text).strip()])["longest"] for text in texts]


def test_other_weights_in_the_same_folder_do_not_continue_a_run(corpus, model_folder, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model_folder, copy)
    embed(corpus, tmp_path / "out", copy, shard_rows=16)
    model = NeoBERTModel.from_pretrained(copy)
    torch.nn.init.normal_(model.layer_norm.weight)
    model.save_pretrained(copy)
    with pytest.raises(UserError, match=r"holds a run with other settings \(model_digest "):
        embed(corpus, tmp_path / "out", copy, shard_rows=16)


CHANGES = {
    "text_column": "id",
    "keep": ["n"],
    "format": "safetensors",
    "prompt_name": "query",
    "prompt": "q: ",
    "pooling": "cls",
    "max_length": 16,
    "normalize": True,
    "dtype": "bfloat16",
    "output_dtype": "float16",
    "shard_rows": 5,
    "shard_characters": 500,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_begun_run_goes_on_with_the_same_settings_alone(model_folder, name):
    def settings(**more):
        return run_settings(
            EncodeArguments(source="corpus.jsonl", output="out", model=str(model_folder), **more)
        )

    assert settings() == settings(device="cpu", tokens_per_batch=9, processes=2, overwrite=True), (
        "these change no vector"
    )
    assert changed_settings(settings(), settings(**{name: CHANGES[name]})) == [name]


@pytest.mark.parametrize("change", ["time", "swapped", "removed"])
def test_a_run_goes_on_with_the_same_input_alone(model_folder, tmp_path, monkeypatch, change):
    """The windows are places in the files: two files that change their names give rows twice, and
    others not at all."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": f"{name} {i}"}) + "\n" for i in range(20))
        )
    interrupt_once(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        embed(folder, tmp_path / "out", model_folder, shard_rows=10)
    if change == "time":
        os.utime(folder / "a.jsonl", (1, 1))
    elif change == "removed":
        (folder / "b.jsonl").unlink()
    else:
        (folder / "a.jsonl").rename(folder / "c")
        (folder / "b.jsonl").rename(folder / "a.jsonl")
        (folder / "c").rename(folder / "b.jsonl")
    with pytest.raises(UserError, match=r"other settings \(input "):
        embed(folder, tmp_path / "out", model_folder, shard_rows=10)


@pytest.mark.parametrize("output", ["out", "out.parquet"])
def test_an_input_that_gets_shorter_while_the_run_works(
    corpus, model_folder, tmp_path, monkeypatch, output
):
    lines, make_plan = corpus.read_text().splitlines(keepends=True), encode.make_plan

    def shorten(*given):
        plan = make_plan(*given)
        corpus.write_text("".join(lines[:40]))
        return plan

    monkeypatch.setattr(encode, "make_plan", shorten)
    with pytest.raises(UserError, match="fewer rows than when the run began"):
        embed(corpus, tmp_path / output, model_folder, shard_rows=16)
    assert not (tmp_path / "out.parquet").exists()


def test_a_loaded_encoder_is_used_as_it_is(corpus, model_folder, reference, tmp_path, monkeypatch):
    encoder = PackedEncoder(reference, dtype="float32", device="cpu")
    monkeypatch.setattr(encode_workers.PackedEncoder, "from_arguments", None)  # nothing is loaded
    embed(corpus, tmp_path / "out.safetensors", model_folder, encoder=encoder)
    expected = reference.encode(texts_of_many_lengths(70))
    np.testing.assert_allclose(
        load_file(tmp_path / "out.safetensors")["embeddings"],
        expected,
        atol=1e-5 * np.abs(expected).max(),
    )


def test_no_text_is_longer_than_the_positions_of_the_model(tmp_path, tokenizer_dir):
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    BertModel(BertConfig(**small, max_position_embeddings=40)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path)
    encoder = PackedEncoder(str(tmp_path), max_length=1024, dtype="float32", device="cpu")
    assert position_limit(RobertaModel(RobertaConfig(**small, max_position_embeddings=42))) == 40, (
        "RoBERTa's positions start at 2"
    )
    assert encoder.max_length == 40, (
        "a recipe's 1,024 tokens must not run past the positions of a baseline"
    )
    assert encoder.encode(["word " * 300]).shape == (1, 32)


def test_merged_safetensors_is_what_the_library_reads(tmp_path):
    from safetensors.numpy import save_file

    arrays = [np.random.default_rng(i).normal(size=(3 + i, 5)).astype(np.float16) for i in range(3)]
    for i, array in enumerate(arrays):
        save_file({"embeddings": array}, tmp_path / f"{i}.safetensors")
    merge_parts(
        [tmp_path / f"{i}.safetensors" for i in range(3)],
        tmp_path / "all.safetensors",
        {"neobert": "encode"},
    )
    merged = load_file(tmp_path / "all.safetensors")["embeddings"]
    assert merged.dtype == np.float16 and np.array_equal(merged, np.concatenate(arrays))


RATES = {
    # GFLOP/s a core: AMX with FP16; AMX; AVX-512 with FP16 as fast as float32; no 16 bits; 16 bits
    # that are slow alike.
    "float16": {"float32": 100, "float16": 711, "bfloat16": 800},
    "bfloat16": {"float32": 140, "float16": 140, "bfloat16": 990},
    "float32": {"float32": 140, "float16": 270, "bfloat16": 150},
    "float32 ": {"float32": 150, "float16": 13, "bfloat16": 13},
}


@pytest.mark.parametrize("name", RATES)
def test_the_fastest_dtype_of_a_cpu(name, monkeypatch, capsys):
    loading._fastest_on_cpu.cache_clear()
    monkeypatch.setattr(
        loading, "matrix_rates", lambda: {dtype: 1e9 * rate for dtype, rate in RATES[name].items()}
    )
    assert loading.choose_dtype("auto", "cpu") == getattr(torch, name.strip())
    message = capsys.readouterr().err
    assert (
        f"dtype {name.strip()}, by the matrix products" in message
        and f"float32 {RATES[name]['float32']}" in message
    )
    assert loading.choose_dtype("float32", "cpu") == torch.float32 and not capsys.readouterr().err
    loading._fastest_on_cpu.cache_clear()


def test_the_rates_are_measured_in_a_moment():
    start, threads = time.process_time(), torch.get_num_threads()
    rates = loading.matrix_rates()
    assert time.process_time() - start < 2, "it must not hold up a command, on the slowest of CPUs"
    assert (
        torch.get_num_threads() == threads
        and rates.keys() == {"float32", "float16", "bfloat16"}
        and min(rates.values()) > 1e6
    )


def test_a_run_keeps_the_dtype_that_it_began_with(corpus, model_folder, tmp_path, monkeypatch):
    """A measurement that turns out otherwise, on another machine, must not give one output two
    precisions."""
    monkeypatch.setattr(loading, "_fastest_on_cpu", lambda: "bfloat16")
    embed(corpus, tmp_path / "out", model_folder, dtype="auto", shard_rows=16)
    path = tmp_path / "out" / "part-000002.parquet"
    before = pyarrow.parquet.read_table(path)
    path.unlink()
    monkeypatch.setattr(loading, "_fastest_on_cpu", lambda: "float32")
    embed(corpus, tmp_path / "out", model_folder, dtype="auto", shard_rows=16)
    assert pyarrow.parquet.read_table(path).equals(before)
    assert (
        json.loads((tmp_path / "out" / "encode.json").read_text())["environment"]["dtype"]
        == "bfloat16"
    )


def test_the_text_of_a_vector_that_is_not_finite_is_the_one_named(reference, monkeypatch):
    encoder = PackedEncoder(reference, dtype="float32", device="cpu")
    values = {7: 1.0, 8: float("inf"), 9: float("nan")}
    monkeypatch.setattr(
        encoder,
        "_embed_packed",
        lambda batch: torch.tensor([[values[ids[0]]] * encoder.width for ids in batch]),
    )
    with pytest.raises(
        NotFinite, match="not finite in float32; the model's weights are damaged"
    ) as caught:
        encoder.embed(
            [np.full(length, token) for length, token in ((9, 7), (5, 7), (3, 8), (2, 9))]
        )
    assert caught.value.index == 2, "the first of those that are not finite, in the order given"


def test_a_vector_that_is_not_finite_is_named(corpus, tmp_path, tokenizer_dir):
    """float16 ends at 65,504, and the residual stream of a trained encoder may be larger."""
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
    }
    model = NeoBERTModel(NeoBERTConfig(**config))
    with torch.no_grad():
        model.encoder.weight[2000:].fill_(3e5)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "model")
    assert (
        embed(corpus, tmp_path / "float32.parquet", tmp_path / "model", dtype="float32")["rows"]
        == 70
    )
    with pytest.raises(
        UserError,
        match=(
            r"corpus.jsonl, line \d+: the vector is not finite in float16; give --dtype "
            r"float32, or bfloat16"
        ),
    ):
        embed(corpus, tmp_path / "float16.parquet", tmp_path / "model", dtype="float16")
    assert not (tmp_path / "float16.parquet").exists()
