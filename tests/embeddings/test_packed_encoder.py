"""Tests of `PackedEncoder`: embeddings, batches, the CPU forward pass, lengths, and dtypes."""

import json
import shutil

import numpy as np
import pytest
import torch


pytest.importorskip("sentence_transformers")

from helpers.encode_runs import (
    make_model_folder,  # noqa: F401
    make_reference,  # noqa: F401
    texts_of_many_lengths,
    truncation_of,
)
from helpers.serving import ENCODER
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Normalize,
    Pooling,
    StaticEmbedding,
    Transformer,
)
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
from neobert.embeddings import cpu_forward
from neobert.embeddings.cpu_forward import CpuForward, FloatBlock
from neobert.embeddings.packed_encoder import NotFinite, PackedEncoder
from neobert.encoding.options import OPTIONS
from neobert.quantization import packed_linear


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def close(embeddings, expected, tolerance=1e-5):
    """Check that embeddings are equal up to a tolerance relative to the largest value."""
    np.testing.assert_allclose(
        embeddings, expected, atol=tolerance * np.abs(expected).max(), rtol=0
    )


@pytest.mark.parametrize("length", [64, 8])
@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_packed_embeddings_match_sentence_transformers(
    model_folder, pooling, include_prompt, length
):
    """Embeddings equal those of SentenceTransformer for all poolings, also of truncated texts.

    Instructor models exclude the prompt from the pooling. Their batches are padded instead of
    packed. A prompt that is longer than the maximum length leaves the last token for the pooling.
    """
    texts = [*texts_of_many_lengths(40), "", "  padded with blanks  ", "word " * 200]
    transformer = Transformer(str(model_folder), max_seq_length=length)
    modules = [transformer, Pooling(64, pooling, include_prompt=include_prompt), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu")

    encoder = PackedEncoder(model, batch_tokens=150, dtype="float32", device="cpu")
    assert encoder.packs == include_prompt

    prompt = "find the cat that sat on the mat: "
    close(encoder.encode(texts, prompt=prompt), model.encode(texts, prompt=prompt))


def make_bert(folder, tokenizer_dir, positions):
    """Save a small BERT with a number of positions, and return its directory."""
    torch.manual_seed(0)
    BertModel(BertConfig(**SMALL, max_position_embeddings=positions)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(folder)
    return str(folder)


def test_other_architectures_run_in_sentence_transformers(tmp_path, tokenizer_dir):
    """Other architectures run in SentenceTransformer itself, and give the same embeddings."""
    folder = make_bert(tmp_path, tokenizer_dir, 128)
    encoder = PackedEncoder(folder, batch_tokens=200, dtype="float32", device="cpu")
    texts = texts_of_many_lengths(30)
    assert not encoder.packs, "only NeoBERT supports packing with every attention implementation"
    close(encoder.encode(texts), encoder.sentence_transformer.encode(texts))


def test_a_model_without_a_transformer_is_refused(tmp_path, tokenizer_dir):
    """A sentence encoder whose first module is no transformer is an error, also if it is loaded."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    module = StaticEmbedding(tokenizer.backend_tokenizer, embedding_dim=8)
    loaded = SentenceTransformer(modules=[module], device="cpu")
    loaded.save_pretrained(str(tmp_path))
    for model, arguments in ((str(tmp_path), {"dtype": "float32"}), (loaded, {})):
        with pytest.raises(UserError) as error:
            PackedEncoder(model, device="cpu", **arguments)
        assert str(error.value) == "`model` must start with a transformer, got StaticEmbedding."


def test_weights_that_are_missing_or_do_not_fit_are_refused(tmp_path):
    """An encoder without some of its weights would have other embeddings in every process."""
    model = shutil.copytree(ENCODER, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    missing = {name: value for name, value in weights.items() if "0.qkv" not in name}
    save_file(missing, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="model lack transformer_encoder.0.qkv.weight. Save the"):
        PackedEncoder(str(model), dtype="float32", device="cpu")

    model = shutil.copytree(ENCODER, tmp_path / "other_shape")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 30000}))
    with pytest.raises(UserError, match="other_shape cannot be loaded: "):
        PackedEncoder(str(model), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    "arguments", [{"dtype": "int8"}, {"max_length": 16}, {"trust_remote_code": True}]
)
def test_settings_of_a_loaded_model_are_refused(reference, arguments):
    """An argument that would be ignored for a SentenceTransformer is an error."""
    ((name, value),) = arguments.items()
    message = f"^`{name}` cannot change a SentenceTransformer that is already loaded, got {value!r}"
    with pytest.raises(UserError, match=message):
        PackedEncoder(reference, device="cpu", **arguments)
    assert PackedEncoder(reference, dtype="float32", device="cpu").dtype_name == "float32"


def test_options_that_a_sentence_encoder_ignores_are_refused(reference, tmp_path):
    """A sentence-transformers model has its own pooling and tokenizer."""
    model = SentenceTransformer(modules=[reference[0], Pooling(64, "cls")], device="cpu")
    model.save_pretrained(str(tmp_path))

    def load(*words):
        options = OPTIONS["encode"].read(["a", "b", "--model", str(tmp_path), *words])
        return PackedEncoder(str(tmp_path), "float32", "cpu", **options.encoder.settings())

    with pytest.raises(UserError, match="`pooling` must be cls, that of the .*, got mean."):
        load("--pooling", "mean")
    with pytest.raises(UserError, match="`tokenizer` cannot replace the tokenizer of a sentence-"):
        load("--tokenizer", str(tmp_path))
    assert load().pooling == load("--pooling", "cls").pooling == "cls"


def test_pooling_of_an_encoder_without_a_pooling_module(model_folder):
    """The default pooling is the mean."""
    options = OPTIONS["encode"].read(["a", "b", "--model", "c"])
    settings = options.encoder.settings()
    assert PackedEncoder(str(model_folder), "float32", "cpu", **settings).pooling == "mean"


def test_batches_respect_token_budget_and_cover_all_texts(reference):
    """Batches contain each text once, and keep the token budget unless a single text exceeds it."""
    encoder = PackedEncoder(reference, batch_tokens=100, dtype="float32", device="cpu")
    lengths = np.array([3, 99, 250, 40, 40, 40, 1, 100])
    batches = list(encoder.batches(lengths))
    assert sorted(np.concatenate(batches)) == list(range(8)), "each text must be in one batch"
    assert all(lengths[batch].sum() <= 100 or len(batch) == 1 for batch in batches)
    assert len(batches) == 5, "texts that are sorted by length need five batches"


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_token_counts_of_batches_are_rounded_up(model_folder, dtype, pooling, monkeypatch):
    """Batches have few different numbers of rows, and unused rows do not change the embeddings.

    oneDNN builds a kernel for every number of rows.
    """
    encoder = PackedEncoder(str(model_folder), pooling=pooling, dtype=dtype, device="cpu")
    tokens = [np.arange(5, 5 + length) for length in (1, 2, 20, 30, 40) * 12]
    row_counts = []
    expected = np.concatenate(
        [encoder.embed(tokens[start : start + 5]) for start in range(0, 60, 5)]
    )

    block_call = FloatBlock.__call__
    monkeypatch.setattr(
        FloatBlock,
        "__call__",
        lambda self, hidden, layout: (
            row_counts.append(len(hidden)) or block_call(self, hidden, layout)
        ),
    )
    embeddings = encoder.embed(tokens)
    encoder.embed(tokens[:5])

    # Two blocks run in each of two batches, of 12 * 93 and of 93 tokens.
    assert row_counts == [1152, 1152, 93, 93], "only batches of more than 128 tokens are rounded up"
    close(embeddings, expected, 1e-5 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_runs_if_cpu_forward_does_not_support_it(model_folder, dtype, pooling, monkeypatch):
    """The model itself runs if the CPU forward pass does not support it, with the same embeddings.

    The attention implementation "eager" is not supported. The batches of the model have few
    different numbers of tokens, too.
    """
    encoder = PackedEncoder(str(model_folder), dtype=dtype, device="cpu", pooling=pooling)
    tokens = [np.arange(5, 5 + length) for length in (1, 2, 20, 30, 40) * 12]
    token_counts = []
    expected = encoder.embed(tokens)

    encoder = PackedEncoder(
        str(model_folder),
        dtype=dtype,
        device="cpu",
        pooling=pooling,
        attn_implementation="eager",
    )
    model = encoder.sentence_transformer[0].auto_model
    forward = NeoBERTModel.forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, **inputs: (
            token_counts.append(inputs["input_ids"].shape[1]) or forward(self, **inputs)
        ),
    )

    close(encoder.embed(tokens), expected, 1e-5 if dtype == "float32" else 2e-2)
    encoder.embed(tokens[:5])
    assert token_counts == ([1152, 93] if dtype == "bfloat16" else [1120, 96])


@pytest.mark.parametrize("change", ["attention", "hook", "rope", "gelu"])
def test_models_unsupported_by_cpu_forward(tiny_config, change):
    """`CpuForward` does not support models that it would not reproduce."""
    fields = {"hidden_act": "gelu"} if change == "gelu" else {}
    if change == "rope":
        fields["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}

    model = NeoBERTModel(NeoBERTConfig(**tiny_config, **fields)).eval()
    if change == "attention":
        model.set_attn_implementation("eager")
    if change == "hook":
        model.transformer_encoder[0].register_forward_hook(lambda *values: None)

    assert not CpuForward.supports(model)
    assert CpuForward.supports(NeoBERTModel(NeoBERTConfig(**tiny_config)).eval())


def test_another_thread_may_replace_the_cached_angles(tiny_config, monkeypatch):
    """A text keeps its own angles if a call for a shorter text replaces the cached ones."""
    model = NeoBERTModel(NeoBERTConfig(**tiny_config)).eval().requires_grad_(False)
    forward = CpuForward(model)
    text = np.ones(600, np.int32)
    expected = forward([text])
    forward.angles = forward.angles[:512]

    def run_other_thread(rows):
        forward.angles = forward.angles[:512]
        return packed_linear.number_of_rows(rows)

    monkeypatch.setattr(cpu_forward, "number_of_rows", run_other_thread)
    assert torch.equal(forward([text]), expected)


def test_hidden_states_without_prepacked_weights_are_the_same(tiny_config, monkeypatch):
    """The fallback without prepacked weights gives the same hidden states.

    It is used on CPUs whose prepacked products do not have the same bits in every batch.
    """
    config = NeoBERTConfig(**tiny_config, decoder_init_range=0.1)
    model = NeoBERTModel(config).eval().requires_grad_(False)
    texts = [np.arange(start, start + n) for start, n in ((5, 1), (6, 9), (40, 9), (50, 30))]

    expected = [model(input_ids=torch.from_numpy(ids)[None])[0][0] for ids in texts]
    packed = CpuForward(model)(texts)
    monkeypatch.setattr(packed_linear, "same_bits_in_any_batch", lambda *arguments: False)
    unpacked = CpuForward(model)(texts)

    for states in (packed, unpacked):
        torch.testing.assert_close(states, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_prepacked_product_check_detects_differences(monkeypatch):
    """The check refuses products that depend on the number of rows, or have a wrong weight.

    The result of the check is cached, so the cache is cleared before each call.
    """
    product = packed_linear._product
    pack = packed_linear._pack

    def result_of_the_check():
        packed_linear.same_bits_in_any_batch.cache_clear()
        return packed_linear.same_bits_in_any_batch(48, 32, torch.float32)

    assert result_of_the_check()

    # A product of 17 rows differs slightly.
    with monkeypatch.context() as patch:
        patch.setattr(
            packed_linear, "_product", lambda x, weight: product(x, weight) + 1e-6 * (len(x) == 17)
        )
        assert not result_of_the_check()

    # The packed weight is wrong.
    with monkeypatch.context() as patch:
        patch.setattr(packed_linear, "_pack", lambda weight: pack(weight + 1))
        assert not result_of_the_check()
    packed_linear.same_bits_in_any_batch.cache_clear()


def test_a_token_id_outside_of_the_vocabulary_is_refused(model_folder):
    encoder = PackedEncoder(str(model_folder), dtype="float32", device="cpu")
    with pytest.raises(ValueError, match="input_ids"):
        encoder.embed([np.array([5, 10**6])])


def test_token_budget_includes_padding(reference, monkeypatch):
    """The token budget of padded batches includes the padding."""
    encoder = PackedEncoder(reference, batch_tokens=50, dtype="float32", device="cpu")
    monkeypatch.setattr(encoder, "packs", False)
    lengths = np.array([40, 10, 10, 15, 10, 40])
    batches = [sorted(lengths[batch]) for batch in encoder.batches(lengths)]
    assert batches == [[10, 10, 10], [15], [40], [40]], (
        "N texts must count as N times the longest text"
    )


def test_max_length_defaults_to_the_sentence_encoder(model_folder, tmp_path):
    """`max_length` is by default that of the sentence encoder, and at most that of the model."""
    modules = [Transformer(str(model_folder), max_seq_length=20), Pooling(64, "mean")]
    SentenceTransformer(modules=modules, device="cpu").save_pretrained(str(tmp_path))
    for max_length, expected in ((None, 20), (16, 16), (40, 40), (1000, 64)):
        encoder = PackedEncoder(str(tmp_path), max_length=max_length, dtype="float32", device="cpu")
        assert encoder.max_length == expected == len(encoder.tokenize(["word " * 200])[0])


def test_lengths_before_truncation_with_fast_and_slow_tokenizers(reference, model_folder):
    """`tokenize` appends the lengths of texts before truncation, with fast and slow tokenizers."""

    texts = ["word " * 200, "a [SEP] b " * 60, "", "a cat"]
    expected = [
        truncation_of(model_folder, [("find: " + text).strip()])["longest"] for text in texts
    ]
    encoder = PackedEncoder(reference, dtype="float32", device="cpu")
    lengths = []
    tokens = encoder.tokenize(texts, "find: ", lengths)
    assert lengths == expected and len(tokens[0]) == 64 < lengths[0]

    fast_tokenizer = encoder._tokenizer
    lengths = []
    # A tokenizer written in Python returns a BatchEncoding without the encodings of a fast one.
    encoder._tokenizer = lambda *arguments, **options: BatchEncoding(
        fast_tokenizer(*arguments, **options).data
    )
    encoder.tokenize(texts, "find: ", lengths)
    assert lengths == expected


def test_max_length_is_limited_by_model_positions(tmp_path, tokenizer_dir):
    """`max_length` is limited by the number of positions that the model can use."""
    folder = make_bert(tmp_path, tokenizer_dir, 40)
    encoder = PackedEncoder(folder, max_length=1024, dtype="float32", device="cpu")
    roberta = RobertaModel(RobertaConfig(**SMALL, max_position_embeddings=42))
    assert position_limit(roberta) == 40, "the positions of RoBERTa start at 2"
    assert encoder.max_length == 40 and encoder.encode(["word " * 300]).shape == (1, 32)


@pytest.mark.parametrize("rope_type", ["yarn", "linear"])
def test_context_extended_by_rope_scaling(rope_type, tmp_path, tokenizer_dir):
    """`max_length` may be as long as the extended context, which sentence-transformers ignores."""
    rope = {"rope_type": rope_type, "factor": 2.0}
    config = NeoBERTConfig(**SMALL, max_position_embeddings=40, rope_scaling=rope)
    NeoBERTModel(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tokenizer_dir).save_pretrained(tmp_path / "model")
    modules = [Transformer(str(tmp_path / "model")), Pooling(32, "mean")]
    reference = SentenceTransformer(modules=modules, device="cpu")
    reference.max_seq_length = 80

    encoder = PackedEncoder(str(tmp_path / "model"), max_length=200, dtype="float32", device="cpu")
    texts = ["word " * 70, "word " * 300, "a cat"]
    assert encoder.max_length == 80
    close(encoder.encode(texts), reference.encode(texts))


def test_truncate_dim_of_the_model_is_applied(model_folder, tmp_path):
    """Embeddings have the number of values that the model stores, as in SentenceTransformer."""
    modules = [Transformer(str(model_folder)), Pooling(64, "mean")]
    SentenceTransformer(modules=modules, device="cpu", truncate_dim=8).save_pretrained(
        str(tmp_path)
    )
    reference = SentenceTransformer(str(tmp_path), device="cpu")
    if reference.truncate_dim is None:
        pytest.skip("this version of sentence-transformers does not store truncate_dim")
    encoder = PackedEncoder(str(tmp_path), dtype="float32", device="cpu")
    assert encoder.embedding_dimension == 8
    close(encoder.encode(["a cat", "a dog"]), reference.encode(["a cat", "a dog"]))


def test_error_has_index_of_first_non_finite_embedding(reference, monkeypatch):
    """The error contains the index of the first text whose embedding is not finite.

    Batches are sorted by length, so a later text may be encoded first.
    """
    encoder = PackedEncoder(reference, dtype="float32", device="cpu")
    values = {7: 1.0, 8: float("inf"), 9: float("nan")}
    monkeypatch.setattr(
        encoder,
        "_embed_packed",
        lambda batch: torch.tensor(
            [[values[ids[0]]] * encoder.embedding_dimension for ids in batch]
        ),
    )

    tokens = [np.full(length, token) for length, token in ((9, 7), (5, 7), (3, 8), (2, 9))]

    message = "must be finite, got .* in float32. .* weights are damaged"
    with pytest.raises(NotFinite, match=message) as caught:
        encoder.embed(tokens)
    assert caught.value.index == 2, "the index must be the first one in the order of the input"


# GFLOP/s per core, by the dtype that is expected.
RATES = {
    # A CPU with AMX for float16 and bfloat16.
    "float16": {"float32": 100, "float16": 711, "bfloat16": 800},
    # A CPU with AMX for bfloat16 only.
    "bfloat16": {"float32": 140, "float16": 140, "bfloat16": 990},
    # A CPU whose float16 is less than twice as fast as float32.
    "float32": {"float32": 140, "float16": 270, "bfloat16": 150},
    # A CPU without instructions for 16-bit types.
    "float32 ": {"float32": 150, "float16": 13, "bfloat16": 13},
}


@pytest.mark.parametrize("name", RATES)
def test_auto_selects_the_fastest_cpu_dtype(name, monkeypatch, caplog):
    """`auto` selects the dtype by measured speeds, and logs them; other values measure nothing."""
    caplog.set_level("INFO", "neobert.loading")
    loading._fastest_on_cpu.cache_clear()
    monkeypatch.setattr(
        loading, "matrix_rates", lambda: {dtype: 1e9 * rate for dtype, rate in RATES[name].items()}
    )

    assert loading.choose_dtype("auto", "cpu") == getattr(torch, name.strip())
    assert f"dtype {name.strip()}, from matrix products" in caplog.text
    assert f"float32 {RATES[name]['float32']}" in caplog.text

    caplog.clear()
    assert loading.choose_dtype("float32", "cpu") == torch.float32
    assert not caplog.text
    loading._fastest_on_cpu.cache_clear()
