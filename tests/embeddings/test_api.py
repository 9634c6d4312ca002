"""Tests of the methods of `PackedEncoder`: they return the results of sentence-transformers."""

import copy
import doctest
import inspect
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch


pytest.importorskip("sentence_transformers")

import sentence_transformers
from helpers.encode_runs import make_model_folder, texts_of_many_lengths  # noqa: F401
from helpers.paths import ROOT
from packaging.version import Version
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

import neobert
from neobert import PackedEncoder
from neobert.common.errors import UserError
from neobert.embeddings.packed_encoder import quantize_embeddings


TEXTS = texts_of_many_lengths(20)
PROMPTS = {"query": "find: ", "passage": "text: ", "other": "other: "}


@pytest.fixture(scope="module", name="pair")
def make_pair(model_folder):
    """Return a SentenceTransformer with prompts, and the PackedEncoder of the same model."""
    transformer = Transformer(str(model_folder), max_seq_length=64)
    modules = [transformer, Pooling(64, "mean")]
    model = SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu")
    return model, PackedEncoder(model, device="cpu")


def close(embeddings, expected):
    """Check that embeddings are equal, except for rounding errors."""
    np.testing.assert_allclose(embeddings, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"prompt_name": "other"},
        {"prompt": "some: "},
        {"prompt": "some: ", "prompt_name": "other"},
        {"normalize_embeddings": True},
        {"truncate_dim": 10},
        {"truncate_dim": 10, "normalize_embeddings": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
def test_embeddings_match_sentence_transformers(pair, method, arguments):
    model, encoder = pair
    expected = getattr(model, method)(TEXTS, **arguments)
    close(getattr(encoder, method)(TEXTS, **arguments), expected)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_precisions_match_sentence_transformers(pair, precision):
    model, encoder = pair
    expected = model.encode(TEXTS, precision=precision)
    embeddings = encoder.encode(TEXTS, precision=precision)
    assert embeddings.dtype == expected.dtype and embeddings.shape == expected.shape
    # A value at the boundary between two codes may be rounded up or down.
    assert (embeddings != expected).mean() < 0.01


@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
def test_no_texts_have_the_dtype_and_the_width_of_the_precision(pair, precision):
    _, encoder = pair
    expected = encoder.encode(TEXTS, precision=precision)
    embeddings = encoder.encode([], precision=precision)
    assert embeddings.dtype == expected.dtype and embeddings.shape == (0, expected.shape[1])


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_int8_is_that_of_version_6_and_clips(precision):
    """Codes equal those of sentence-transformers 6, also of values outside of the ranges."""
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    generator = np.random.default_rng(0)
    embeddings = generator.standard_normal((300, 24)).astype(np.float32)
    # A dimension with a single value has steps of 0.
    embeddings[:, 3] = 0.25
    ranges = np.stack([embeddings[:50].min(axis=0), embeddings[:50].max(axis=0)])

    low, high = (np.iinfo(precision).min, np.iinfo(precision).max)
    codes = quantize_embeddings(embeddings, precision, ranges)
    assert (codes[embeddings < ranges[0]] == low).all()
    assert (codes[embeddings > ranges[1]] == high).all()

    for argument in (ranges, ranges.astype(np.float64), None):
        actual = quantize_embeddings(embeddings, precision, argument)
        assert actual.dtype == precision
        # Version 5 computes other codes.
        if Version(sentence_transformers.__version__) >= Version("6"):
            expected = quantization.quantize_embeddings(embeddings, precision, argument)
            np.testing.assert_array_equal(actual, expected)


def test_precisions_do_not_use_the_library(monkeypatch):
    """Version 5 does not clip, and cannot pack 12 dimensions, so its function is not called."""
    quantization = pytest.importorskip("sentence_transformers.util.quantization")
    monkeypatch.setattr(quantization, "quantize_embeddings", None)
    embeddings = np.array([[-9.0], [0.0], [9.0]], np.float32)
    ranges = np.array([[-1.0], [1.0]], np.float32)
    assert quantize_embeddings(embeddings, "int8", ranges).tolist() == [[-128], [-1], [127]]
    with pytest.raises(UserError, match="ranges of int8 must come from at least 2 embeddings"):
        quantize_embeddings(embeddings[:1], "int8")

    signs = np.array([[1.0, -1.0] * 6, [-1.0, 1.0] * 6], np.float32)
    assert quantize_embeddings(signs, "ubinary").tolist() == [[0xAA, 0xA0], [0x55, 0x50]]
    assert quantize_embeddings(signs, "binary").tolist() == [[42, 32], [-43, -48]]
    with pytest.raises(UserError, match="must be one of float32, int8, .* got 'int4'"):
        quantize_embeddings(signs, "int4")


def test_the_default_prompt_of_a_model_is_used(pair, monkeypatch):
    model, encoder = pair
    monkeypatch.setattr(model, "default_prompt_name", "other")
    close(encoder.encode(TEXTS), model.encode(TEXTS, prompt="other: "))
    close(encoder.encode(TEXTS, prompt=""), model.encode(TEXTS, prompt=""))


def test_single_text_has_no_batch_dimension(pair):
    """A single text has an embedding without a batch dimension."""
    model, encoder = pair
    assert encoder.encode(TEXTS[0]).shape == (64,)
    assert encoder.encode([]).shape == (0, 64)
    close(encoder.encode_query(TEXTS[0]), model.encode_query(TEXTS[0]))


def test_similarity_function_of_the_model_is_used(pair, monkeypatch):
    """The similarity function is the cosine by default, and otherwise that of the model."""
    model, encoder = pair
    embeddings = encoder.encode(TEXTS)
    exact = torch.nn.functional.normalize(torch.from_numpy(embeddings), dim=1)
    close(encoder.similarity(embeddings, embeddings[:3]).numpy(), (exact @ exact[:3].T).numpy())

    monkeypatch.setattr(model, "similarity_fn_name", "dot")
    close(encoder.similarity(embeddings[0], embeddings).numpy(), embeddings[:1] @ embeddings.T)


def test_wrong_arguments_are_refused(pair):
    encoder = pair[1]
    with pytest.raises(UserError, match="must be a prompt of the model .query, .*, got 'nope'"):
        encoder.encode(TEXTS, prompt_name="nope")
    for size in (0, 65):
        with pytest.raises(UserError, match=f"`truncate_dim` must be between 1 and 64, got {size}"):
            encoder.encode(TEXTS, truncate_dim=size)
    for texts, message in (([None], "got NoneType as text 0"), (["a", 1.5], "got float as text 1")):
        with pytest.raises(UserError, match=f"`texts` must contain strings, {message}"):
            encoder.encode(texts)
    with pytest.raises(UserError, match="must be valid Unicode, got a lone surrogate in text 1"):
        encoder.encode(["a", "b \ud83d"])
    # In older versions, the second argument was a prompt, so it must not become a prompt name.
    with pytest.raises(TypeError):
        encoder.encode(TEXTS, "find: ")


def test_a_model_with_an_unknown_dtype_or_size_is_refused(model_folder):
    for dtype in ("float64", "fp16", torch.float32):
        with pytest.raises(UserError, match=f"`dtype` must be auto, .* or int8, got '?{dtype}"):
            PackedEncoder(model_folder, dtype=dtype)
    with pytest.raises(UserError, match="`max_length` must be at least 3, got 2"):
        PackedEncoder(model_folder, dtype="float32", max_length=2)
    with pytest.raises(UserError, match="`batch_tokens` must be at least 1, got 0"):
        PackedEncoder(model_folder, dtype="float32", batch_tokens=0)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_return_the_same_embeddings(model_folder, copy_of):
    """An encoder can be copied and sent to another process, in spite of its prepacked weights."""
    encoder = PackedEncoder(model_folder, dtype="float32", device="cpu")
    copied = copy_of(encoder)
    assert copied._forward is not None and copied._forward is not encoder._forward
    assert np.array_equal(copied.encode(TEXTS), encoder.encode(TEXTS))


def test_arguments_have_the_names_of_sentence_transformers():
    """All arguments have the names of sentence-transformers, except for `texts`."""
    for name in ("encode", "encode_query", "encode_document"):
        parameters = inspect.signature(getattr(PackedEncoder, name)).parameters
        library_parameters = inspect.signature(getattr(SentenceTransformer, name)).parameters
        assert [*parameters][2:] and {*parameters} - {*library_parameters} == {"texts"}


def test_white_space_is_not_stripped(pair, monkeypatch):
    """The tokenizer gets the white space of a text, which matters for byte-level tokenizers.

    sentence-transformers 6 does not strip texts.
    """
    encoder = pair[1]
    tokenized_texts = []

    def tokenize(texts, **options):
        tokenized_texts.extend(texts)
        return original_tokenizer(texts, **options)

    original_tokenizer = encoder._tokenizer

    monkeypatch.setattr(encoder, "_tokenizer", tokenize)
    encoder.encode([" a text\n"], prompt=" find: ")
    assert tokenized_texts == [" find:  a text\n"]


@pytest.mark.parametrize("name", ["PackedEncoder", "quantize_int8"])
def test_docstring_examples(name, monkeypatch):
    """The examples in docstrings return the values that they show."""
    monkeypatch.chdir(ROOT)
    finder = doctest.DocTestFinder(recurse=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    examples = [test for test in finder.find(getattr(neobert, name), name) if test.examples]
    for test in examples:
        runner.run(test)
    assert examples and runner.summarize(verbose=False).failed == 0


def test_importing_neobert_does_not_import_torch():
    code = "import sys, neobert; dir(neobert); print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
